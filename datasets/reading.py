"""Trying to read an image, and trying again: what fails once may only have failed for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from .pixels import Unreadable

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between tries where the storage failed, as network file systems do for a while."""
NEVER_WAITED_FOR = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    kind: Literal["missing", "storage", "damaged"]
    """storage: it failed, and may give the image another time."""


def failure_of(read: Callable[[], None]) -> Failure | None:
    """None if `read` goes well, be it not at the first try."""
    pauses, again = iter(PAUSES), False
    while True:
        try:
            return read()
        except NEVER_WAITED_FOR as error:
            return Failure("it does not exist" if isinstance(error, FileNotFoundError) else _words(error), "missing")
        except Unreadable as error:
            if again:
                return Failure(str(error), "damaged")
            again = True
        except OSError as error:
            pause = next(pauses, None)
            if pause is None:
                return Failure(_words(error), "storage")
            time.sleep(pause)


def _words(error: OSError) -> str:
    return " ".join((error.strerror or str(error) or type(error).__name__).split())
