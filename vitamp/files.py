"""Reads regular files only, and writes files atomically."""

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitamp.errors import UserError

ARRAYS = (".npy", ".npz", ".dcm")
"""Endings of the files that only vitamp/bands.py reads"""
# How files begin
NUMPY = b"\x93NUMPY"
ZIP = b"PK\x03\x04"
ODD = "a pipe or device"
MOST_WITHOUT_SIZE = 2**24
"""Bytes to read of a file whose size the system gives as 0"""
LINK = "it is a link, which is not followed here"


class NotRegular(OSError):
    """The path leads to a pipe, a socket or a device, or is a link where none is followed."""


def only_regular(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open` that raises NotRegular for what could be read for ever, as a pipe or a device.

    It never waits for the other end of a pipe, and checks the open file, which costs next to nothing even for a million
    images. With os.O_NOFOLLOW in `flags`, a link is refused, too.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if flags & os.O_NOFOLLOW and os.path.islink(path):
            raise NotRegular(error.errno, LINK, str(path)) from None
        if error.errno != errno.ENXIO:  # of a socket, or of a pipe that nobody reads
            raise
    else:
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` refuses folders itself
            return handle
        os.close(handle)
    raise NotRegular(errno.EINVAL, f"it is {ODD}, not a file", str(path))


def read_regular(path: str | os.PathLike[str], most: float = math.inf) -> bytes:
    """The content of a file. NotRegular if it has more than `most` bytes (DATA.MAX_IMAGE_BYTES, of an image)."""
    with open(path, "rb", buffering=0, opener=only_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotRegular(errno.EFBIG, f"it has {size:,} bytes; DATA.MAX_IMAGE_BYTES allows {most:,}", str(path))
        if size > 0:
            return file.readall()
        # It is empty, or one that the system makes up, such as /proc/kmsg, which may have no end.
        content = b""
        while len(content) <= MOST_WITHOUT_SIZE:
            part = file.read(MOST_WITHOUT_SIZE)
            if not part:  # None: nothing is there yet
                return content
            content += part
        raise NotRegular(errno.EFBIG, "it has no size, and does not end", str(path))


def leads_to(path: Path, handle: int) -> bool:
    """Whether `path` is still the open file: after `rm` or `mv` it is another, or none."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def kind_of_path(path: Path) -> str | None:
    """'a folder' and the like, links followed; None if the path does not exist."""
    if os.path.isdir(path):
        return "a folder"
    if os.path.isfile(path):
        return "a file"
    return ODD if os.path.exists(path) else None


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
        unfinished.unlink(missing_ok=True)  # what a killed process left, or someone else's link
        unfinished.touch(exist_ok=False)
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if it has another value. UserError if it cannot be read."""
    try:
        content = parse_json(read_regular(path).decode("utf-8", "surrogateescape"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be read ({why}).") from None
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text from a file. Nesting that is too deep is a ValueError, like any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
