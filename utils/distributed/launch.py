"""Start one process a device on this machine, by torchrun's own machinery, and end as they end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from types import FrameType

from utils.errors import EXIT_INTERRUPTED, EXIT_STOPPED

LAUNCHER_PID = "VITAMP_LAUNCHER_PID"
SECONDS_TO_SAVE = 60
SECONDS_TO_LEAVE = 5  # after a second Ctrl-C


def self_launch(script: str, argv: list[str], processes: int) -> int:
    """Run `script` once a rank and give back the exit code of the run."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks set their own number; this only silences a warning
    # Where a rank fails, the others save and leave. LaunchConfig of torch 2.11 knows no such argument, and waits 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    # Its word for every rank that ends by another code than 0: the ranks say themselves what is to be said.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    passing = _Passing()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = f"rank {rank} on {socket.gethostname()} (process {failure.pid})"
        print(f"vitamp: {name} was ended by {failure.signal_name()}", file=sys.stderr)
        return passing.code or 128 - failure.exitcode
    except SignalException as error:
        print(f"vitamp: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


class _Passing:
    """Hands signals on to the ranks, which save and leave; those that are not gone in time are killed."""

    def __init__(self) -> None:
        self.code = 0
        """The exit code that the first signal asked for."""
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        again, name = self.code != 0, signal.Signals(number).name
        self.code = self.code or (EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED)
        ranks = _children()
        if not ranks:
            os.write(2, f"vitamp: stopped by {name} before any rank was started\n".encode())
            os._exit(self.code)
        _send(ranks, number)
        if not again or number == signal.SIGINT:
            patience = SECONDS_TO_LEAVE if again else SECONDS_TO_SAVE
            timer = threading.Timer(patience, self._lose_patience, (name, patience))
            timer.daemon = True
            timer.start()

    def _lose_patience(self, name: str, patience: float) -> None:
        ranks = _children()
        if ranks:
            print(f"vitamp: {len(ranks)} ranks did not end within {patience:g} s of {name}; killed", file=sys.stderr)
            _send(ranks, signal.SIGKILL)


def _send(ranks: list[int], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)


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
    """In a rank: if the launcher is killed outright, save and go too, instead of living on as an orphan."""
    parent = os.environ.get(LAUNCHER_PID)
    if (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ) or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if parent is not None and os.getppid() != int(parent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)
