"""Reading an image with retries: a failure may be temporary."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from datasets.decoding.reader import Unreadable
from utils.errors import TrainingError
from utils.files import NotRegular

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between retries after a storage error; network file systems have temporary ones."""
NOT_RETRIED = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    kind: Literal["missing", "not a file", "storage", "damaged"]
    """not a file: a pipe, a socket or a device. storage: a storage error, after which the image may be intact."""


def failure_of(read: Callable[[], None]) -> Failure | None:
    """Call `read` until it succeeds or retries are used up; None after success.

    Raises TrainingError if memory runs out, which is not the image's fault.
    """
    pauses, decoded_before = iter(PAUSES), False
    while True:
        try:
            return read()
        except NOT_RETRIED as error:
            return Failure("it does not exist" if isinstance(error, FileNotFoundError) else _text(error), "missing")
        except NotRegular as error:
            return Failure(_text(error), "not a file")
        except Unreadable as error:
            if decoded_before:
                return Failure(str(error), "damaged")
            decoded_before = True
        except OSError as error:
            if error.errno == errno.ELOOP:
                return Failure("its symbolic links form a loop", "missing")
            pause = next(pauses, None)
            if pause is None:
                return Failure(_text(error), "storage")
            time.sleep(pause)
        except MemoryError:
            raise TrainingError(
                "Memory ran out while an image was read; the image is not to blame. Use fewer loading processes "
                "(DATA.NUM_WORKERS, -num_workers), a smaller batch (DATA.BATCH_SIZE, -batch_size), or more memory. "
                "Then repeat the command, or resume a training run from its last checkpoint with -resume."
            ) from None


def _text(error: OSError) -> str:
    return " ".join((error.strerror or str(error) or type(error).__name__).split())
