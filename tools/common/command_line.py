"""What the tools in scripts/ share with each other: exit codes, and flags of their own beside the entry scripts'."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.cli import WIDTH, CommandLine, Parser, command_line
from utils.config import Loaded, load_config
from utils.config.kinds import AUTO
from utils.distributed.world import read_world
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainingError, UserError, nearest
from utils.flags import BY_NAME, HELP, Flag, Positional
from utils.gpus import limit_visible_gpus
from utils.log import log, start_log
from utils.output_file import check_output_file, describe_written_files, forget_written_files
from utils.standard_output import OutputError, discard_output, flush_after, watch_standard_output

PAGES = {
    "benchmark_amp.py": "docs/benchmarks.md",
    "benchmark_data.py": "docs/data_speed.md",
    "check_data.py": "docs/broken_images.md",
    "checkpoint.py": "docs/checkpoints.md",
    "choose_precision.py": "docs/choose_precision.md",
    "compare.py": "docs/compare.md",
    "evaluate.py": "docs/predict.md",
    "export.py": "docs/export.md",
    "import_paddle.py": "docs/paddlevit_weights.md",
    "pack_images.py": "docs/shards.md",
    "predict.py": "docs/predict.md",
    "report.py": "docs/report.md",
    "show_batch.py": "docs/data.md",
}
"""Where to read on, by tool."""
WEIGHTS = Flag(
    "weights",
    "the model's weights or their EMA; auto: those that validated better",
    "auto|model|ema",
    default="auto",
    choices=("auto", "model", "ema"),
)
"""Of the tools that take a trained model."""
OVERWRITE = Flag("overwrite", "replace a file that exists; without it, such a file is refused")
"""Of the tools that write a file which the user names."""


def run_tool(work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do `work`, and turn what stops it into a line of text and an exit code."""
    start_log(to_terminal=True)
    forget_written_files()
    watch_standard_output()
    try:
        return flush_after(lambda: work(argv))
    except UserError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except TrainingError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except OutputError as error:
        log.error("%s; what is there is incomplete.", error)
        discard_output()
        return EXIT_USAGE
    except BrokenPipeError:  # `| head` has seen enough
        discard_output()
        return EXIT_DONE
    except KeyboardInterrupt:
        log.warning("interrupted; %s", describe_written_files())
        return EXIT_INTERRUPTED


@dataclass(frozen=True)
class Tool:
    """The command line of scripts/`name`. -h shows `about`, the places and the tool's own flags."""

    name: str
    about: str | None
    flags: tuple[Flag, ...]
    places: tuple[Positional, ...] = ()
    settings: bool = True
    """Whether the flags and settings of the entry scripts hold too."""
    command: str = ""
    """The first word, where a tool has several commands; it is read before."""

    def read(self, argv: Sequence[str]) -> ToolLine:
        parser = Parser(
            f"scripts/{self.name} {self.command}".rstrip(),
            about_tool(self.about, self.name),
            {"Flags of its own" if self.settings else "Flags": (*self.flags, HELP)},
            tuple(BY_NAME.values()) if self.settings else (),
            self.places,
            self.settings,
        )
        given, words = parser.read(argv)
        known = {flag.name: flag for flag in self.flags}
        mine = {*known, *(place.name for place in self.places)}
        run = command_line({name: value for name, value in given.items() if name not in mine}, words)
        if run.action != "train":
            raise UserError(f"{self.name} has no -{run.action}; main_single_gpu.py has, with the same flags.")
        own = {
            known[name].keys[0] if known[name].keys else name.upper(): (value, f"-{name}")
            for name, value in given.items()
            if name in known
        }
        defaults = {**dict.fromkeys(mine), **{flag.name: flag.default for flag in self.flags}}
        return ToolLine(own, run, Namespace(**{**defaults, **given}))


@dataclass(frozen=True)
class ToolLine:
    """What a tool was asked for."""

    own: dict[str, tuple[Any, str]]
    """Its own flags, if given: key -> (value, the flag as it is called)."""
    run: CommandLine
    """All else: flags and settings as the entry scripts have them, not checked yet."""
    asked: Namespace = field(default_factory=Namespace)
    """Its own flags and places by name, with defaults where they are not given."""

    def load(self, more: dict[str, tuple[Any, str]] | None = None) -> Loaded:
        """The settings, checked, before CUDA is asked for anything; `more` of them as flags give them."""
        self.show_gpus()
        loaded = load_config(self.run.cfg, {**self.run.flags, **(more or {})}, self.run.words)
        if loaded.config.DATA.BATCH_SIZE == AUTO:
            where = loaded.sources["DATA.BATCH_SIZE"]
            raise UserError(f"{where}: DATA.BATCH_SIZE auto is for a run; give a tool a number, -batch_size 64 say.")
        return loaded

    def show_gpus(self) -> None:
        """Hide all GPUs but those of -gpus; before CUDA is asked for anything."""
        limit_visible_gpus(self.run, one_process=False)

    def whole(self, key: str, default: int, least: int = 1, most: int | None = None) -> int:
        """The whole number that one of its own flags gives."""
        text, flag = self.own.get(key, (default, ""))
        if not str(text).isdecimal() or int(text) < least or (most is not None and int(text) > most):
            upper = "on" if most is None else f"to {most}"
            raise UserError(f"{flag} {text}: takes a whole number from {least} {upper}, such as {default}.")
        return int(text)

    def above_zero(self, key: str, default: float) -> float:
        """The number above 0 that one of its own flags gives."""
        text, flag = self.own.get(key, (default, ""))
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise UserError(f"{flag} {text}: takes a number above 0, such as {default:g}.")
        return number

    def file(self, key: str, ending: str = "", default: str = "", fresh: bool = True) -> Path:
        """The file that one of its own flags names, which can be written.

        `fresh`: it must not exist, unless -overwrite is given.
        """
        text, flag = self.own.get(key, (default, ""))
        path = Path(text).expanduser()
        if ending and path.suffix.lower() != ending:
            raise UserError(f"{flag} {text}: name it {path.stem or 'result'}{ending}.")
        return check_output_file(path, flag, fresh=fresh and not getattr(self.asked, "overwrite", True))


def first_word(
    argv: Sequence[str],
    tool: str,
    about: str | None,
    known: Mapping[str, str],
    kind: str,
    former: Mapping[str, str] | None = None,
) -> str:
    """The first word of a tool with several commands: one of `known`, names and what they are about. `kind` names them.

    A name of `former` stands for its new one, which is logged.
    -h in its place prints `about` and the list, and leaves with code 0.
    """
    asked = argv[0] if argv else ""
    if asked.lstrip("-") in ("h", "help"):
        print(f"{about_tool(about, tool)}\n")
        for name, what in known.items():
            print(textwrap.fill(f"  {name:<12}{what}", WIDTH, subsequent_indent=" " * 14))
        sys.exit(EXIT_DONE)
    if former and asked in former:
        log.warning("%s %s is now %s %s", tool, asked, tool, former[asked])
        asked = former[asked]
    if asked not in known:
        what = f"{asked}: there is no such {kind}.{nearest(asked, known)}" if asked else f"no {kind} was named."
        raise UserError(f"{what} First comes {'|'.join(known)}; -h shows what there is.")
    return asked


def about_tool(about: str | None, tool: str) -> str:
    """A tool's docstring as -h shows it: no wider than a terminal, and with the page to read on."""
    parts = (about or "").strip("\n").split("\n\n")
    page = PAGES.get(tool)
    if page and page not in (about or ""):
        parts.append(f"Read on: {page}.")
    return "\n\n".join(_narrow(part) for part in parts)


def _narrow(part: str) -> str:
    """Sentences are wrapped anew; command lines, which are indented, are broken before a flag."""
    lines = re.sub(r" *\\\n +", " ", part).splitlines()
    if not any(line.startswith(" ") for line in lines):
        return "\n".join(textwrap.wrap(" ".join(lines), WIDTH))
    return "\n".join(piece for line in lines for piece in _broken(line))


def _broken(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    if line.lstrip().startswith("python ") and (at := line.rfind(" -", 20, WIDTH - 2)) > 0:
        return [f"{line[:at].rstrip()} \\", *_broken(f"        {line[at:].lstrip()}")]
    gap = re.match(r"\s+\S+\s{2,}", line)  # a word, and behind it what it means
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * (gap.end() if gap else 4))


def about_one_device(loaded: Loaded) -> list[str]:
    """What a tool that measures one device says of -ngpus."""
    number = loaded.config.NGPUS
    if number > 1 or (number == -1 and loaded.sources["NGPUS"] == "-ngpus"):
        return [f"-ngpus {number}: one device is measured, with the batch of one"]
    return []


def check_one_training(loaded: Loaded, tool: str) -> None:
    """A tool that measures trainings takes settings of one that begins at its beginning, in one process."""
    config = loaded.config
    for key, instead in (("EVAL", "it measures training"), ("MODEL.RESUME", "give -pretrained RUN to begin there")):
        if config.EVAL if key == "EVAL" else config.MODEL.RESUME:
            raise UserError(f"{loaded.sources[key]}: {tool} has no {key}; {instead}.")
    world = read_world(config.DIST)
    if world is not None and world.size > 1:
        raise UserError(f"{tool} was started {world.size} times ({world.launcher}): start it once.")
