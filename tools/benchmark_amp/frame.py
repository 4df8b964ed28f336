"""What every table of benchmark_amp.py is made of: contenders that take turns, and the words and figures of the result.

Only light imports here: a table is made into a page of the docs without torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.common.command_line import ToolLine
from tools.common.turns import Ratio, ratio
from utils.cli import Flag

Figures = dict[str, Any]
"""What one turn of one contender gave, as plain values; {'failed': why} where it gave nothing."""
Found = dict[str, Any]
"""What -json holds: see `measure` in benchmark_amp_run.py."""

FORMER_NAMES = {"windows": "amp", "modes": "precisions", "peers": "timm"}
"""Of tables, in command lines and in files of -json."""
AGAIN = ", again"
"""The control: the same contender a second time. How far the two are apart is chance."""


@dataclass(frozen=True)
class Contender:
    """One of those compared. The first turn of a call begins with what must not be measured: building, warming up."""

    name: str
    turn: Callable[[], Figures]
    close: Callable[[], None] = lambda: None
    """Called once, when nothing more is measured."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured. `settings` tell it from other measurements: only their equal goes on from a file."""

    contenders: list[Contender]
    rounds: int
    settings: dict[str, Any]
    device: str
    """In words, with the number of threads."""
    gpu: str | None = None
    """Its UUID, where one is used; its clock is read there."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name -> why it cannot be measured here."""
    remarks: list[str] = field(default_factory=list)
    ceiling: dict[str, Any] = field(default_factory=dict)
    """What the device could do at most, where that is told."""


@dataclass(frozen=True)
class Section:
    """One table of the report."""

    title: str
    rows: list[list[str]]
    """The first is the heading."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """One part of the picture: bars where `y` has a value a name, lines where it has points (x, y) a name."""

    title: str
    unit: str
    bars: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    below: str = ""
    """What x is."""


@dataclass(frozen=True)
class Table:
    """One command: benchmark_amp.py NAME."""

    name: str
    about: str
    """For -h: first a line, then whatever there is to say."""
    flags: tuple[Flag, ...]
    plan: Callable[[ToolLine], Plan]
    sections: Callable[[Found], list[Section]]
    charts: Callable[[Found], list[Chart]]


def with_todays_name(found: Found) -> Found:
    """What a file holds, with its table and its command as they are called today."""
    former = found["table"]
    if former not in FORMER_NAMES:
        return found
    today = FORMER_NAMES[former]
    command = found["command"].replace(f"benchmark_amp.py {former}", f"benchmark_amp.py {today}", 1)
    return {**found, "table": today, "command": command}


def values(found: Found, name: str, key: str) -> list[float]:
    """What `key` was in the turns of a contender, as far as they gave something."""
    return [turn[key] for turn in found["turns"].get(name, []) if turn.get(key) is not None]


def middle(found: Found, name: str, key: str) -> float | None:
    measured = values(found, name, key)
    return statistics.median(measured) if measured else None


def times_as_much(found: Found, name: str, other: str, key: str) -> Ratio | None:
    """`key` of one contender to another's, turn by turn, so that a slow moment of the machine is on both sides."""
    return ratio(values(found, name, key), values(found, other, key))


def subject(found: Found) -> str:
    """What was trained, by its size."""
    settings = found["settings"]
    model, size = settings.get("MODEL.NAME", "vit_base_patch16_224"), settings.get("DATA.IMAGE_SIZE", 224)
    return f"{model}, {size} pixels, batch {settings.get('DATA.BATCH_SIZE', 256)}"


def iteration_line(found: Found) -> str:
    """What an iteration is."""
    batch, parts = (int(found["settings"].get(key, usual)) for key, usual in _BATCH.items())
    each = f"{batch} images" if parts == 1 else f"{parts} micro-batches of {batch} images"
    return f"an iteration is an update: {each}"


_BATCH = {"DATA.BATCH_SIZE": 256, "TRAIN.ACCUM_ITER": 1}


def precision_of(found: Found, name: str) -> str:
    """What a contender computed in."""
    return next((turn["precision"] for turn in found["turns"].get(name, []) if "precision" in turn), "-")


NOT_SHOWN = ("computed_in", "compile_why")


def choices_lines(found: Found, names: Iterable[str]) -> list[str]:
    """What was chosen by the device or by measurement, a line for those that were alike in it."""
    alike: dict[str, list[str]] = {}
    for name in names:
        chosen = next((turn["choices"] for turn in found["turns"].get(name, []) if "choices" in turn), {})
        words = [f"{key} {value}" for key, value in chosen.items() if key not in NOT_SHOWN and value is not False]
        alike.setdefault(", ".join(words), []).append(name)
    return [f"chosen for {', '.join(who)}: {words}" for words, who in alike.items() if words]


def failure(found: Found, name: str) -> str | None:
    return next((turn["failed"] for turn in found["turns"].get(name, []) if "failed" in turn), None)


def failures(found: Found) -> list[str]:
    """A line for each reason for which contenders could not be measured."""
    names: dict[str, list[str]] = {}
    for name, why in found["left_out"].items():
        names.setdefault(why, []).append(name)
    for name in found["turns"]:
        if why := failure(found, name):
            names.setdefault(why, []).append(name)
    return [f"not measured: {', '.join(who)}: {why}" for why, who in names.items()]


def is_anything(found: Found) -> bool:
    """Whether a turn gave something."""
    return any("failed" not in turn for turns in found["turns"].values() for turn in turns)


def shown(number: float | None, digits: int = 3) -> str:
    """With as many digits as say something."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def shown_ratio(found: Ratio | None) -> str:
    """The middle one, and the least and the greatest turn."""
    return "-" if found is None else f"{found.median:.2f} ({found.least:.2f} to {found.most:.2f})"


def control_line(found: Found, name: str, key: str) -> str:
    """What the control says of chance."""
    control = times_as_much(found, name + AGAIN, name, key)
    return f"control: {name}, the same a second time: {shown_ratio(control)}; what is no further from 1 is chance"
