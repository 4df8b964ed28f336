"""The table of flags, read by the parser and -h: names, values, and the settings they set."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from utils.precisions import AMP_WORDS, amp_settings_of

Action = Literal["train", "dry_run", "print_config", "print_amp", "list_models", "version"]


@dataclass(frozen=True)
class Flag:
    """One flag. -h shows `about` and the default, which comes from the fields below: do not repeat it in `about`."""

    name: str
    about: str
    metavar: str = ""
    """Its value in -h, such as FILE: '' for a flag without a value, in brackets if the value is optional."""
    keys: tuple[str, ...] = ()
    """The settings its value goes to; the first is the one it is named for."""
    sets: tuple[tuple[str, Any], ...] = ()
    """Settings that the flag sets too, with their values."""
    action: Action | None = None
    also: tuple[str, ...] = ()
    """Other names with the same meaning."""
    default: Any = None
    """The value of a tool's own flag that is not given. A setting's default is in the schema instead."""
    default_text: str = ""
    """The default in -h, where it is no fixed value: "as the run validates", "50; on a CPU 5"."""
    kind: Callable[[str], Any] = str
    """Converts the text to the value; its ValueError says what the flag takes."""
    choices: tuple[str, ...] = ()
    required: bool = False
    accepts: Callable[[str], bool] = bool
    """With an optional value: whether the next word is the value."""
    const: str | None = None
    """The value of a flag given without its optional value."""
    append: bool = False
    """If given several times, all values count: `-amp fp16 -amp off` keeps the dtype. Else the last one counts."""

    @property
    def takes_value(self) -> bool:
        return self.metavar != ""

    @property
    def optional_value(self) -> bool:
        return self.metavar.startswith("[")

    @property
    def needs_value(self) -> bool:
        return self.takes_value and not self.optional_value


def device(text: str) -> str:
    """What -device takes; other programs take the number of a GPU."""
    ids = text.removeprefix("cuda:")
    if ids[:1].isdecimal():
        raise ValueError(f"takes cpu, cuda or mps; for these GPUs, write CUDA_VISIBLE_DEVICES={ids} before the command")
    return text


@dataclass(frozen=True)
class Positional:
    """A positional argument, such as the run that a tool reads."""

    name: str
    metavar: str
    about: str
    nargs: Literal["?", "+", "*"] | None = None
    """How many, as in argparse; None: one."""
    kind: Callable[[str], Any] = str


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """For `Flag.kind`: converts whole numbers from `least` to `most`."""

    limits = f"from {least} on" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"takes a whole number {limits}")
        return int(text)

    return number


RANK_FLAGS = (
    Flag("host", "host of rank 0, when ranks are started by hand", "NAME"),
    Flag("port", "port of rank 0", "N", kind=whole(1, 65535)),
    Flag("rank", "rank of this process", "N", kind=whole(0)),
    Flag("world_size", "number of processes", "N", kind=whole(1)),
)
FLAGS: dict[str, tuple[Flag, ...]] = {
    "What to do": (
        Flag("cfg", "YAML file with the run's settings, or the name of a recipe such as vit_digits", "FILE"),
        Flag("eval", "validate once and exit", keys=("EVAL",)),
        Flag("dry_run", "make a few real updates; estimate memory and time of the whole run", action="dry_run"),
        Flag("print_config", "print all settings and where each comes from", action="print_config"),
        Flag("print_amp", "print the precision that each part of the model runs in", action="print_amp"),
        Flag(
            "list_models",
            "print timm's model names, all or those that match a glob such as 'vit_*'",
            "[GLOB]",
            action="list_models",
            accepts=lambda text: "=" not in text,
        ),
        Flag("version", "print the versions of vitamp, torch and timm", action="version"),
        Flag("h", "print this help", also=("help",)),
    ),
    "Precision": (
        Flag(
            "amp",
            f"mixed precision: {AMP_WORDS}; without a value: on",
            "[HOW]",
            ("AMP.ENABLED",),
            accepts=lambda text: amp_settings_of(text) is not None,
            const="on",
            append=True,
        ),
    ),
    "Your own code": (
        Flag(
            "use",
            "your own losses, metrics, models, augmentations or data sets: Python files, separated by commas "
            "(docs/own_code.md)",
            "FILE",
            ("USE",),
        ),
        Flag("trust", "execute the copies of such files in the folder of the run that is opened"),
    ),
    "Data": (
        Flag(
            "dataset",
            "data set: imagenet2012, imagefolder, csv, shards, hf:NAME, ... (docs/data.md)",
            "NAME",
            ("DATA.DATASET",),
            default_text="recognised in -data_path",
        ),
        Flag("data_path", "folder of the data set; a folder needs no -data_path before it", "DIR", ("DATA.DATA_PATH",)),
        Flag("columns", "columns of a csv table's paths and labels", "file=NAME,label=NAME", ("DATA.COLUMNS",)),
        Flag(
            "part",
            "with -eval: split to evaluate: train, val, test or all",
            "PART",
            ("DATA.PART",),
            default_text="val; all of other data than the model's without a validation split",
        ),
        Flag(
            "batch_size",
            "images per process, also for validation; auto: as many as fit into memory",
            "N|auto",
            ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL"),
        ),
        Flag(
            "batch_size_eval",
            "images per process for validation",
            "N",
            ("DATA.BATCH_SIZE_EVAL",),
            default_text="-batch_size",
        ),
        Flag(
            "image_size",
            "side of the model's input, or height and width",
            "PIXELS|HEIGHT,WIDTH|auto",
            ("DATA.IMAGE_SIZE",),
        ),
        Flag(
            "num_workers",
            "loading processes per rank",
            "N",
            ("DATA.NUM_WORKERS",),
            default_text="depends on the number of cores",
        ),
    ),
    "Model": (
        Flag("model", "name of a timm model (-list_models prints all)", "NAME", ("MODEL.NAME",)),
        Flag("num_classes", "number of classes; auto: as many as the data set has", "N|auto", ("MODEL.NUM_CLASSES",)),
        Flag(
            "pretrained",
            "weights to start from: a file, a run, or the name of a timm model, for its weights",
            "FROM",
            ("MODEL.PRETRAINED",),
        ),
        Flag(
            "mae_pretrain",
            "learn without labels: hide most patches and predict their pixels (docs/pretraining.md)",
            keys=("MODEL.MAE_PRETRAIN",),
        ),
        Flag(
            "teacher_model",
            "teacher for distillation: a timm model, a run, or NAME=FILE (timm's name and a file of weights)",
            "FROM",
            ("TRAIN.TEACHER_MODEL",),
            also=("teacher_model_path",),
        ),
    ),
    "Training": (
        Flag("epochs", "number of epochs; auto: as many as fit into -max_time", "N|auto", ("TRAIN.NUM_EPOCHS",)),
        Flag(
            "lr",
            "learning rate after the warm-up; turns off scaling by the batch size (TRAIN.LINEAR_SCALED_LR=null)",
            "RATE",
            ("TRAIN.BASE_LR",),
            sets=(("TRAIN.LINEAR_SCALED_LR", None),),
        ),
        Flag("weight_decay", "weight decay", "X", ("TRAIN.WEIGHT_DECAY",)),
        Flag("seed", "seed of all random numbers", "N", ("SEED",)),
    ),
    "The run": (
        Flag(
            "output",
            "the run's own folder",
            "DIR",
            ("OUTPUT",),
            default_text="the resumed run's, else a new one in ./output",
        ),
        Flag("resume", "resume a run or checkpoint; auto: the run in -output", "PATH|auto", ("MODEL.RESUME",)),
        Flag(
            "last_epoch",
            "start after epoch N, with the schedule advanced to it; with -resume, from the checkpoint of this epoch",
            "N",
            ("TRAIN.LAST_EPOCH",),
        ),
        Flag("accum_iter", "micro-batches per update", "N", ("TRAIN.ACCUM_ITER",)),
        Flag("save_freq", "epochs between checkpoints", "N", ("SAVE_FREQ",)),
        Flag("log_freq", "updates between log lines", "N", ("REPORT_FREQ",)),
        Flag("validate_freq", "epochs between validations", "N", ("VALIDATE_FREQ",)),
        Flag("max_time", "save and exit before this time is up; -resume continues the run", "HH:MM:SS", ("MAX_TIME",)),
        Flag("profile", "write a torch profiler trace of N updates", "N", ("PROFILE",)),
    ),
    "Devices and processes": (
        Flag("device", "cpu, cuda or mps", "NAME", ("DEVICE",), default_text="the best available", kind=device),
        Flag("ngpus", "number of processes that main_multi_gpu.py starts; -1: one per visible GPU", "N", ("NGPUS",)),
        Flag(
            "threads",
            "CPU threads per process",
            "N",
            ("THREADS",),
            default_text="what SLURM reserves, else cores / ranks on this machine",
        ),
        Flag(
            "backend",
            "nccl or gloo",
            "NAME",
            ("DIST.BACKEND",),
            default_text="nccl on GPUs, gloo on CPUs",
            choices=("nccl", "gloo"),
        ),
        *RANK_FLAGS,
    ),
}
BY_NAME = {flag.name: flag for flag in chain.from_iterable(FLAGS.values())}
HELP = BY_NAME["h"]
IGNORED = Flag("local_rank", "", "N")
"""torch.distributed.launch passes it, and sets the environment variable LOCAL_RANK, which is used instead."""
