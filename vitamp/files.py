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

from vitamp.errors import UserError, closest

ARRAYS = (".npy", ".npz", ".dcm")
"""Endings of the files that only vitamp/bands.py reads."""
# The first bytes of files
NUMPY = b"\x93NUMPY"
ZIP = b"PK\x03\x04"
ODD = "a pipe or device"
MOST_WITHOUT_SIZE = 2**24
"""Most bytes to read from a file whose size the system gives as 0."""
LINK = "it is a link, which is not followed here"


class NotRegular(OSError):
    """Raised if a path leads to a pipe, a socket or a device, or is a link that must not be followed."""


def only_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file or a folder; NotRegular for a pipe or device, which could be read for ever.

    It is for the argument `opener` of `open`. It never waits for the other end of a pipe, and checks the open file,
    which costs next to nothing even for a million images. With os.O_NOFOLLOW in `flags`, a link raises NotRegular, too.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if flags & os.O_NOFOLLOW and os.path.islink(path):
            raise NotRegular(error.errno, LINK, str(path)) from None
        if error.errno != errno.ENXIO:  # This is the error for a socket, or for a pipe that nobody reads.
            raise
    else:
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself raises an error for folders.
            return handle
        os.close(handle)
    # The path leads to something else, whether it could be opened or not.
    raise NotRegular(errno.EINVAL, f"it is {ODD}, not a file", str(path))


def read_regular(path: str | os.PathLike[str], most: float = math.inf) -> bytes:
    """Read a regular file; NotRegular if it has more than `most` bytes, which for images is DATA.MAX_IMAGE_BYTES."""
    with open(path, "rb", buffering=0, opener=only_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotRegular(errno.EFBIG, f"it has {size:,} bytes; DATA.MAX_IMAGE_BYTES allows {most:,}", str(path))
        if size > 0:
            return file.readall()
        # The file is empty, or the system generates its content, which may have no end, such as that of /proc/kmsg.
        content = b""
        while len(content) <= MOST_WITHOUT_SIZE:
            part = file.read(MOST_WITHOUT_SIZE)
            if not part:  # b"" at the end of the file, or None if the system has nothing to read at the moment.
                return content
            content += part
        raise NotRegular(errno.EFBIG, "it has no size, and does not end", str(path))


def leads_to(path: Path, handle: int) -> bool:
    """Whether a path still leads to an open file; after `rm` or `mv`, it leads to another file or to none."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def kind_of_path(path: Path) -> str | None:
    """What a path leads to: 'a folder', 'a file' or 'a pipe or device'; None if it does not exist."""
    if os.path.isdir(path):
        return "a folder"
    if os.path.isfile(path):
        return "a file"
    return ODD if os.path.exists(path) else None


def suggested_path(path: Path) -> str:
    """Suggest an existing path for a missing one, as ' (did you mean X?)'; '' if no name is similar."""
    # The first file or folder on the way that does not exist is the one that is misspelt. The root always exists, so
    # the loop ends.
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    with contextlib.suppress(OSError):
        name = closest(missing.name, os.listdir(missing.parent))
        if name:
            similar = missing.parent / name
            full_path = similar / path.absolute().relative_to(missing)  # with the rest of the path
            suggested = full_path if full_path.exists() else similar
            return f" (did you mean {suggested}?)"
    return ""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader finds the old content or the new one. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, sync: bool = True, one_writer: bool = False) -> Iterator[Path]:
    """Yield a hidden path to write to, and rename the written file to `path` at the end of the block.

    If an error ends the block, the hidden file is removed. An OSError about it names `path`.

    sync: whether to sync the file to the disk before it is renamed
    one_writer: whether no two processes write `path` at once. Then the hidden file has a fixed name, so that the next
        writer overwrites the file of a process that was killed.
    """
    # With several writers, the name has a random number: the pid is not unique on a disk that several machines share.
    ending = "part" if one_writer else f"{int.from_bytes(os.urandom(4))}"
    unfinished = path.with_name(f".{path.name}.{ending}")
    try:
        unfinished.unlink(missing_ok=True)  # It may be a file of a killed process, or someone else's link.
        unfinished.touch(exist_ok=False)
        mode = unfinished.stat().st_mode
        yield unfinished
        with contextlib.suppress(OSError):  # safetensors creates files that only their owner may read.
            unfinished.chmod(mode)
        if sync:
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        # The error of a full disk names no file.
        if isinstance(error, OSError) and error.filename in (None, str(unfinished), unfinished):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def try_to_write(path: Path) -> None:
    """Raise OSError unless a file can be written beside `path`.

    Permissions alone do not show whether a disk is full or read-only.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(b"trial")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; {} if it holds another value, a UserError if it cannot be read."""
    try:
        content = parse_json(read_regular(path).decode("utf-8", "surrogateescape"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be read ({reason}).") from None
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text from a file; text that is damaged or nested too deeply raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
