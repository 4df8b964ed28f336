"""What metrics.jsonl of a run says of speed and time, however often the run was started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from utils.better_weights import LABELS, PREFIX
from utils.line_file import parse_json_lines, read_json_lines

TAIL = 2**16
"""Bytes at the end of the file, among which there are whole lines"""
Lines = list[dict[str, Any]]


def read_lines(folder: Path) -> Lines:
    return read_json_lines(folder / "metrics.jsonl")


def last_line(folder: Path) -> dict[str, Any]:
    """The last whole line, without reading a long file; nothing where there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    return next(reversed(parse_json_lines(tail)), {})


def starts(lines: Lines) -> list[Lines]:
    """The lines of each start of the run; every one has a clock of its own."""
    found: list[Lines] = [[]]
    for line in lines:
        if line.get("event") == "run" and line.get("what") in ("start", "resume"):
            found.append([])
        found[-1].append(line)
    return [each for each in found if each]


def perf(lines: Lines, event: str, figure: str) -> list[float]:
    """A figure of all lines of a kind that have it."""
    values = [line.get("perf", {}).get(figure) for line in lines if line.get("event") == event]
    return [value for value in values if value]


def warm(lines: Lines, event: str, figure: str, strictly: bool = False) -> list[float]:
    """A figure of all lines of a kind but the first after every start, which sets things up; of that if it is all."""
    each = [perf(start, event, figure) for start in starts(lines)]
    later = [value for values in each for value in values[1:]]
    return later or ([] if strictly else [value for values in each for value in values])


def best_top1(lines: Lines) -> tuple[float, int, str] | None:
    """The best top-1 in percent over all validations, of the plain weights and of their EMA, as the run itself has it.

    With its epoch, and `EMA` where that was the better one.
    """
    found = [
        (line[f"{prefix}acc1"], line["epoch"], LABELS[which] if prefix else "")
        for line in lines
        if line.get("event") == "val"
        for which, prefix in PREFIX.items()
        if line.get(f"{prefix}acc1") is not None
    ]
    return max(found, key=lambda one: one[0], default=None)


def seconds(lines: Lines) -> float:
    """From each start to the last that is known of it, added up."""
    each = [[*perf(start, "train", "seconds"), *perf(start, "run", "seconds")] for start in starts(lines)]
    return sum(max(values, default=0.0) for values in each)
