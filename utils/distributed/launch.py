"""Starts one process per device on this machine with torchrun's launcher, and exits with their exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from utils.distributed.world import LOOPBACK
from utils.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from utils.program import LAUNCHER_PID, die_with
from utils.text import counted

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

SECONDS_TO_SAVE = 60
SECONDS_TO_EXIT = 5  # after a second Ctrl-C


class _SignalForwarder:
    """Forwards the signals that this process gets to the ranks, which save and exit."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """The exit code for the first signal; None without a signal."""

    def install(self) -> None:
        """Handle the signals that stop a run, except those that are ignored, as SIGHUP is under nohup."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._forward)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to the ranks. Ranks that do not exit in time are killed.

        After the first signal, they have SECONDS_TO_SAVE. A second Ctrl-C shortens that to SECONDS_TO_EXIT.
        """
        is_first_signal = self.exit_code is None
        name = signal.Signals(number).name
        if self.exit_code is None:
            self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED
        if _send_to_ranks(number) == 0:  # It returns the number of ranks.
            os.write(2, f"vitamp: stopped by {name} before any rank was started\n".encode())
            os._exit(self.exit_code)
        if is_first_signal or number == signal.SIGINT:
            seconds = SECONDS_TO_SAVE if is_first_signal else SECONDS_TO_EXIT
            timer = threading.Timer(seconds, _kill_remaining, (name, seconds))
            timer.daemon = True
            timer.start()


def self_launch(script: str, argv: list[str], processes: int) -> int:
    """Run a script in several ranks on this machine, with torchrun's launcher, and return the run's exit code.

    script, argv: the script, and the arguments of every rank
    processes: number of ranks
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHER_PID] = str(os.getpid())
    # This only silences a warning of torch: ranks set their own number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch would log every rank that exits with another code than 0; the ranks report that themselves.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    forwarder = _SignalForwarder()
    forwarder.install()

    # The ranks find each other in a store that this process already serves (a static rendezvous). torch would serve it
    # on every network. As all ranks are on this machine, this server listens on the loopback address alone.
    listener = socket.create_server((LOOPBACK, 0)).detach()
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{store.port}",
        rdzv_configs={"rank": 0},  # number of this machine, the only one
        local_addr=LOOPBACK,  # The default is the host's name, which may have no address.
        max_restarts=0,
        # The other signals are forwarded by `forwarder`. For SIGHUP, torch would end a run that nohup started.
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *argv)
    except ChildFailedError as error:
        rank, failure = _first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        name = f"rank {rank} on {socket.gethostname()} (process {failure.pid})"
        print(f"vitamp: {name} was killed by {failure.signal_name()}", file=sys.stderr)
        if forwarder.exit_code is not None:
            return forwarder.exit_code
        signal_number = -failure.exitcode  # The exit code of a killed process is the negative number of the signal.
        return 128 + signal_number
    except SignalException as error:  # SIGQUIT, the only signal that torch handles
        print(f"vitamp: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Find the rank whose failure ended the others; return the rank and its failure.

    If a rank was killed, other ranks may fail before torch notices any of them, and torch's times of failures are in
    whole seconds. So a rank that was killed at most a second after the first failure counts as the first. (torch itself
    kills the remaining ranks, but only after 30 s.)
    """
    first_rank, first_failure = error.get_first_failure()
    for rank, failure in error.failures.items():
        if failure.exitcode == -signal.SIGKILL and failure.timestamp <= first_failure.timestamp + 1:
            return rank, failure
    return first_rank, first_failure


def _kill_remaining(name: str, seconds: float) -> None:
    """Kill the ranks that are still running `seconds` after the signal `name`."""
    killed_ranks = _send_to_ranks(signal.SIGKILL)
    if killed_ranks:
        text = f"vitamp: {counted(killed_ranks, 'rank')} did not exit within {seconds:g} s of {name}; killed"
        print(text, file=sys.stderr)


def _send_to_ranks(number: int) -> int:
    """Send a signal to all children of this process, which are the ranks; return their number."""
    pids: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, file.read_text(encoding="ascii").split())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


def die_with_launcher() -> None:
    """Let this rank save and exit when its launcher is killed by SIGKILL, instead of training on as an orphan."""
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(None if launcher_pid is None else int(launcher_pid), signal.SIGTERM)
