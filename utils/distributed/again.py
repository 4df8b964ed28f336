"""Command that starts this program again, in as many processes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from utils.distributed.world import BY_HAND, World
from utils.program import ENTRIES, INSTALLED

LAUNCHER_PID = "VITAMP_LAUNCHER_PID"
"""Environment variable with the process that started the ranks, if that is main_multi_gpu.py itself."""


def entry_script() -> Path:
    """The script that was started, relative to the current folder if it is below."""
    path, here = Path(sys.argv[0]).absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def tool(name: str) -> str:
    """Command that starts a tool, from the current folder, also in another tool."""
    if INSTALLED:
        return f"vitamp {name}"
    folder = entry_script().parent
    folder = folder if folder.name == "scripts" else folder / "scripts"
    return f"python {shlex.quote(str(folder / f'{name}.py'))}"


def start_again(world: World, flags: str) -> str:
    """Command that starts this script again with `flags` and as many processes."""
    script = entry_script()
    by_hand = f"vitamp {ENTRIES[script.stem]}" if INSTALLED else shlex.quote(str(script))
    start = by_hand if INSTALLED else f"python {by_hand}"
    if world.size == 1:
        return f"{start} {flags}"
    if LAUNCHER_PID in os.environ:
        return f"{start} -ngpus {world.size} {flags}"
    how = "by hand, each with its rank" if world.launcher == BY_HAND else f"by {world.launcher}"
    return f"{by_hand} {flags}  # start its {world.size} processes {how}, as before"
