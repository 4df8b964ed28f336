"""metrics.jsonl: one line of JSON per report, which a run writes while it trains, and a resumed run continues."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.passwords import redacted
from utils.standard_output import LineFile
from vitamp.files import only_regular, parse_json, read_regular_text, write_atomically

METRICS = "metrics.jsonl"
TAIL = 2**16
"""Bytes at the end of the file that hold at least one whole line."""
Line = dict[str, Any]


class MetricsFile(LineFile):
    """The lines that a run adds."""

    def __init__(self, folder: Path, repeats: Callable[[Line], bool]) -> None:
        """Remove the lines that the run `repeats`, and a last one that a killed run left incomplete."""
        path = folder / METRICS
        if path.exists():
            kept = [line for line in _texts(path) if any(not repeats(content) for content in _parsed([line]))]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        super().__init__(path)

    def add_values(self, line: Line) -> None:
        self.add(redacted(json.dumps(_plain(line))))


def read_lines(folder: Path) -> list[Line]:
    """The whole lines of a run's file, which may be missing, or be written at this moment."""
    try:
        return _parsed(_texts(folder / METRICS))
    except OSError:
        return []


def last_line(folder: Path) -> Line:
    """The last whole line, without reading a long file; empty if there is none."""
    try:
        with open(folder / METRICS, "rb", opener=only_regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    return next(reversed(_parsed(tail.splitlines())), {})


def is_start(line: Line) -> bool:
    return line.get("event") == "run" and line.get("what") in ("start", "resume")


def is_end(line: Line) -> bool:
    """Whether a line says that the run finished."""
    return line.get("event") == "run" and line.get("what") == "end"


def _texts(path: Path) -> list[str]:
    return read_regular_text(path, errors="replace").splitlines()


def _parsed(texts: list[str]) -> list[Line]:
    """The JSON objects, one per line; other lines are skipped."""
    values: list[Any] = []
    for text in texts:
        with contextlib.suppress(ValueError):
            values.append(parse_json(text))
    return [value for value in values if isinstance(value, dict)]


def _plain(value: Any) -> Any:
    """Replace NaN and infinity by null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
