"""How far a long pass is: a bar on a terminal, and a log line now and then elsewhere."""

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from utils.log import log

PACE = 20.0
"""Seconds between log lines"""


class Progress(tqdm):
    """A progress bar over things, or up to a total of updates; without a terminal, a log line now and then."""

    def __init__(self, things: Iterable[Any] | None, total: int, unit: str, what: str | None, shown: bool = True):
        """Begin the progress.

        things: what is iterated over; None if `update` is called instead
        total: number of things or updates
        unit: the word for several things, such as "images"
        what: a title before the numbers; None for none
        shown: whether this process shows the progress; False on ranks other than 0
        """
        disable = None if shown else True  # None: tqdm shows no bar if standard error is no terminal.
        super().__init__(things, what, total, unit=f" {unit}", disable=disable, leave=False, dynamic_ncols=True)
        self._shown = shown
        self._begun = time.monotonic()
        self._unit = unit
        self.initial = 0
        self._what = f"{what}: " if what else ""
        self._last_line = self._begun

    def update(self, n: float | None = 1) -> bool | None:
        """Count `n` more things; without a terminal, log the progress every PACE seconds."""
        has_bar = not self.disable
        if has_bar or not self._shown:
            return super().update(n)
        self.n += n or 0
        now = time.monotonic()
        if now - self._last_line >= PACE:
            self._last_line = now
            seconds_per_thing = (now - self._begun) / max(self.n - self.initial, 1)
            left = timedelta(seconds=round(seconds_per_thing * (self.total - self.n)))
            log.info("%s%s of %s %s, about %s left", self._what, f"{self.n:,}", f"{self.total:,}", self._unit, left)
        return None

    def __iter__(self) -> Iterator[Any]:
        for thing in super().__iter__():
            yield thing
            if self.disable:  # tqdm does not count then
                self.update()
