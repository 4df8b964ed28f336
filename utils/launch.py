"""Start one process a device on this machine, by torchrun's own machinery, and end as they end."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from types import FrameType

LAUNCHER_PID = "VITAMP_LAUNCHER_PID"
SECONDS_TO_SAVE = 60


def self_launch(script: str, argv: list[str], processes: int) -> int:
    """Run `script` once a rank and give back the exit code of the run."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks set their own number; this only silences a warning
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _pass_on)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=SECONDS_TO_SAVE,
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if failure.exitcode < 0:
            print(f"vitamp: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return code
    except SignalException as error:
        print(f"vitamp: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    return 0


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Hand a signal that only the ranks understand on to them."""
    for child in _children():
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue


def _children() -> list[int]:
    me, found = os.getpid(), []
    for thread in os.listdir(f"/proc/{me}/task"):
        try:
            with open(f"/proc/{me}/task/{thread}/children", encoding="ascii") as file:
                found += [int(pid) for pid in file.read().split()]
        except OSError:
            continue
    return found


def die_with_launcher() -> None:
    """In a rank: if the launcher is killed outright, go too, instead of living on as an orphan."""
    parent = os.environ.get(LAUNCHER_PID)
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)
