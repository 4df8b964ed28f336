"""Command that starts this program again, in as many processes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from utils.distributed.world import BY_HAND, World

LAUNCHER_PID = "VITAMP_LAUNCHER_PID"
"""Environment variable with the process that started the ranks, if that is main_multi_gpu.py itself."""


def entry_script() -> Path:
    """The script that was started, relative to the current folder if it is below."""
    path, here = Path(sys.argv[0]).absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def start_again(world: World, flags: str) -> str:
    """Command that starts this script again with `flags` and as many processes."""
    script = shlex.quote(str(entry_script()))
    if world.size == 1:
        return f"python {script} {flags}"
    if LAUNCHER_PID in os.environ:
        return f"python {script} -ngpus {world.size} {flags}"
    how = "by hand, each with its rank" if world.launcher == BY_HAND else f"by {world.launcher}"
    return f"{script} {flags}  # start its {world.size} processes {how}, as before"
