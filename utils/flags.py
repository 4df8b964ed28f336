"""The table of flags, which the parser, -h and completion read: names, values, and the settings they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from utils.precisions import AMP_WORDS, amp_settings_of

Action = Literal["train", "dry_run", "print_config", "print_amp", "list_models", "version"]


@dataclass(frozen=True)
class Flag:
    name: str
    about: str
    value: str = ""
    """How -h shows its value: '' for a flag that takes none, in brackets one that may be left out."""
    keys: tuple[str, ...] = ()
    """The settings its value goes to; the first is the one it is named for."""
    action: Action | None = None
    also: tuple[str, ...] = ()
    """Other names that mean the same."""
    old: tuple[str, ...] = ()
    """Names it had before; they still work, with a warning that names the new one."""
    default: Any = None
    """For -h, and the value of a tool's own flag that is not given. A setting's default is in the schema."""
    kind: Callable[[str], Any] = str
    """Makes its value of the text; ValueError says what the flag takes."""
    choices: tuple[str, ...] = ()
    required: bool = False
    fits: Callable[[str], bool] = bool
    """Where the value may be left out: whether the next word is the value."""

    alone: str | None = None
    """What it is without its value, where that may be left out."""
    adds_up: bool = False
    """Given twice, both values count: `-amp fp16 -amp off` keeps the dtype. Of other flags the last one does."""

    @property
    def optional(self) -> bool:
        return self.value.startswith("[")


@dataclass(frozen=True)
class Place:
    """A word that needs no flag, such as the run that a tool reads."""

    name: str
    shown: str
    about: str
    many: Literal["?", "+", "*"] | None = None
    """How many, as argparse writes it; None: one."""
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """For `Flag.kind`: whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"takes a whole number from {least} {'on' if most is None else f'to {most}'}")
        return int(text)

    return number


FLAGS: dict[str, tuple[Flag, ...]] = {
    "What to do": (
        Flag("cfg", "the YAML file with the run's settings", "FILE"),
        Flag("eval", "validate once and end", keys=("EVAL",)),
        Flag("dry_run", "a few real updates, and what a run takes of memory, time and disk", action="dry_run"),
        Flag("print_config", "show all settings and where each came from", action="print_config"),
        Flag("print_amp", "show which precision each part would run in", action="print_amp"),
        Flag(
            "list_models",
            "names of timm's models, all or those like 'vit_*'",
            "[GLOB]",
            action="list_models",
            fits=lambda text: "=" not in text,
        ),
        Flag("version", "show the versions of vitamp, torch and timm", action="version"),
        Flag("h", "show this", also=("help",)),
    ),
    "Precision": (
        Flag(
            "amp",
            f"mixed precision: {AMP_WORDS}; alone: on",
            "[HOW]",
            ("AMP.ENABLED",),
            fits=lambda text: amp_settings_of(text) is not None,
            alone="on",
            adds_up=True,
        ),
    ),
    "Data": (
        Flag(
            "dataset",
            "imagenet2012, imagefolder, csv, shards, hf:NAME, ... (docs/data.md)",
            "NAME",
            ("DATA.DATASET",),
        ),
        Flag("data_path", "the folder it is in", "DIR", ("DATA.DATA_PATH",)),
        Flag(
            "batch_size",
            "images per process, for validation too; auto: as many as fit",
            "N|auto",
            ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL"),
        ),
        Flag(
            "batch_size_eval", "another number for validation", "N", ("DATA.BATCH_SIZE_EVAL",), default="as -batch_size"
        ),
        Flag("image_size", "height and width the model sees", "PIXELS", ("DATA.IMAGE_SIZE",)),
        Flag("num_workers", "loading processes per rank", "N", ("DATA.NUM_WORKERS",), default="by the cores"),
    ),
    "Model": (
        Flag("num_classes", "classes of the classifier", "N", ("MODEL.NUM_CLASSES",)),
        Flag("pretrained", "weights to start from: a file, a run or a timm name", "FROM", ("MODEL.PRETRAINED",)),
        Flag(
            "teacher_model",
            "distillation: a timm name, a run, or NAME=FILE",
            "FROM",
            ("TRAIN.TEACHER_MODEL",),
            also=("teacher_model_path",),
        ),
    ),
    "The run": (
        Flag("output", "the run's own folder; otherwise one is made in ./output", "DIR", ("OUTPUT",)),
        Flag("resume", "go on from a run or checkpoint; auto: from -output", "PATH|auto", ("MODEL.RESUME",)),
        Flag("last_epoch", "epochs that count as done", "N", ("TRAIN.LAST_EPOCH",)),
        Flag("accum_iter", "micro-batches per update", "N", ("TRAIN.ACCUM_ITER",)),
        Flag("save_freq", "epochs between checkpoints", "N", ("SAVE_FREQ",)),
        Flag("log_freq", "updates between log lines", "N", ("REPORT_FREQ",)),
        Flag("validate_freq", "epochs between validations", "N", ("VALIDATE_FREQ",)),
        Flag("max_time", "save and end after this time, to be resumed", "HH:MM:SS", ("MAX_TIME",)),
        Flag("profile", "write a profiler trace of this many updates", "N", ("PROFILE",)),
    ),
    "Devices and processes": (
        Flag("device", "cpu, cuda or mps", "NAME", ("DEVICE",), default="the best there is"),
        Flag("ngpus", "processes main_multi_gpu.py starts; -1: one a visible GPU", "N", ("NGPUS",)),
        Flag("gpus", "use these GPUs only, as CUDA_VISIBLE_DEVICES does", "0,1,..."),
        Flag("threads", "CPU threads per process", "N", ("THREADS",), default="the cores, divided"),
        Flag("backend", "nccl or gloo", "NAME", ("DIST.BACKEND",), default="by the device"),
        Flag("host", "where rank 0 listens, when ranks are started by hand", "NAME", ("DIST.HOST",)),
        Flag("port", "its port", "N", ("DIST.PORT",)),
        Flag("rank", "this process's rank", "N", ("DIST.RANK",)),
        Flag("world_size", "number of processes", "N", ("DIST.WORLD_SIZE",)),
    ),
}
BY_NAME = {flag.name: flag for group in FLAGS.values() for flag in group}
HELP = BY_NAME["h"]
IGNORED = Flag("local_rank", "", "N")
"""torch.distributed.launch gives it; the environment it sets says the same and is what counts."""
