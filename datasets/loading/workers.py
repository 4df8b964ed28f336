"""Loading processes that are watched: when one dies, whoever waits for it learns of it at once, and only then.

torch's own way is a handler of SIGCHLD that raises an error at any point of the program, and a look every five seconds.
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

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_BEGIN = 60.0
"""A process is born as a copy of one with many threads. What one of them held at that moment is held for ever in it."""

BEFORE_QUEUES_CLOSE = 100
"""multiprocessing calls the hooks of higher priority first, and closes its queues at 10."""


class WorkerDied(Exception):
    """A loading process has ended without being asked to, or could not begin. The text says which, and how."""


class WatchedLoader(DataLoader[Any]):
    """torch's loader, whose processes are watched."""

    def __init__(self, *words: Any, worker_init_fn: Callable[[int], None], num_workers: int, **names: Any) -> None:
        self.begun = multiprocessing.RawArray("b", max(num_workers, 1))
        """Which of the processes have begun; shared with them."""
        begin = _Begin(worker_init_fn, self.begun)
        super().__init__(*words, worker_init_fn=begin, num_workers=num_workers, **names)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not self.num_workers:
            return super()._get_iterator()
        try:
            return WatchedIterator(self)
        except OSError as error:  # there is no memory for one more process, or no room in the table of processes
            raise WorkerDied(f"loading processes could not be started: {error.strerror or error}") from None


class _Begin:
    """What a process does first, and then says that it has."""

    def __init__(self, work: Callable[[int], None], begun: Any) -> None:
        self._work, self._begun = work, begun

    def __call__(self, number: int) -> None:
        self._work(number)
        self._begun[number] = 1


class WatchedIterator(_MultiProcessingDataLoaderIter):
    """Batches from loading processes. Raises WorkerDied where one of them is waited for in vain.

    The loading processes end with `end`, or with this process.
    """

    def __init__(self, loader: WatchedLoader) -> None:
        self._begun, self._until = loader.begun, time.monotonic() + SECONDS_TO_BEGIN
        self._begun[:] = bytes(len(self._begun))
        try:
            with _born_deaf():
                super().__init__(loader)
        except OSError:  # not all of them could be started
            self._kill()
            self._shutdown = True  # or torch would wait for those that have ended
            raise
        self._forget_exit = call_at_exit(self.end)

    def _get_data(self) -> Any:
        while True:
            try:
                return self._data_queue.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                self._look()
            except Exception:  # what a process leaves behind that dies while it hands over can raise nearly anything
                time.sleep(SECONDS_BETWEEN_LOOKS)  # its files are closed some time before it counts as dead
                self._look()
                raise

    def _look(self) -> None:
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if dead:
            raise WorkerDied(", ".join(f"the loading process {worker.pid} {_how(worker.exitcode)}" for worker in dead))
        idle = [w for w, begun in zip(self._workers, self._begun, strict=False) if not begun]
        if idle and time.monotonic() > self._until:
            raise WorkerDied(f"the loading process {idle[0].pid} did not begin in {SECONDS_TO_BEGIN:.0f} s")
        if self._pin_memory and not self._pin_memory_thread.is_alive():
            raise WorkerDied("what a loading process sent could not be received")

    def end(self, kill: bool = False) -> None:
        """End the processes: in peace, or at once where what they are at will not be used."""
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
    """Call this when the process ends, before Python ends its child processes. What it returns takes that back.

    Python ends child processes by SIGTERM, which loading processes ignore, and then waits for them without end.
    """
    if multiprocessing.parent_process() is None:
        atexit.register(call)  # last in, first out: this comes before the hooks of multiprocessing and torch
        return partial(atexit.unregister, call)
    # A process that multiprocessing started leaves out the hooks of atexit.
    return multiprocessing.util.Finalize(None, call, exitpriority=BEFORE_QUEUES_CLOSE).cancel


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {*map(int, signal.Signals)} else f"signal {-code}"
    hint = {
        "SIGKILL": ": out of memory? The system kills in this way when memory runs out",
        "SIGBUS": ": no room left in /dev/shm?",
    }
    return f"was killed by {name}{hint.get(name, '')}"


@contextlib.contextmanager
def _born_deaf() -> Iterator[None]:
    """For the time processes are started in.

    A Ctrl-C waits: they are born deaf to it, and have nothing to say. And the handler of SIGCHLD stays what it was.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
