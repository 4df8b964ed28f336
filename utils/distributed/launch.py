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


def self_launch(script: str, argv: list[str], processes: int) -> int:
    """Run `script` in `processes` ranks and return the run's exit code."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks set their own number; this only silences a warning
    # It logs every rank that exits with another code than 0; the ranks report that themselves.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    exit_code = 0  # that of the first signal

    def forward(number: int, _frame: FrameType | None) -> None:
        """Forward a signal to the ranks, which save and exit; ranks that do not exit in time are killed."""
        nonlocal exit_code
        again = exit_code != 0
        name = signal.Signals(number).name
        exit_code = exit_code or (EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED)
        if not _send_to_ranks(number):
            os.write(2, f"vitamp: stopped by {name} before any rank was started\n".encode())
            os._exit(exit_code)
        if not again or number == signal.SIGINT:
            seconds = SECONDS_TO_EXIT if again else SECONDS_TO_SAVE
            timer = threading.Timer(seconds, _kill_remaining, (name, seconds))
            timer.daemon = True
            timer.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    # All ranks are on this machine. torch itself would listen on every network; it takes the server that is there.
    listener = socket.create_server((LOOPBACK, 0)).detach()
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{store.port}",
        rdzv_configs={"rank": 0},
        local_addr=LOOPBACK,  # else the host's name, which need not resolve
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # the others are ours; for SIGHUP, torch would end what nohup started
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *argv)
    except ChildFailedError as error:
        rank, failure = _first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        name = f"rank {rank} on {socket.gethostname()} (process {failure.pid})"
        print(f"vitamp: {name} was killed by {failure.signal_name()}", file=sys.stderr)
        return exit_code or 128 - failure.exitcode
    except SignalException as error:
        print(f"vitamp: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that ended the others, and how it ended.

    Others may exit, because a rank was killed, before torch looks, which knows times to the second.
    """
    rank, first = error.get_first_failure()
    for other, failure in error.failures.items():
        if failure.exitcode == -signal.SIGKILL and failure.timestamp <= first.timestamp + 1:  # torch kills after 30 s
            return other, failure
    return rank, first


def _kill_remaining(name: str, seconds: float) -> None:
    ranks = _send_to_ranks(signal.SIGKILL)
    if ranks:
        text = f"vitamp: {counted(ranks, 'rank')} did not exit within {seconds:g} s of {name}; killed"
        print(text, file=sys.stderr)


def _send_to_ranks(number: int) -> int:
    """Send a signal to all children, which are the ranks. Returns their number."""
    ranks: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            ranks += map(int, file.read_text(encoding="ascii").split())
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)
    return len(ranks)


def die_with_launcher() -> None:
    """In a rank: save and exit when the launcher is killed by SIGKILL, instead of training on as an orphan."""
    parent = os.environ.get(LAUNCHER_PID)
    if parent is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(None if parent is None else int(parent), signal.SIGTERM)
