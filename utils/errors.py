"""Exit codes, and errors that the user can fix: they are printed as text, never as a traceback."""

from collections.abc import Iterable, Sequence

from vitamp.errors import UserError, closest

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143


class AllRanksUserError(UserError):
    """A UserError that all ranks raise together: one of them prints it for all."""


class TrainingError(Exception):
    """A failure after training began that a traceback would not explain. Exit code 1."""


class AllRanksError(TrainingError):
    """A TrainingError that all ranks raise at the same moment: one of them prints it for all."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the known word closest to `word`; '' if none is close."""
    match = closest(word, known)
    return f" Did you mean {match}?" if match else ""


def either(words: Sequence[object]) -> str:
    """'a, b or c'."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


def first_line(error: BaseException) -> str:
    """The first line with content of an exception's text, or its type; not torch's "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)
