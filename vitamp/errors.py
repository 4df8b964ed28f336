"""The exception for errors that users can correct themselves, and the names of commands in its texts."""

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
