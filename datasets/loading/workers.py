"""Loading processes: if one dies, the code that waits for its batch gets an error with the reason."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from utils.errors import TrainingError

SECONDS_TO_BEGIN = 60.0
"""Time limit for the start. A process forked from a threaded one can hang on a lock that a thread held at the fork."""
SECONDS_TO_DIE = 0.25
"""Time between the end of a process's files and of the process."""
BEFORE_QUEUES_CLOSE = 100
"""Priority of an exit hook of multiprocessing: higher ones run first, and queues close at 10."""
REMEDY = (
    "Provide more memory, or use fewer processes (DATA.NUM_WORKERS, -num_workers; 0 loads in the main process). Then "
    "repeat the command, or resume a training run from its last checkpoint with -resume."
)


class LoadingProcesses:
    """The batches of a DataLoader with persistent processes, which end with `end`, or with this process."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._batches: Any = None
        self._hung: list[Any] = []
        self._begun = multiprocessing.RawArray("b", loader.num_workers)
        loader.worker_init_fn = partial(_begin, loader.worker_init_fn, self._begun)
        others = set(multiprocessing.active_children())
        try:
            with _signals_held_back():
                self._batches = iter(loader)
        except OSError as error:  # out of memory, or too many processes
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            reason = error.strerror or error
            raise TrainingError(f"Loading processes could not be started: {reason}. {REMEDY}") from None
        self._forget_exit = call_at_exit(self.end)
        self._limit = threading.Timer(SECONDS_TO_BEGIN, self._kill_hung)
        self._limit.daemon = True
        self._limit.start()

    def begin_epoch(self) -> None:
        self._guarded(lambda: iter(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._guarded(lambda: next(self._batches))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """`call`, with a TrainingError if a process is dead. torch checks that every five seconds."""
        try:
            return call()
        except StopIteration:
            raise
        except Exception:  # a process that dies while it sends can raise nearly anything here
            time.sleep(SECONDS_TO_DIE)
            if dead := self._dead():
                causes = ", ".join(f"the loading process {worker.pid} {self._cause(worker)}" for worker in dead)
                raise TrainingError(f"A batch could not be loaded: {causes}. {REMEDY}") from None
            raise

    def _dead(self) -> list[Any]:
        return [worker for worker in self._batches._workers if not worker.is_alive()]

    def end(self) -> None:
        """End the processes, without waiting for the batches of others if one is dead: it may hold a lock."""
        self._forget_exit()
        self._limit.cancel()
        if self._dead():
            self._kill()
        self._batches._shutdown_workers()
        self._kill()

    def _kill(self) -> None:
        for worker in self._batches._workers:
            if worker.is_alive():
                worker.kill()

    def _kill_hung(self) -> None:
        self._hung = [worker for worker, begun in zip(self._batches._workers, self._begun, strict=True) if not begun]
        for worker in self._hung:
            worker.kill()

    def _cause(self, worker: Any) -> str:
        return f"did not begin in {SECONDS_TO_BEGIN:g} s" if worker in self._hung else _cause(worker.exitcode)


def _begin(initialise: Callable[[int], None] | None, begun: Any, number: int) -> None:
    """Initialise a loading process, and then set its flag."""
    if initialise is not None:
        initialise(number)
    begun[number] = 1


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
    """Block Ctrl-C while processes start, so that they start with it blocked, and restore the SIGCHLD handler.

    torch's SIGCHLD handler raises an error at any point of the program, say within an update.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
