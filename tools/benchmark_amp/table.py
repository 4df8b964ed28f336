"""A table of benchmark_amp.py: what it measures, and how it reports the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.benchmark_amp.results import Metrics, Results
from tools.common.command_line import ToolLine
from tools.common.results.section import Chart, Section
from utils.flags import Flag, whole

ROUNDS = Flag("rounds", "how often each contender is measured", "N", default=3, kind=whole(1))


@dataclass(frozen=True)
class Contender:
    """One of the things compared. Its first turn starts with building and warming up, which are not measured."""

    name: str
    turn: Callable[[], Metrics]
    close: Callable[[], None] = lambda: None
    """Called once, after all measurements."""


@dataclass(frozen=True)
class Machine:
    """The device that is measured."""

    device: str
    """Its name and the number of threads."""
    gpu: str | None = None
    """UUID of the GPU, to read its clock."""
    ceiling: dict[str, Any] = field(default_factory=dict)
    """Peak of the device and operations of the model (ceiling.py)."""


@dataclass(frozen=True)
class Plan:
    """Everything to measure. Only a -json file with equal `settings` is resumed."""

    contenders: list[Contender]
    rounds: int
    settings: dict[str, Any]
    machine: Machine
    images: str
    """Which images are measured."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name -> why it cannot be measured here."""
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """One subcommand: benchmark_amp.py NAME."""

    name: str
    about: str
    """For -h; its first line is the summary."""
    flags: tuple[Flag, ...]
    plan: Callable[[ToolLine], Plan]
    sections: Callable[[Results], list[Section]]
    charts: Callable[[Results], list[Chart]]
