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
    """Over things, or up to a total of updates. `shown`: whether this process shows it."""

    def __init__(self, things: Iterable[Any] | None, total: int, unit: str, what: str | None, shown: bool = True):
        hidden = None if shown else True  # None: if standard error is no terminal
        super().__init__(things, what, total, unit=f" {unit}", disable=hidden, leave=False, dynamic_ncols=True)
        self._shown = shown
        self._begun = time.monotonic()
        self._unit = unit
        self.initial = 0
        self._what = f"{what}: " if what else ""
        self._last_line = self._begun

    def update(self, n: float | None = 1) -> bool | None:
        if not self.disable or not self._shown:
            return super().update(n)
        self.n += n or 0
        if (now := time.monotonic()) - self._last_line >= PACE:
            self._last_line = now
            of_one = (now - self._begun) / max(self.n - self.initial, 1)
            left = timedelta(seconds=round(of_one * (self.total - self.n)))
            log.info("%s%s of %s %s, about %s left", self._what, f"{self.n:,}", f"{self.total:,}", self._unit, left)
        return None

    def __iter__(self) -> Iterator[Any]:
        for thing in super().__iter__():
            yield thing
            if self.disable:  # tqdm does not count then
                self.update()
