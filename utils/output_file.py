"""Files that a tool writes at its end: whether they can be written is asked before its work begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError
from utils.files import kind_of_path

_written: list[Path] = []


def check_output_file(path: Path, flag: str, fresh: bool = False) -> Path:
    """`path`, which `flag` names, as a file that can be written; UserError where it cannot be.

    Its folder must be there: one that is made by mistake is harder to find than a message. `fresh`: nothing may be
    there already.
    """
    path = path.expanduser()
    where, kind, folder = f"{flag} {path}".lstrip(), kind_of_path(path), kind_of_path(path.absolute().parent)
    if kind not in (None, "a file"):
        raise UserError(f"{where}: is {kind}; name a file.")
    if fresh and kind is not None:
        raise UserError(f"{where}: this is there already; name another, or give -overwrite to replace it.")
    if folder != "a folder":
        what = f"{path.parent} is {folder}, not a folder" if folder else f"the folder {path.parent} does not exist"
        raise UserError(f"{where}: {what}; name a file.")
    try:
        _try(path)
    except OSError as error:
        raise UserError(f"{where}: cannot be written ({error.strerror}); name another file.") from None
    return path


def _try(path: Path) -> None:
    """Permissions do not tell all: the file system may be mounted for reading, or the name be too long."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(0, "it may not be overwritten by this user")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o600))
    beside.unlink()


@contextlib.contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Inside, `path` is written. What the disk refuses becomes a UserError; what it takes is remembered."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror or error}).") from None
    if path not in _written:
        _written.append(path)


def nothing_written_yet() -> None:
    """Forget what another tool wrote in this process."""
    _written.clear()


def written() -> str:
    """What to say of a tool that was interrupted."""
    if not _written:
        return "no result was written"
    return f"written before that, and whole: {', '.join(map(str, _written))}"
