"""The exception for errors that users can correct themselves, and the names that its texts suggest."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A problem found before the first update, in usage, settings, data or weights. Exit code 2.

    The text says what is wrong, where, and what to do.
    """


INSTALLED = (Path(__file__).parent / "program").is_dir()
"""Whether pip has installed the program, which then is a folder in this package."""
TRAIN = "vitamp train" if INSTALLED else "python main_single_gpu.py"


def started(script: str) -> str:
    """The command that starts a script: `vitamp NAME` if the program is installed, else that of a clone."""
    return f"vitamp {script}" if INSTALLED else f"python scripts/{script}.py"


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest to `word`, whatever their case; None if none is close."""
    by_folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None
