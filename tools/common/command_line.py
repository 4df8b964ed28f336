"""What the tools in scripts/ share with each other: exit codes, and flags of their own beside the entry scripts'."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from utils.cli import CommandLine, Flag, parse
from utils.config import Loaded, load_config
from utils.config.kinds import AUTO
from utils.distributed.world import read_world
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainingError, UserError
from utils.log import log, start_log
from utils.output_file import check_output_file, nothing_written_yet, written
from utils.precisions import amp_settings_of
from utils.standard_output import OutputError, discard_output, flushed, watch_standard_output

WIDTH = 100
PAGES = {
    "benchmark_amp.py": "docs/performance.md",
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


def run_tool(work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do `work`, and turn what stops it into a line of text and an exit code."""
    start_log(speaks=True)
    nothing_written_yet()
    watch_standard_output()
    try:
        return flushed(lambda: work(argv))
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
        log.warning("interrupted; %s", written())
        return EXIT_INTERRUPTED


@dataclass(frozen=True)
class ToolLine:
    """What a tool was asked for."""

    own: dict[str, tuple[Any, str]]
    """Its own flags: key -> (value, the flag as it is called)."""
    run: CommandLine
    """All else: flags and settings as the entry scripts have them, not checked yet."""

    def load(self, more: dict[str, tuple[Any, str]] | None = None) -> Loaded:
        """The settings, checked; `more` of them as flags give them."""
        loaded = load_config(self.run.cfg, {**self.run.flags, **(more or {})}, self.run.words)
        if loaded.config.DATA.BATCH_SIZE == AUTO:
            where = loaded.sources["DATA.BATCH_SIZE"]
            raise UserError(f"{where}: DATA.BATCH_SIZE auto is for a run; give a tool a number, -batch_size 64 say.")
        return loaded

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

    def file(self, key: str, ending: str = "", default: str = "") -> Path:
        """The file that one of its own flags names, which can be written."""
        text, flag = self.own.get(key, (default, ""))
        path = Path(text).expanduser()
        if ending and path.suffix.lower() != ending:
            raise UserError(f"{flag} {text}: name it {path.stem or 'result'}{ending}.")
        return check_output_file(path, flag)


def about_tool(about: str | None, tool: str) -> str:
    """A tool's docstring as -h shows it: no wider than a terminal, and with the page to read on."""
    parts = (about or "").strip("\n").split("\n\n")
    page = PAGES.get(tool)
    if page and page not in (about or ""):
        parts.insert(len(parts) - parts[-1].rstrip().endswith(":"), f"Read on: {page}.")  # its flags follow a colon
    return "\n\n".join(_narrow(part) for part in parts)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise UserError(f"{message}; -h shows what there is.")


def tool_parser(tool: str, about: str | None) -> argparse.ArgumentParser:
    """For a tool that takes none of the entry scripts' flags; what is wrong with a command line is a UserError."""
    return _Parser(
        prog=f"scripts/{tool}",
        description=about_tool(about, tool),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


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


def _about_flag(flag: Flag) -> str:
    name = f"  {f'-{flag.name} {flag.value}':<18}"
    return textwrap.fill(name + flag.about, WIDTH, subsequent_indent=" " * 20, drop_whitespace=True)


def read_line(argv: list[str], tool: str, about: str | None, own: tuple[Flag, ...]) -> ToolLine:
    """The command line of scripts/`tool`, whose flags `own` stand beside those of the entry scripts.

    -h prints `about` and these flags, and leaves with code 0.
    """
    if any(word.startswith("-") and word.lstrip("-") in ("h", "help") for word in argv):
        print("\n".join([about_tool(about, tool), *map(_about_flag, own)]))
        sys.exit(EXIT_DONE)
    command = parse(argv, f"scripts/{tool}", own)
    if command.action != "train":
        raise UserError(f"{tool} has no -{command.action}; main_single_gpu.py has, with the same flags.")
    keys = {key for flag in own for key in flag.keys}
    given = {key: value for key, value in command.flags.items() if key in keys}
    return ToolLine(given, replace(command, flags={k: v for k, v in command.flags.items() if k not in keys}))


def amp_in_one_word(argv: list[str]) -> list[str]:
    """The command line with `-amp bf16` as `-amp=bf16`, and -amp alone as `-amp=on`.

    For argparse, which would take any word behind -amp for its value.
    """
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-amp", "--amp"):
            valued = bool(rest) and amp_settings_of(rest[0]) is not None
            word = f"{word}={rest.pop(0) if valued else 'on'}"
        words.append(word)
    return words


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
