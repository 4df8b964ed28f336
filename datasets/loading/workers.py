"""Monitored loading processes: if one dies, the code that waits for its batch gets an error at once.

torch uses a SIGCHLD handler that raises an error at any point of the program, and a check every five seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

SECONDS_BETWEEN_CHECKS = 0.25
SECONDS_TO_BEGIN = 60.0
"""Time limit for the start. A process forked from a threaded one can hang on a lock that a thread held at the fork."""

BEFORE_QUEUES_CLOSE = 100
"""Priority of an exit hook of multiprocessing: higher ones run first, and queues close at 10."""


class WorkerDied(Exception):
    """A loading process ended unexpectedly or could not start. The text says which one, and how."""


class WatchedLoader(DataLoader[Any]):
    """torch's DataLoader with monitored processes."""

    def __init__(self, *args: Any, worker_init_fn: Callable[[int], None], num_workers: int, **kwargs: Any) -> None:
        self.begun = multiprocessing.RawArray("b", max(num_workers, 1))
        """Flags of the processes that have started; shared with them."""
        begin = _Begin(worker_init_fn, self.begun)
        super().__init__(*args, worker_init_fn=begin, num_workers=num_workers, **kwargs)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not self.num_workers:
            return super()._get_iterator()
        try:
            return WatchedIterator(self)
        except OSError as error:  # out of memory, or too many processes
            raise WorkerDied(f"loading processes could not be started: {error.strerror or error}") from None


class _Begin:
    """Initialisation of a loading process, which then sets its flag."""

    def __init__(self, initialise: Callable[[int], None], begun: Any) -> None:
        self._initialise, self._begun = initialise, begun

    def __call__(self, number: int) -> None:
        self._initialise(number)
        self._begun[number] = 1


class WatchedIterator(_MultiProcessingDataLoaderIter):
    """Batches from loading processes; raises WorkerDied if the process of the next batch is dead.

    The loading processes end with `end`, or with this process.
    """

    def __init__(self, loader: WatchedLoader) -> None:
        self._begun, self._until = loader.begun, time.monotonic() + SECONDS_TO_BEGIN
        self._begun[:] = bytes(len(self._begun))
        try:
            with _signals_held_back():
                super().__init__(loader)
        except OSError:  # some processes could not be started
            self._kill()
            self._shutdown = True  # otherwise torch would wait for processes that have ended
            raise
        self._forget_exit = call_at_exit(self.end)

    def _get_data(self) -> Any:
        while True:
            try:
                return self._data_queue.get(timeout=SECONDS_BETWEEN_CHECKS)
            except queue.Empty:
                self._check()
            except Exception:  # a process that dies while it sends can raise nearly anything here
                time.sleep(SECONDS_BETWEEN_CHECKS)  # its files close some time before it counts as dead
                self._check()
                raise

    def _check(self) -> None:
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if dead:
            raise WorkerDied(
                ", ".join(f"the loading process {worker.pid} {_cause(worker.exitcode)}" for worker in dead)
            )
        not_begun = [worker for worker, begun in zip(self._workers, self._begun, strict=False) if not begun]
        if not_begun and time.monotonic() > self._until:
            raise WorkerDied(f"the loading process {not_begun[0].pid} did not begin in {SECONDS_TO_BEGIN:.0f} s")
        if self._pin_memory and not self._pin_memory_thread.is_alive():
            raise WorkerDied("the thread that pins memory died while it received a batch from a loading process")

    def end(self, kill: bool = False) -> None:
        """End the processes. `kill`: without waiting for the batches that they are loading."""
        self._forget_exit()
        if kill:
            self._kill()
        self._shutdown_workers()
        self._kill()

    def _kill(self) -> None:
        for worker in getattr(self, "_workers", ()):
            if worker.is_alive():
                worker.kill()


def call_at_exit(call: Callable[[], None]) -> Callable[[], object]:
    """Register a call for the end of the process, before Python ends its child processes. Returns a cancel function.

    Python ends child processes with SIGTERM, which loading processes ignore, and then waits for them without limit.
    """
    if multiprocessing.parent_process() is None:
        atexit.register(call)  # last in, first out: it runs before the hooks of multiprocessing and torch
        return partial(atexit.unregister, call)
    # In a process that multiprocessing started, atexit's hooks do not run.
    return multiprocessing.util.Finalize(None, call, exitpriority=BEFORE_QUEUES_CLOSE).cancel


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {*map(int, signal.Signals)} else f"signal {-code}"
    causes = {"SIGKILL": " (probably out of memory)", "SIGBUS": " (probably /dev/shm is full)"}
    return f"was killed by {name}{causes.get(name, '')}"


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block Ctrl-C while processes start, so that they start with it blocked, and restore the SIGCHLD handler."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
