"""Processes that die with the one that started them, however that one ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

PARENT = "VITAMP_PARENT_PID"
"""Environment variable of a program that a tool starts: the tool's process."""
PR_SET_PDEATHSIG = 1


def as_child() -> dict[str, str]:
    """Environment of a program of ours that this process starts, and that must not outlive it."""
    return {**os.environ, PARENT: str(os.getpid())}


def die_with_starting_tool() -> None:
    """Die with the tool that started this program, if one did (`as_child`)."""
    if parent := os.environ.pop(PARENT, None):  # not inherited: this program's own children have another parent
        die_with(int(parent), signal.SIGTERM)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """In a process of multiprocessing: get signal `number` when the process that started it ends."""
    import multiprocessing

    starter = multiprocessing.parent_process()
    assert starter is not None
    if starter.pid == os.getppid():
        die_with(starter.pid, number)
    else:  # between them is a fork server, which ends only after this process; or the starter has ended already
        threading.Thread(target=_follow, args=(starter, number), daemon=True).start()


def die_with(parent: int | None, number: signal.Signals) -> None:
    """Let the system send this process signal `number` when its parent ends. None: the parent's number is unknown."""
    if sys.platform != "linux":
        return
    import ctypes  # here, because main scripts import this file, and few need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)


def _follow(starter: BaseProcess, number: signal.Signals) -> None:
    starter.join()
    os.kill(os.getpid(), number)
