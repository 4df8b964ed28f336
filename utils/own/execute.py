"""Executes the user's own files (-use), and finds their lines in an error."""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from utils.errors import TrainingError, UserError
from utils.own.registry import registered


@dataclass(frozen=True)
class OwnFile:
    """A file that was executed, as run.json and meta.json describe it."""

    file: str
    """Its path"""
    known_as: str
    """Its name when it was given; a run's copy has another"""
    sha256: str
    source: bytes
    registers: dict[str, str]
    """Name -> kind"""

    def as_noted(self) -> dict[str, Any]:
        return {"file": self.known_as, "sha256": self.sha256, "registers": self.registers}


executed: dict[str, OwnFile] = {}
"""By path"""


class OwnCodeError(TrainingError):
    """An exception in the user's own code during training.

    A loading process hands it over as the text of its whole traceback, which ends with our words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2])


def read(path: Path) -> tuple[bytes, str]:
    """The text of a file, and its sha256."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"-use {path}: cannot be read ({error.strerror}).") from None
    return source, hashlib.sha256(source).hexdigest()


def noted_files() -> list[dict[str, Any]]:
    """What run.json and meta.json record."""
    return [one.as_noted() for one in executed.values()]


def execute(path: Path, known_as: str = "") -> OwnFile:
    """Execute a file once in this process. UserError, with file and line, if it fails or registers nothing."""
    name = str(path)
    source, sha256 = read(path)
    if name in executed and executed[name].sha256 == sha256:
        return executed[name]
    before = set(registered)
    module = ModuleType(f"own_code_{len(executed)}_{path.stem}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where pydantic, dataclasses and timm look up types
    known_as = known_as or path.name
    executed[name] = OwnFile(name, known_as, sha256, source, {})
    try:
        exec(compile(source, name, "exec"), vars(module))  # exactly what was hashed
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise UserError(own_lines(error) or f"-use {path}: {error}") from None
    names = {one: registered[one].kind for one in registered if one not in before}
    if not names:
        raise UserError(
            f"-use {path}: the file registers nothing. Put @loss, @model, @augmentation, @dataset or @metric above a "
            "function or a class (from vitamp import loss); see docs/own_code.md."
        )
    executed[name] = OwnFile(name, known_as, sha256, source, names)
    return executed[name]


def own_lines(error: BaseException) -> str:
    """The error and the lines of the user's own files that lead to it; '' if none do."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in executed]
    if not frames:
        return ""
    last = frames[-1]
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    lines = (f"  {one.filename}, line {one.lineno}, in {one.name}: {one.line}" for one in frames)
    return "\n".join([f"{last.filename}, line {last.lineno}: {what}", *lines])
