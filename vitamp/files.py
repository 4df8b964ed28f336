"""Reads regular files only, and writes files atomically.

A named pipe without a writer, or a device without an end, would be read for ever.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitamp.errors import UserError

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Without O_NONBLOCK, opening a named pipe waits for a writer. It has no effect on regular files."""


class NotRegular(OSError):
    """The path leads to something other than a regular file."""


def only_regular(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open` that raises NotRegular unless the path, links followed, is a regular file.

    It checks the open file, which costs almost nothing even for a million images.
    """
    try:
        handle = os.open(path, flags | _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, which cannot be opened
            raise _error_for(path, os.stat(path).st_mode) from None
        raise
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise _error_for(path, mode)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file."""
    with open(path, "rb", buffering=0, opener=only_regular) as file:
        return file.readall()


def read_regular_text(path: str | os.PathLike[str], encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a regular file."""
    with open(path, encoding=encoding, errors=errors, opener=only_regular) as file:
        return file.read()


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless `path`, which a library is about to open, is a regular file that this user may read."""
    os.close(only_regular(path, os.O_RDONLY))


def kind_of_path(path: Path) -> str | None:
    """'a folder', 'a named pipe' and the like, links followed; None if the path does not exist."""
    try:
        return _kind(path.stat().st_mode)
    except OSError:
        return None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader finds the old content or the new one. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, sync: bool = True, one_writer: bool = False) -> Iterator[Path]:
    """Yield a hidden path to write to; then sync that file to the disk, if wanted, and rename it to `path`.

    An error removes it. An OSError about it names `path`. `one_writer`: no two processes write `path` at once, so
    that what a killed process leaves has a fixed name and is overwritten.
    """
    # Else a random name: the number of a process is not unique on a disk that several machines share.
    ending = "part" if one_writer else int.from_bytes(os.urandom(4))
    unfinished = path.with_name(f".{path.name}.{ending}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        with contextlib.suppress(OSError):  # safetensors makes files that only their owner may read
            unfinished.chmod(mode)
        if sync:
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(unfinished), unfinished):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def try_to_write(path: Path) -> None:
    """Raise OSError unless a file can be written beside `path`: permissions do not show a full or read-only disk."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(b"trial")
        file.flush()
        os.fsync(file.fileno())


def _error_for(path: str | os.PathLike[str], mode: int) -> OSError:
    kind = NotRegular if not stat.S_ISDIR(mode) else IsADirectoryError
    return kind(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if it has another value. UserError if it cannot be read."""
    try:
        content = parse_json(read_regular_text(path, errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}).") from None
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text from a file. Nesting that is too deep is a ValueError, like any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
