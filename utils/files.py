"""Reading files that others name, and writing files so that nobody finds half of one.

A pipe that nobody writes to, or a device without an end, would be read for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Without O_NONBLOCK, opening a pipe waits for whoever writes to it. It means nothing to regular files."""


class NotRegular(OSError):
    """The path leads to something that is no regular file."""


def only_regular(path: str | os.PathLike[str], flags: int) -> int:
    """`opener` of `open`: raises NotRegular where the path, its links followed, is no regular file.

    The open file itself is asked, which costs next to nothing for each of a million images.
    """
    try:
        handle = os.open(path, flags | _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, which cannot be opened
            raise _refusal(path, os.stat(path).st_mode) from None
        raise
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise _refusal(path, mode)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file."""
    with open(path, "rb", buffering=0, opener=only_regular) as file:
        return file.readall()


def read_regular_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a regular file."""
    with open(path, encoding=encoding, opener=only_regular) as file:
        return file.read()


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise NotRegular for a path that a library is about to open by itself."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise _refusal(path, mode)


def kind_of_path(path: Path) -> str | None:
    """'a folder', 'a named pipe' and the like, links followed; None where nothing is there."""
    try:
        return _kind(path.stat().st_mode)
    except OSError:
        return None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new one, never half of it. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _refusal(path: str | os.PathLike[str], mode: int) -> OSError:
    kind = NotRegular if not stat.S_ISDIR(mode) else IsADirectoryError
    return kind(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")
