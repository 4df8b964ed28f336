"""The command line: `-flag value`, `-flag=value`, `--flag` and `KEY=VALUE` words, in any order.

Hand-made, since argparse knows neither an optional value that only some words can be (`-amp O1`, `-amp
SEED=1`) nor a suggestion for a mistyped flag. Each flag stands once, in FLAGS.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from utils.config.keys import suggest
from utils.errors import EXIT_DONE, UserError, nearest
from utils.foreign_flags import hint
from utils.gpus import show_only
from utils.precisions import AMP_WORDS, amp_settings_of

Action = Literal["train", "dry_run", "print_config", "print_amp", "list_models", "version"]


@dataclass(frozen=True)
class CommandLine:
    """What the user asked for; the settings among it are not checked yet."""

    cfg: str | None = None
    flags: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Dotted key -> (value, the flag it came by)."""
    words: dict[str, str] = field(default_factory=dict)
    """Dotted key -> the text behind `=`."""
    action: Action = "train"
    pattern: str | None = None
    """-list_models: which ones."""


@dataclass(frozen=True)
class Flag:
    name: str
    about: str
    value: str = ""
    """How -h shows its value; '' for a flag that takes none."""
    keys: tuple[str, ...] = ()
    """The settings its value goes to; the first is the one it is named for."""
    action: Action | None = None


FLAGS: dict[str, tuple[Flag, ...]] = {
    "What to do": (
        Flag("cfg", "the YAML file with the run's settings", "FILE"),
        Flag("eval", "validate once and end", keys=("EVAL",)),
        Flag("dry_run", "a few real updates, and what a run takes of memory, time and disk", action="dry_run"),
        Flag("print_config", "show all settings and where each came from", action="print_config"),
        Flag("print_amp", "show which precision each part would run in", action="print_amp"),
        Flag("list_models", "names of timm's models, all or those like 'vit_*'", "[GLOB]", action="list_models"),
        Flag("version", "show the versions of vitamp, torch and timm", action="version"),
        Flag("h", "show this"),
    ),
    "Precision": (Flag("amp", f"mixed precision: {AMP_WORDS}; alone: on", "[HOW]", ("AMP.ENABLED",)),),
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
        Flag("batch_size_eval", "another number for validation", "N", ("DATA.BATCH_SIZE_EVAL",)),
        Flag("image_size", "height and width the model sees", "PIXELS", ("DATA.IMAGE_SIZE",)),
        Flag("num_workers", "loading processes per rank", "N", ("DATA.NUM_WORKERS",)),
    ),
    "Model": (
        Flag("num_classes", "classes of the classifier", "N", ("MODEL.NUM_CLASSES",)),
        Flag("pretrained", "weights to start from: a file, a run or a timm name", "FROM", ("MODEL.PRETRAINED",)),
        Flag("teacher_model", "distillation: a timm name, a run, or NAME=FILE", "FROM", ("TRAIN.TEACHER_MODEL",)),
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
        Flag("device", "cpu, cuda or mps", "NAME", ("DEVICE",)),
        Flag("ngpus", "processes main_multi_gpu.py starts; -1: one a visible GPU", "N", ("NGPUS",)),
        Flag("gpus", "use these GPUs only, as CUDA_VISIBLE_DEVICES does", "0,1,..."),
        Flag("threads", "CPU threads per process", "N", ("THREADS",)),
        Flag("backend", "nccl or gloo", "NAME", ("DIST.BACKEND",)),
        Flag("host", "where rank 0 listens, when ranks are started by hand", "NAME", ("DIST.HOST",)),
        Flag("port", "its port", "N", ("DIST.PORT",)),
        Flag("rank", "this process's rank", "N", ("DIST.RANK",)),
        Flag("world_size", "number of processes", "N", ("DIST.WORLD_SIZE",)),
    ),
}
BY_NAME = {flag.name: flag for group in FLAGS.values() for flag in group}
ALIASES = {"help": "h", "teacher_model_path": "teacher_model"}
# torch.distributed.launch hands it over; the environment it sets says the same and is what counts.
IGNORED = Flag("local_rank", "", "N")

BOOLEANS = {"true", "false", "none", "null", "0", "1"}
"""Words that others take for on and off: what is spelt like them is not what is meant."""

WORD = re.compile(r"([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def parse(argv: list[str], program: str, own: tuple[Flag, ...] = ()) -> CommandLine:
    """Read the command line. -h prints and leaves with code 0. `own`: the program's flags beside those of all."""
    known = {**BY_NAME, **{flag.name: flag for flag in own}}
    cfg, pattern, gpus, words = None, None, None, dict[str, str]()
    flags: dict[str, tuple[Any, str]] = {}
    actions: dict[Action, str] = {}
    before: Flag | None = None
    for flag, value in pieces(argv, known):
        if flag is None:
            key, separator, text = value.partition("=")
            if not separator or not WORD.fullmatch(value):
                raise _stray(value, before, known)
            words[key] = text
        elif flag.name == "h":
            print(usage(program))
            sys.exit(EXIT_DONE)
        elif flag.name == "cfg":
            cfg = value
        elif flag.name == "gpus":
            gpus = value
        elif flag.action:
            actions[flag.action], pattern = f"-{flag.name}", value if flag.name == "list_models" else pattern
        else:
            flags.update(_settings_of(flag, value, flags))
        before = flag
    if gpus is not None:
        given = {**{key: value for key, (value, _) in flags.items()}, **words}
        show_only(gpus, given.get("DEVICE"), given.get("NGPUS"), one_process=program == "main_single_gpu.py")
    return CommandLine(cfg, flags, words, _only(actions), pattern)


def pieces(argv: list[str], known: dict[str, Flag]) -> Iterator[tuple[Flag | None, Any]]:
    """(flag, its value or None) for each flag, (None, text) for each other word."""
    rest = list(argv)
    while rest:
        text = rest.pop(0)
        match = FLAG.fullmatch(text)
        if match is None:
            yield None, text
            continue
        flag, value = _flag(text, match[1], known, rest), match[2]
        if value is not None and not flag.value:
            raise UserError(f"{text}: -{flag.name} takes no value; leave out '={value}'")
        if value is None and flag.value and rest and _may_be_value(flag, rest[0]):
            value = rest.pop(0)
        if not value and flag.value and not flag.value.startswith("["):
            raise UserError(f"-{flag.name} needs a value: -{flag.name} {flag.value} ({flag.about})")
        yield flag, value


def _flag(text: str, name: str, known: dict[str, Flag], rest: list[str]) -> Flag:
    name = name.replace("-", "_")
    if name == IGNORED.name:
        return IGNORED
    flag = known.get(ALIASES.get(name, name))
    if flag is None:
        spelling, equals, value = text.partition("=")
        if not equals and rest and not FLAG.fullmatch(rest[0]) and not WORD.fullmatch(rest[0]):
            value = rest[0]
        raise UserError(f"unknown flag {spelling}.{hint(name, value, [*known, *ALIASES])} -h lists all flags.")
    return flag


def _may_be_value(flag: Flag, text: str) -> bool:
    if flag.name == "amp":
        return amp_settings_of(text) is not None
    if flag.name == "list_models" and WORD.fullmatch(text):
        return False
    # `-ngpus -1` is a value; a value that begins like a flag needs `-flag=value`.
    return FLAG.fullmatch(text) is None


def _settings_of(flag: Flag, value: Any, before: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    source = f"-{flag.name}"
    if flag.name == "amp":
        chosen = amp_settings(value)
        return {key: (setting, source) for key, setting in chosen.items()}
    # What -batch_size says about validation gives way to -batch_size_eval, whichever comes first.
    keys = [key for key in flag.keys if key == flag.keys[0] or before.get(key, ("", source))[1] == source]
    return dict.fromkeys(keys, (value if flag.value else True, source))


def amp_settings(value: str | None) -> dict[str, Any]:
    """The settings that -amp stands for, with `value` behind it or alone."""
    if value is None:
        return {"AMP.ENABLED": True}
    settings = amp_settings_of(value)
    if settings is None:
        raise UserError(f"-amp={value}: {_about_amp(value)}")
    return {f"AMP.{key}": setting for key, setting in settings.items()}


def _about_amp(value: str) -> str:
    """What to write instead of `-amp value`."""
    guess = "" if value.casefold() in BOOLEANS else nearest(value, AMP_WORDS.split()).lstrip() + " "
    return f"{guess}-amp alone switches it on; leave it out for fp32; or give one of: {AMP_WORDS}.".lstrip()


def _only(actions: dict[Action, str]) -> Action:
    if len(actions) > 1:
        raise UserError(f"{' and '.join(actions.values())} exclude each other; give one of them")
    return next(iter(actions)) if actions else "train"


def _stray(text: str, before: Flag | None, known: dict[str, Flag]) -> UserError:
    """A word that is neither a flag, nor a flag's value, nor KEY=VALUE: say what it might have been."""
    key, separator, value = text.partition("=")
    name = text.replace("-", "_").partition("=")[0]
    if text.endswith((".yaml", ".yml")):
        about = f" Did you mean -cfg {text}?"
    elif separator and name in known:
        about = f" Did you mean -{text}?"
    elif separator:
        close = suggest(key.upper())
        about = (
            close.replace("?", f"={value}?")
            if close
            else " Settings are given as KEY=VALUE, such as TRAIN.BASE_LR=1e-4."
        )
    elif before is not None and before.name == "amp":
        about = f" {_about_amp(text)}"
    elif name in known:
        about = f" Did you mean -{name}?"
    else:
        about = f" -{before.name} takes no value." if before and not before.value else ""
        about = about or " Settings are given as -flag value or KEY=VALUE; -h lists the flags."
    return UserError(f"what is '{text}' on the command line?{about}")


def usage(program: str) -> str:
    """The text of -h."""
    lines = [
        f"usage: python {program} [-cfg FILE] [-flag value ...] [KEY=VALUE ...]",
        "",
        "Trains a Vision Transformer, in mixed precision with -amp. The usual command lines:",
        "",
        f"  python {program} -cfg configs/vit_digits.yaml -amp",
        f"  python {program} -cfg configs/vit_small_patch16_224.yaml -data_path /data/imagenet -amp",
        f"  python {program} -cfg configs/vit_digits.yaml -output output/mine -resume auto",
        f"  python {program} -eval -resume output/mine",
        f"  python {program} -cfg configs/vit_digits.yaml -amp -dry_run TRAIN.BASE_LR=1e-3",
    ]
    for group, flags in FLAGS.items():
        lines += ["", f"{group}:"]
        for flag in flags:
            text = f"  {f'-{flag.name} {flag.value}'.rstrip():<24}{flag.about}"
            lines += textwrap.wrap(text, 100, subsequent_indent=" " * 26, break_on_hyphens=False)
    lines += ["", *textwrap.wrap(USAGE_END, 100)]
    return "\n".join(lines)


USAGE_END = (
    "-flag value, -flag=value and --flag value are alike, and so are - and _ inside a name. KEY=VALUE sets any "
    "setting of docs/config.md and wins over files and flags: TRAIN.BASE_LR=1e-4. Read on: README.md, and "
    "docs/troubleshooting.md where something goes wrong. Tools beside training are in scripts/, each with -h."
)


def version_text() -> str:
    """What -version prints; read without importing torch, which takes seconds."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    lines = [f"vitamp {tomllib.loads(project.read_text(encoding='utf-8'))['project']['version']}"]
    for package in ("torch", "timm"):
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)
