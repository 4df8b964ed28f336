"""Stop a run by a signal or a time limit: all ranks stop at the same update and save.

Nothing heavy is imported here, so that signals are handled while torch is still being imported.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from os import _exit  # the system's own: utils/own_code.py replaces os._exit
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from utils.distributed.world import World
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED
from utils.log import log

if TYPE_CHECKING:
    import torch

LAUNCHER_BEGAN = "VITAMP_LAUNCHER_BEGAN"
BEGAN = float(os.environ.get(LAUNCHER_BEGAN) or time.monotonic())
"""Approximate start of this process, or of main_multi_gpu.py, if that started it: all processes have the same clock."""

# Requests to stop, by priority: the largest one of all ranks wins.
NOTHING, TIME_IS_UP, CTRL_C, ENDED = range(4)
# Clusters send SIGUSR1 shortly before they end a job.
REQUESTS = {signal.SIGINT: CTRL_C, signal.SIGTERM: ENDED, signal.SIGUSR1: ENDED, signal.SIGHUP: ENDED}
EXIT_CODES = {TIME_IS_UP: EXIT_DONE, CTRL_C: EXIT_INTERRUPTED, ENDED: EXIT_STOPPED}

WORDS = {
    TIME_IS_UP: "-max_time leaves no time for more training",
    CTRL_C: "Interrupted (press Ctrl-C again to exit at once)",
    ENDED: "Asked to stop (SIGTERM, SIGHUP or SIGUSR1)",
}
SECONDS_BETWEEN_EXCHANGES = 0.05
MOST_UPDATES_BETWEEN_EXCHANGES = 8

# Words of the last message, by `Signals.saved`
_SAVED_WORDS = {
    True: "; earlier checkpoints are intact, and -resume continues from the newest",
    False: "; nothing was saved yet",
    None: "",
}


class Stopped(Exception):
    """Raised on all ranks at the same update: save the run and exit."""

    def __init__(self, request: int) -> None:
        super().__init__(request)
        self.words = WORDS[request]
        self.exit_code = EXIT_CODES[request]


class Signals:
    """Handles the signals of this process. A signal ends it at once, unless `deferred` is set."""

    def __init__(self) -> None:
        """Handle no signals yet; `listen` begins to."""
        self.request = NOTHING
        """The request of highest priority so far"""
        self.deferred = False
        """Signals only set `request`, because there is something to save or to log first."""
        self.saved: bool | None = None
        """Whether the run has a checkpoint to resume from; None where this process does not know."""
        self._failed = False
        """Whether the reason of a failure was logged, so that a signal needs no message"""
        self._interrupts = 0
        """Number of Ctrl-Cs received"""
        self._owner = os.getpid()
        """The process whose signals these are; processes forked from it must not handle them"""

    def listen(self) -> None:
        """Install the handler for the signals in REQUESTS, unless this process was started to ignore them."""
        self._owner = os.getpid()
        for number in REQUESTS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            # Background jobs of a shell script, and the processes that they start, ignore Ctrl-C. But if such a job is
            # a launcher, it stops its ranks by Ctrl-C, so ranks must not ignore it. SIGHUP is ignored because of nohup.
            launcher_may_send_it = "RANK" in os.environ and number != signal.SIGHUP
            if not is_ignored or launcher_may_send_it:
                signal.signal(number, self._handle)

    def failure_was_reported(self) -> None:
        """Let signals end this process without a message from now on, because the reason of a failure was logged."""
        self._failed = True
        self.deferred = False

    def exit_if_asked(self, *requests: int) -> None:
        """Exit now if one of `requests` was received; called when other ranks are gone."""
        self.failure_was_reported()
        if self.request in requests:
            _exit(EXIT_CODES[self.request])

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: exit, or if signals are deferred only record the request. A second Ctrl-C always exits."""
        if os.getpid() != self._owner:  # a loading process that was just forked and does not ignore signals yet
            return
        if number == signal.SIGINT:
            self._interrupts += 1
        # At the second Ctrl-C, torchrun sends SIGTERM to its ranks. Our own launcher sets torchrun's variable, too, but
        # does not do so.
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "VITAMP_LAUNCHER_PID" not in os.environ
        is_second_ctrl_c = self._interrupts > 1 or (self._interrupts == 1 and number == signal.SIGTERM and by_torchrun)
        if is_second_ctrl_c or not self.deferred:
            self._log_and_exit(number)
        self.request = max(self.request, REQUESTS[signal.Signals(number)])  # requests are numbered by priority

    def leave(self) -> NoReturn:
        """Exit now, as the recorded request asks for."""
        self._log_and_exit(signal.SIGINT if self.request == CTRL_C else signal.SIGTERM)

    def _log_and_exit(self, number: int) -> NoReturn:
        """Log why this process ends, unless the reason of a failure was logged, and exit without any cleaning up."""
        if not self._failed:
            # A launcher ends a rank by SIGTERM because another has failed: that is the reason to log. Modules that are
            # not imported yet have nothing to log or close, and are not imported here.
            group: Any = sys.modules.get("utils.distributed.group")
            if number == signal.SIGTERM and group and group.watchdog:
                group.watchdog.look()
            logging.raiseExceptions = False  # the signal may have interrupted the writing of a log line
            tqdm = sys.modules.get("tqdm")
            if tqdm is not None:  # bars would stay below the last line
                with contextlib.suppress(Exception):  # the signal may have interrupted the drawing of one
                    for bar in list(tqdm.tqdm._instances):
                        bar.leave = False
                        bar.close()
            name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            log.warning("%s%s", name, _SAVED_WORDS[self.saved])
        request = REQUESTS[signal.Signals(number)]
        _exit(EXIT_CODES[request])


signals = Signals()


class Deadline:
    """-max_time: stop early enough for the current update and the last checkpoint."""

    def __init__(self, seconds: float | None, to_save: Callable[[], float]) -> None:
        """`seconds`: since the program began; None for no limit. `to_save`: returns the seconds that saving takes."""
        self._end = None if seconds is None else BEGAN + seconds
        self._seconds_to_save = to_save
        self.restart()

    def restart(self) -> None:
        """Restart the measurement of an update, after something else that took time, such as compiling or saving."""
        self._last_call = time.monotonic()

    def passed(self) -> bool:
        """Return whether it is time to stop. It measures the time between calls, so call it once per update."""
        now = time.monotonic()
        seconds_per_update = now - self._last_call
        self._last_call = now
        # Twice the time of an update and a checkpoint: ranks agree to stop some updates after the first request, and
        # an earlier checkpoint may still be in writing.
        seconds_needed = 2 * (seconds_per_update + SECONDS_BETWEEN_EXCHANGES + self._seconds_to_save())
        return self._end is not None and now + seconds_needed >= self._end


class Stopping:
    """Checks after updates whether any rank was asked to stop, with an all-reduce that no rank waits for.

    Requests are all-reduced while the next update computes, and read after it, by a gloo group in host memory: no rank
    waits for a GPU, and all ranks stop at the same update. Where updates take only milliseconds, ranks exchange
    requests every few updates; the interval is all-reduced along with the requests.
    """

    def __init__(self, world: World, time_is_up: Callable[[], bool], timeout: datetime.timedelta) -> None:
        """`time_is_up`: returns whether -max_time is over, on this rank.

        `timeout`: how long the ranks wait for each other, also while rank 0 writes the last checkpoint.
        """
        self._world = world
        self._time_is_up = time_is_up
        self._in_flight: tuple[torch.distributed.Work, torch.Tensor] | None = None
        """The all-reduce that has begun, and its tensor: the request, and the number of steps between exchanges"""
        self._step_kind = ""
        """What the steps between calls of `check` are, such as updates"""
        self._interval = 1
        """Steps between exchanges, the same on all ranks"""
        self._steps_left = 1
        """Steps until the next exchange"""
        self._last_exchange = time.monotonic()
        if world.size > 1:
            import torch.distributed

            group = torch.distributed.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, torch.distributed.ProcessGroup)
            self._group = group

    def check(self, step_kind: str = "updates") -> None:
        """Raise `Stopped`, on all ranks at once, if any rank was asked to stop. Call it on all ranks after each step.

        `step_kind`: names the steps between calls. When it changes, their time is measured anew.
        """
        time_request = TIME_IS_UP if self._time_is_up() else NOTHING
        request = max(signals.request, time_request)  # requests are numbered by priority
        agreed = request if self._world.size == 1 else self._exchange(request, step_kind)
        if agreed != NOTHING:
            raise Stopped(agreed)

    def _exchange(self, request: int, step_kind: str) -> int:
        """Finish the previous all-reduce of requests and begin the next, with this rank's `request`.

        Returns the largest request of all ranks in the previous one; NOTHING if it is not time for an exchange yet. So
        requests are known one exchange later, and no rank waits. The length of the interval is all-reduced along with
        the requests, since all ranks must exchange after the same step.
        """
        if step_kind != self._step_kind:  # other steps may take another time
            self._step_kind = step_kind
            self._interval = 1
            self._steps_left = 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return NOTHING

        now = time.monotonic()
        seconds_per_step = (now - self._last_exchange) / self._interval
        self._last_exchange = now
        previous_request = self._receive()
        if previous_request == NOTHING:  # otherwise, all ranks stop now
            import torch.distributed

            steps = min(int(SECONDS_BETWEEN_EXCHANGES / max(seconds_per_step, 1e-6)), MOST_UPDATES_BETWEEN_EXCHANGES)
            message = torch.tensor([request, max(steps, 1)], dtype=torch.int32)
            # The maximum of both: the most urgent request, and the steps of the fastest rank.
            work = torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._in_flight = work, message
        self._steps_left = self._interval  # as `_receive` has set it
        return previous_request

    def _receive(self) -> int:
        """Wait for the all-reduce in flight. Returns its request, and sets `_interval` to its number of steps.

        Returns NOTHING if none is in flight.
        """
        if self._in_flight is None:
            return NOTHING
        work, message = self._in_flight
        self._in_flight = None
        work.wait()
        request, steps = message.numpy().tolist()
        self._interval = steps
        return request

    def wait_for_all(self) -> None:
        """Wait until all ranks call this: if one exited before rank 0 has saved, a launcher might end the others."""
        self._receive()
        if self._world.size > 1:
            import torch.distributed

            torch.distributed.barrier(self._group)
