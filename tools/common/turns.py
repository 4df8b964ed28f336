"""Progress bars, time limits, and the order of alternating measurements.

Measurements alternate so that other load on the machine slows all contenders alike.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from utils.progress import Progress

Item = TypeVar("Item")
Round = TypeVar("Round")


def progress_bar(of: int | Sequence[Item], unit: str, what: str | None = None) -> Progress:
    """Create a progress bar over `of`, a sequence or a number of items; without a terminal, it logs lines.

    On a terminal, other log lines are printed above the bar.
    """
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
        """Whether this much time is left. If not, the budget counts as cut from then on."""
        enough = self._end - time.monotonic() >= seconds
        self.cut = self.cut or not enough
        return enough


def alternating_order(items: Sequence[Item], rounds: Iterable[Round]) -> Iterator[tuple[Round, Item]]:
    """Yield every item in every round, with the round.

    The order is reversed in every other round, so that no item gains from a drift of the machine.
    """
    for number, this_round in enumerate(rounds):
        ordered = items[::-1] if number % 2 else items
        for item in ordered:
            yield this_round, item
