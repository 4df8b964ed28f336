"""Run torch's loading processes so that the death of one becomes an error with the reason, not an endless wait.

torch waits without limit for the rest of a message whose sender died or was stopped in its middle, because this process
itself holds the pipe open. A signal ends that wait: SIGCHLD, from the system or from a thread that watches.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from multiprocessing.queues import Queue
from typing import Any, NoReturn

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from utils.errors import EXIT_FAILED, TrainingError
from utils.log import log
from utils.machine.cpus import keep_freed_memory
from utils.program import die_with_parent

SECONDS_TO_WARN = 30.0
"""Wait for a batch after which a warning is logged, while the wait lasts"""
SECONDS_TO_STOP = 2.0
"""Wait for a batch that a request to stop interrupts; before that, the batch comes first"""
SECONDS_TO_BE_KILLED = 1.0
"""Time to wait for a killed process. One that waits for storage that hangs dies only when its storage answers."""
SECONDS_TO_BEGIN = 20.0, 40.0, 80.0
"""Time to wait for forked processes to begin, in the first, second and third try.

One that has not begun by then never will: if a thread of this process held a library's lock at the moment of the fork,
it is locked for ever in the new process.
"""
SECONDS_TO_DIE = 0.25
"""Time in which a process whose pipe is closed has surely ended"""
BEFORE_QUEUES_CLOSE = 100
"""Priority of an exit hook of multiprocessing: higher ones run first, and queues close at 10."""
REMEDY = (
    "Provide more memory, or use fewer processes (DATA.NUM_WORKERS, -num_workers; 0 loads in the main process). Then "
    "repeat the command, or resume a training run from its last checkpoint with -resume."
)


class _Died(Exception):
    """Raised in the main thread, which waits for a batch, as soon as a loading process has ended."""


class _Stalled(Exception):
    """Raised in the main thread, which waits for loading processes to begin, when one takes too long."""


on_long_wait: Callable[[], None] | None = None
"""Called in the main thread, each second of a long wait for a batch. It may raise an exception, which ends the wait."""


class LoadingProcesses:
    """The persistent processes of a DataLoader, and an iterator over the batches that they load.

    They end with `end`, or with this process.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Start the processes, and wait until they have begun.

        The loader's batch sampler must have no batches yet: if processes stall as they begin, they are started again,
        and batches that were sent to the stalled ones would be lost.
        """
        self._loader = loader
        # The loader's iterator, which has the processes.
        self._batches: Any = None
        # When the current wait for a batch began; None if the main thread does not wait. `_interrupt` and the thread
        # `_watch` read it.
        self._wait_began: float | None = None
        # Set when the processes are to end, which ends the thread `_watch`.
        self._ended = threading.Event()
        # Limit of the current wait for processes to begin; None if they have begun.
        self._seconds_to_begin: float | None = None
        loader.worker_init_fn = start_worker
        self._start()
        # When Python exits, it sends child processes SIGTERM, which loading processes ignore, and then waits for them
        # without limit. So an exit hook calls `end` first; `_forget_exit` removes the hook.
        if multiprocessing.parent_process() is None:
            atexit.register(self.end)  # last in, first out: it runs before the hooks of multiprocessing and torch
            self._forget_exit: Callable[[], object] = partial(atexit.unregister, self.end)
        else:  # in a process that multiprocessing started, atexit's hooks do not run
            priority = BEFORE_QUEUES_CLOSE
            self._forget_exit = multiprocessing.util.Finalize(None, self.end, exitpriority=priority).cancel
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._wait_until_begun()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        """Start the processes. Raises TrainingError if the system has no memory or no processes left."""
        other_children = set(multiprocessing.active_children())
        # Processes start with Ctrl-C blocked. And torch's iterator sets a SIGCHLD handler, which raises an error at any
        # point of the program, say within an update: below, the handler that was set before is set again.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        previous_handler = signal.getsignal(signal.SIGCHLD)
        try:
            self._batches = iter(self._loader)
        except OSError as error:  # out of memory, or too many processes
            for process in set(multiprocessing.active_children()) - other_children:
                process.kill()
            reason = error.strerror or error
            raise TrainingError(f"Loading processes could not be started: {reason}. {REMEDY}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL if previous_handler is None else previous_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def _wait_until_begun(self) -> None:
        """Wait until all processes have begun, and start them again if one stalls. TrainingError after three tries.

        Processes that are not forked are not waited for: they import this program first, which may be slow. A wait
        beyond the limit ends by `_Stalled`, which `_interrupt` raises.
        """
        if multiprocessing.get_start_method() != "fork":
            return
        for number, seconds in enumerate(SECONDS_TO_BEGIN):
            if number > 0:
                log.warning("A loading process stalled as it began: all of them are started again.")
                self._kill()
                self._loader._iterator = None  # pyright: ignore[reportPrivateUsage]
                self._start()
            self._seconds_to_begin = seconds
            try:
                self.begin()  # waits for an answer of each process
            except _Stalled:
                continue
            finally:
                self._seconds_to_begin = None
            return
        raise TrainingError(f"Loading processes stall as they begin. {REMEDY}")

    def begin(self) -> None:
        """Begin with the batches that the batch sampler now has; those of before are dropped."""
        self._guarded(lambda: iter(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._guarded(lambda: next(self._batches))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call a function that waits for a batch, and return its result. TrainingError if a process died meanwhile."""
        try:
            with self._waiting():
                return call()
        except StopIteration:  # no batches are left
            raise
        except Exception:  # a process that dies while it sends can raise nearly anything here
            time.sleep(SECONDS_TO_DIE)
            dead_workers = self._dead_workers()
            if not dead_workers:
                raise
            causes = ", ".join(f"the loading process {worker.pid} {_cause(worker.exitcode)}" for worker in dead_workers)
            raise TrainingError(f"A batch could not be loaded: {causes}. {REMEDY}") from None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let SIGCHLD end the wait of the `with` block by an exception; see `_interrupt` for the reasons.

        The handler is set only while the block waits, so no other part of the program is interrupted.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        previous_handler = signal.signal(signal.SIGCHLD, self._interrupt) if in_main_thread else None
        self._wait_began = time.monotonic()
        try:
            if self._dead_workers():
                raise _Died
            yield
        finally:
            self._wait_began = None
            if in_main_thread:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL if previous_handler is None else previous_handler)

    def _interrupt(self, *_: object) -> None:
        """Handle SIGCHLD while the main thread waits: raise an exception if there is a reason to end the wait.

        The reasons: a process has ended, processes take too long to begin, or the program is asked to stop. The last
        reason is known to `on_long_wait`, which then raises the exception.
        """
        wait_began = self._wait_began
        if wait_began is None:
            return
        if self._dead_workers():
            raise _Died
        waited = time.monotonic() - wait_began
        if self._seconds_to_begin is not None and waited > self._seconds_to_begin:
            raise _Stalled
        if waited > SECONDS_TO_STOP and on_long_wait is not None:
            on_long_wait()

    def _watch(self) -> None:
        """Interrupt long waits each second by SIGCHLD, and warn once of each very long one.

        It runs in a thread of its own. The signal makes the main thread call `_interrupt`.
        """
        main_thread = threading.main_thread().ident or 0
        reported_wait = None
        while not self._ended.wait(1):
            now = time.monotonic()
            wait_began = self._wait_began
            if wait_began is None or now - wait_began < SECONDS_TO_STOP:
                continue
            if now - wait_began > SECONDS_TO_WARN and reported_wait != wait_began:
                reported_wait = wait_began
                # torch's record of the batch that is waited for begins with the number of the process that loads it.
                worker_number, *_ = self._batches._task_info.get(self._batches._rcvd_idx) or [0]
                pid = self._batches._workers[worker_number].pid
                problem = f"loading process {pid} does not finish; its storage may hang, or it is stopped (SIGSTOP)"
                waited = now - wait_began
                log.warning("No batch for %.0f s: %s. `ls -l /proc/%d/fd` lists its files.", waited, problem, pid)
            signal.pthread_kill(main_thread, signal.SIGCHLD)

    def _dead_workers(self) -> list[Any]:
        """List the processes that have ended."""
        return [worker for worker in self._batches._workers if not worker.is_alive()]

    def end(self) -> None:
        """End the processes, and the thread that watches."""
        self._forget_exit()
        self._ended.set()
        self._kill()

    def _kill(self) -> None:
        """Kill the processes, and tell torch's iterator that it is shut down.

        torch's own shutdown would wait for locks and messages, which a dead or stopped process may hold.
        """
        batches = self._batches
        for worker in batches._workers:
            worker.kill()
        for worker in batches._workers:
            worker.join(SECONDS_TO_BE_KILLED)
        if not batches._shutdown:
            batches._shutdown = True
            # So that torch's SIGCHLD handler no longer takes the deaths of these processes for errors.
            batches._worker_pids_set = False
            _remove_worker_pids(id(batches))
            # The thread that pins memory ends now; or it waits for the rest of a message until this process ends.
            if hasattr(batches, "_pin_memory_thread"):
                batches._pin_memory_thread_done_event.set()


def start_worker(_: int) -> None:
    """Initialise a loading process, in this process. It ignores signals: the training process ends it.

    It never outlives the training process.
    """
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    # A batch that cannot be sent ends this process: otherwise, the training process would wait for it for ever.
    Queue._on_queue_feeder_error = staticmethod(_end)  # pyright: ignore[reportAttributeAccessIssue]
    # Errors are sent to the training process; the rest is noise of shutting down when that process ends.
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    keep_freed_memory()
    if sys.platform == "linux":
        # Tensors are sent through a socket in the temporary folder, which would stay there when this process is killed.
        # Linux also has sockets without a file; what they send is authenticated all the same.
        address = f"\0vitamp-{os.getpid()}-"
        setattr(connection, "arbitrary_address", lambda _: address + secrets.token_hex(8))  # noqa: B010


def _end(error: Exception, _: object) -> NoReturn:
    """End this loading process if a batch could not be sent: otherwise, the training process would wait for ever."""
    print(f"loading process {os.getpid()}: a batch could not be sent: {error}", file=sys.__stderr__, flush=True)
    os._exit(EXIT_FAILED)


def _cause(code: int | None) -> str:
    """Say how a process ended, by its exit code; a negative one is the signal that killed it."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    causes = {"SIGKILL": " (probably out of memory)", "SIGBUS": " (probably /dev/shm is full)"}
    return f"was killed by {name}{causes.get(name, '')}"
