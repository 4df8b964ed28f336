"""Trying to read an image, and trying again: what fails once may only have failed for a moment."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from datasets.decoding.reader import Unreadable
from utils.errors import TrainingError
from utils.files import NotRegular

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between tries where the storage failed, as network file systems do for a while."""
NEVER_WAITED_FOR = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    kind: Literal["missing", "not a file", "storage", "damaged"]
    """not a file: a pipe, a socket or a device. storage: it failed, and may give the image another time."""


def failure_of(read: Callable[[], None]) -> Failure | None:
    """None if `read` goes well, be it not at the first try. TrainingError where it is not the image that failed."""
    pauses, again = iter(PAUSES), False
    while True:
        try:
            return read()
        except NEVER_WAITED_FOR as error:
            return Failure("it does not exist" if isinstance(error, FileNotFoundError) else _words(error), "missing")
        except NotRegular as error:
            return Failure(_words(error), "not a file")
        except Unreadable as error:
            if again:
                return Failure(str(error), "damaged")
            again = True
        except OSError as error:
            if error.errno == errno.ELOOP:
                return Failure("its links lead back to themselves", "missing")
            pause = next(pauses, None)
            if pause is None:
                return Failure(_words(error), "storage")
            time.sleep(pause)
        except MemoryError:
            raise TrainingError(
                "Memory ran out while an image was read, which is no fault of the image. Take fewer loading processes "
                "with DATA.NUM_WORKERS (-num_workers), or a smaller batch with DATA.BATCH_SIZE (-batch_size), or give "
                "the run more memory. Then go on from the last checkpoint by -resume."
            ) from None


def _words(error: OSError) -> str:
    return " ".join((error.strerror or str(error) or type(error).__name__).split())
