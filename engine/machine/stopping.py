"""Stopping a run from outside: by a signal or by the clock, with everything saved and all processes at one update.

Nothing heavy is imported here: signals are heard from the first moment, while torch is still being loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from utils.distributed.world import World
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED
from utils.log import log

if TYPE_CHECKING:
    import torch

BEGAN = time.monotonic()
"""When this process began, near enough."""

# What a rank wishes for, in the order in which a wish wins over the others.
NOTHING, TIME_IS_UP, CTRL_C, ENDED = range(4)
WISHES = {signal.SIGINT: CTRL_C, signal.SIGTERM: ENDED}
if hasattr(signal, "SIGUSR1"):
    WISHES[signal.SIGUSR1] = ENDED  # a cluster's warning that it will soon end the job
EXIT_CODES = {TIME_IS_UP: EXIT_DONE, CTRL_C: EXIT_INTERRUPTED, ENDED: EXIT_STOPPED}

WORDS = {
    TIME_IS_UP: "The time given (-max_time) is up",
    CTRL_C: "Interrupted (once more leaves at once)",
    ENDED: "Told to end (SIGTERM or SIGUSR1)",
}
SECONDS_BETWEEN_WISHES, MOST_WITHOUT_WISHES = 0.05, 8


class Stopped(Exception):
    """Raised on all ranks at the same place: the run is to be saved as it stands, and left."""

    def __init__(self, wish: int) -> None:
        super().__init__(wish)
        self.wish = wish

    @property
    def words(self) -> str:
        return WORDS[self.wish]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.wish]


class Signals:
    """What this process was asked for. Unless it is `patient`, it leaves at once."""

    def __init__(self) -> None:
        self.wish = NOTHING
        self.patient = False
        """There is something to save, or to tell, before a signal may end this process."""
        self._failed = False
        self._interrupts = 0
        self._owner = os.getpid()

    def listen(self) -> None:
        for number in WISHES:
            # Ctrl-C is off in a shell script's background jobs; but a launcher there still ends its ranks by it.
            if signal.getsignal(number) != signal.SIG_IGN or "RANK" in os.environ:
                signal.signal(number, self._heard)

    def all_is_told(self) -> None:
        """Training failed, and why was said: whoever ends this process now ends it without another word."""
        self._failed, self.patient = True, False

    def leave_if_asked(self, *wishes: int) -> None:
        """Other ranks are gone: where this one was told to go, too, there is nothing more to say."""
        self.all_is_told()
        if self.wish in wishes:
            os._exit(EXIT_CODES[self.wish])

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a loading process, forked a moment ago and not yet deaf to signals
            return
        self._interrupts += number == signal.SIGINT
        # torchrun makes SIGTERM of the second Ctrl-C.
        again = self._interrupts > 1 or (self._interrupts and number == signal.SIGTERM and _under_torchrun())
        if again or not self.patient:
            self._leave(number)
        self.wish = max(self.wish, WISHES[signal.Signals(number)])

    def _leave(self, number: int) -> NoReturn:
        if not self._failed:
            logging.raiseExceptions = False  # it may be a log line that the signal cuts in two
            name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            log.warning("%s; what was saved before stays, and -resume goes on from it", name)
        os._exit(EXIT_CODES[WISHES[signal.Signals(number)]])


signals = Signals()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "VITAMP_LAUNCHER_PID" not in os.environ


class Deadline:
    """-max_time: when to stop so that the rest of the time is enough for the update that runs and for saving."""

    def __init__(self, seconds: float | None, to_save: Callable[[], float]) -> None:
        """`to_save`: seconds that saving takes."""
        self._end = None if seconds is None else BEGAN + seconds
        self._to_save = to_save
        self._looked = time.monotonic()

    def passed(self) -> bool:
        """Call it once an update: it also sees how long one takes."""
        now = time.monotonic()
        an_update, self._looked = now - self._looked, now
        # Ranks stop a little after the first of them wants to; and a checkpoint may just be being written.
        ahead = 2 * (an_update + SECONDS_BETWEEN_WISHES + self._to_save())
        return self._end is not None and now + ahead >= self._end


class Stopping:
    """Asks, update by update, whether any rank was told to stop. A collective call, that nobody waits for.

    The ranks' wishes travel while the next update is computed and are looked at after it, on a group of their own in
    the hosts' memory: no GPU is waited for, and all ranks learn the same at the same update. Where updates take only
    milliseconds, every few of them will do; how many, the ranks tell each other along with their wishes.
    """

    def __init__(self, world: World, time_is_up: Callable[[], bool]) -> None:
        self._world, self._time_is_up = world, time_is_up
        self._travelling: tuple[torch.distributed.Work, torch.Tensor] | None = None
        self._of, self._every, self._left = "", 1, 1
        self._asked = time.monotonic()
        if world.size > 1:
            import torch.distributed

            group = torch.distributed.new_group(backend="gloo")
            assert isinstance(group, torch.distributed.ProcessGroup)
            self._group = group

    def check(self, of: str = "updates") -> None:
        """Raise `Stopped`, on all ranks at once, if one of them was to stop. `of`: between what the call stands."""
        wish = max(signals.wish, TIME_IS_UP if self._time_is_up() else NOTHING)
        agreed = wish if self._world.size == 1 else self._exchanged(wish, of)
        if agreed:
            raise Stopped(agreed)

    def _exchanged(self, wish: int, of: str) -> int:
        """The greatest wish that any rank had at the exchange before."""
        if of != self._of:  # of another length, perhaps
            self._of, self._every, self._left = of, 1, 1
        self._left -= 1
        if self._left:
            return NOTHING
        now = time.monotonic()
        each, self._asked = (now - self._asked) / self._every, now
        before = self._arrived()
        if before == NOTHING:
            self._send(wish, min(int(SECONDS_BETWEEN_WISHES / max(each, 1e-6)), MOST_WITHOUT_WISHES))
        self._left = self._every
        return before

    def _send(self, wish: int, every: int) -> None:
        import torch.distributed

        flag = torch.tensor([wish, max(every, 1)], dtype=torch.int32)
        work = torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        self._travelling = work, flag

    def _arrived(self) -> int:
        if self._travelling is None:
            return NOTHING
        work, flag = self._travelling
        self._travelling = None
        work.wait()
        wish, self._every = flag.numpy().tolist()
        return wish

    def wait_for_all(self) -> None:
        """Let no rank leave before rank 0 has saved: a launcher would end the others, too, in the middle of it."""
        self._arrived()
        if self._world.size > 1:
            import torch.distributed

            torch.distributed.barrier(self._group)
