"""Trying to read an image, and trying again: what fails once may only have failed for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .pixels import Unreadable

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between tries where the storage failed, as network file systems do for a while."""
HERE_TO_STAY = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    lasting: bool
    """False where the storage failed, which may give the image another time."""


def failure_of(read: Callable[[], None]) -> Failure | None:
    """None if `read` goes well, be it not at the first try."""
    pauses, again = iter(PAUSES), False
    while True:
        try:
            return read()
        except FileNotFoundError:
            return Failure("it does not exist", lasting=True)
        except HERE_TO_STAY as error:
            return Failure(_words(error), lasting=True)
        except Unreadable as error:
            if again:
                return Failure(str(error), lasting=True)
            again = True
        except OSError as error:
            pause = next(pauses, None)
            if pause is None:
                return Failure(_words(error), lasting=False)
            time.sleep(pause)


def _words(error: OSError) -> str:
    return " ".join((error.strerror or str(error) or type(error).__name__).split())
