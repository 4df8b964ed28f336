"""The error that users can mend themselves, and how its text names commands."""

from pathlib import Path


class UserError(Exception):
    """A problem found before the first update, in usage, settings, data or weights. Exit code 2.

    The text says what is wrong, where, and what to do.
    """


INSTALLED = (Path(__file__).parent / "program").is_dir()
"""Whether pip has installed the program, which then is a folder of this package"""
TRAIN = "vitamp train" if INSTALLED else "python main_single_gpu.py"


def started(script: str) -> str:
    """The command of a script of a clone, or of the installed program."""
    return f"vitamp {script}" if INSTALLED else f"python scripts/{script}.py"
