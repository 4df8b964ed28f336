"""Progress bars, and alternating measurements: other load on the machine slows all contenders alike."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from utils.progress import Progress

Item = TypeVar("Item")
Round = TypeVar("Round")


def progress_bar(of: int | Sequence[Item], unit: str, what: str | None = None) -> Progress:
    """A bar over things or their number, or log lines. On a terminal, other log lines are printed above it."""
    if isinstance(of, int):
        return Progress(None, of, unit, what)
    return Progress(of, len(of), unit, what)


class Budget:
    """A time limit for all measurements together."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.cut = False
        """Whether a measurement was refused; the results say so."""

    def allows(self, seconds: float) -> bool:
        """Whether this much time is left."""
        enough = self._end - time.monotonic() >= seconds
        self.cut = self.cut or not enough
        return enough


def alternating_order(items: Sequence[Item], rounds: Iterable[Round]) -> Iterator[tuple[Round, Item]]:
    """Every item in every round; every other round is reversed, so that none gains from a drift of the machine."""
    for nth, each in enumerate(rounds):
        for item in items[:: -1 if nth % 2 else 1]:
            yield each, item


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of two contenders: median, minimum and maximum over the rounds; '-' without a round of both.

    Taken round by round, so that a slow moment of the machine is in both values.
    """
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})" if pairs else "-"
