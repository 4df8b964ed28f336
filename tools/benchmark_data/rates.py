"""Images per second of contenders that alternate over the same samples."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from tools.common.turns import Budget, alternate

OURS, TIMM, TORCHVISION, TORCHVISION_FLOAT = "vitamp", "timm", "torchvision", "torchvision, normalised"
BOUND = "libjpeg-turbo alone (whole images)"
"""Names of the contenders, in tables and files."""

WARMUP_IMAGES = 16


@dataclass(frozen=True)
class Contender:
    """One way to load images."""

    name: str
    order: np.ndarray
    """Indices of samples; each round takes the next ones, starting over at the end."""
    work: Callable[[int, list[int]], object]
    """Called with round and samples; its time is measured."""
    before: Callable[[list[int]], object] | None = None
    """Called with the samples before the time starts."""


@dataclass
class Rates:
    """Images per second in each round."""

    wall: list[float] = field(default_factory=list)
    """By wall-clock time."""
    cpu: list[float] = field(default_factory=list)
    """By CPU time of this process and its children."""


def measure(contenders: list[Contender], rounds: int, images: int, budget: Budget) -> dict[str, Rates]:
    """Rates in the rounds that all contenders finished within the budget."""
    by_name = {contender.name: contender for contender in contenders}
    rates = {name: Rates() for name in by_name}
    for contender in contenders:  # the first call is slow
        _time(contender, -1, min(images, WARMUP_IMAGES))
    for name, nth in alternate(list(by_name), rounds, budget):
        wall, cpu = _time(by_name[name], nth, images)
        rates[name].wall.append(images / wall)
        rates[name].cpu.append(images / cpu)
    finished = min(len(rate.wall) for rate in rates.values())
    return {name: Rates(rate.wall[:finished], rate.cpu[:finished]) for name, rate in rates.items()}


def _time(contender: Contender, nth: int, images: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one round."""
    first = max(nth, 0) * images
    samples = contender.order[np.arange(first, first + images) % len(contender.order)].tolist()
    if contender.before is not None:
        contender.before(samples)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    contender.work(nth + 2, samples)
    # The clock of children counts hundredths of a second: a very short round must not divide by zero.
    return max(time.perf_counter() - wall, 1e-6), max(_cpu_seconds() - cpu, 1e-6)


def _cpu_seconds() -> float:
    return time.process_time() + sum(map(_cpu_seconds_of, multiprocessing.active_children()))


def _cpu_seconds_of(child: BaseProcess) -> float:
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:  # no /proc here, or the child has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
