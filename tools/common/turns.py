"""Measuring contenders in turns: what else the machine does then slows all of them alike, and ratios stay right."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from tools.common.progress import progress

OURS, TIMM, TORCHVISION, TORCHVISION_FLOAT = "vitamp", "timm", "torchvision", "torchvision, normalised"
BOUND = "libjpeg-turbo alone (the bound)"
"""The contenders, by the names they have in tables and files."""

Work = Callable[[int, list[int]], object]
"""(round, samples) -> whatever; the time it takes is what is measured."""


@dataclass(frozen=True)
class Contender:
    """One way to do the same thing."""

    name: str
    order: np.ndarray
    """Samples, of which each round takes the next ones, going round and round."""
    work: Work
    before: Callable[[list[int]], object] | None = None
    """Done with the samples of a round outside of its time."""


@dataclass
class Rates:
    """Images a second, one figure a round; the same round of two contenders can be compared."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """By the time that cores were busy with it, in this process and in its children."""


class Budget:
    """Time that must not be overrun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.cut = False

    def left(self) -> float:
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether so much is left. What is refused once is remembered: the results say so."""
        enough = self.left() >= seconds
        self.cut = self.cut or not enough
        return enough


def measure(contenders: list[Contender], rounds: int, images: int, budget: Budget) -> dict[str, Rates]:
    """Whole rounds alone count, as many of `rounds` as the budget allows."""
    found = {contender.name: Rates() for contender in contenders}
    for contender in contenders:  # the first call of anything is slow
        _timed(contender, -1, min(images, 16))
    longest = 0.0
    for nth in progress(range(rounds), "rounds"):
        if not budget.allows(longest):
            break
        begin = time.monotonic()
        first = nth % len(contenders)  # so that none is always the one after a certain other
        for contender in contenders[first:] + contenders[:first]:
            wall, cpu = _timed(contender, nth, images)
            found[contender.name].wall.append(images / wall)
            found[contender.name].cpu.append(images / cpu)
        longest = max(longest, time.monotonic() - begin)
    return found


def _timed(contender: Contender, nth: int, images: int) -> tuple[float, float]:
    samples = _samples(contender, max(nth, 0) * images, images)
    if contender.before is not None:
        contender.before(samples)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    contender.work(nth + 2, samples)
    # Children's time comes in hundredths of a second: too short a round must not divide by zero.
    return max(time.perf_counter() - wall, 1e-6), max(_cpu_seconds() - cpu, 1e-6)


def _samples(contender: Contender, begin: int, count: int) -> list[int]:
    places = np.arange(begin, begin + count) % len(contender.order)
    return contender.order[places].tolist()


def _cpu_seconds() -> float:
    return time.process_time() + sum(map(_cpu_seconds_of, multiprocessing.active_children()))


def _cpu_seconds_of(child: BaseProcess) -> float:
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:  # no /proc here, or it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ratio:
    """How many times as fast: the median over the rounds, and the rounds it was worst and best in."""

    median: float
    least: float
    most: float


def ratio(ours: list[float], theirs: list[float]) -> Ratio | None:
    """Round by round, so that a slow moment of the machine is on both sides."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs)) if pairs else None
