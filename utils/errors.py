"""Errors that are the user's to mend. They reach the terminal as text, never as a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143


class UserError(Exception):
    """Something that can be found before the first update: usage, config, data, weights. Exit code 2.

    The text says what was wrong, where it was found, and what would be right.
    """


class CommonUserError(UserError):
    """One that all processes of a run raise, so that one of them tells it for all."""


class TrainingError(Exception):
    """Something that went wrong after training began and that a traceback would not explain. Exit code 1."""


class CommonError(TrainingError):
    """One that all processes of a run find alike, at the same moment, so that one of them tells it for all."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the known word closest to `word`, or nothing when none is close."""
    by_folded = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(word.casefold(), list(by_folded), n=1, cutoff=0.6)
    return f" Did you mean {by_folded[close[0]]}?" if close else ""
