"""Where the program is, in a clone or in the installed package; its version, and how its commands are started.

The texts in the code name the commands of a clone: `python scripts/evaluate.py RUN`. Where pip has installed the
program, the same command is `vitamp evaluate RUN`. `as_started_here` translates texts for the log and for -h.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ROOT.name == "program" and (ROOT.parent / "__main__.py").is_file()
"""Whether pip has installed the program: then it is a folder of the package `vitamp`."""
ENTRIES = {"main_single_gpu": "train", "main_multi_gpu": "multi"}
"""Entry script -> subcommand of `vitamp`. The other subcommands have the names of their files in scripts/."""
_SCRIPT = re.compile(r"(?<![\w/.-])(?:python )?(?:scripts/)?(\w+)\.py\b(?!, line)")
_RECIPE = re.compile(r"(?<=-cfg )configs/(\w+)\.yaml")


@cache
def version() -> str:
    """The version of vitamp. pyproject.toml has it, and so has what pip installed."""
    if INSTALLED:
        return importlib.metadata.version("vitamp")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(project)["project"]["version"]


def as_started_here(text: str, installed: bool = INSTALLED) -> str:
    """A text that names commands and recipes of a clone, with those of the installed program if it is one."""
    return _RECIPE.sub(r"\1", _SCRIPT.sub(_subcommand, text)) if installed else text


def help_here(text: str, installed: bool = INSTALLED) -> str:
    """The same for -h, which names scripts without their folder too. Log lines may mean a file of the user's own."""
    text = re.sub(r"(?<![\w/.-])(?=(\w+)\.py\b)", _with_folder, text) if installed else text
    return as_started_here(text, installed)


def _with_folder(before: re.Match[str]) -> str:
    return "scripts/" if before[1] in _tools() else ""


def as_typed(argv: Sequence[str]) -> str:
    """The command that started this process, from its sys.argv."""
    script = Path(argv[0]).stem
    start = ["vitamp", ENTRIES.get(script, script)] if INSTALLED else [sys.executable, argv[0]]
    return shlex.join([*start, *argv[1:]])


def _subcommand(found: re.Match[str]) -> str:
    name = found[1]
    if name in ENTRIES:
        return f"vitamp {ENTRIES[name]}"
    return f"vitamp {name}" if "scripts/" in found[0] and name in _tools() else found[0]


@cache
def _tools() -> set[str]:
    return {file.stem for file in (ROOT / "scripts").glob("*.py")}
