"""Output formats of scripts/predict.py, written row by row."""

from __future__ import annotations

import csv
import json
import shutil
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from tools.common.tables import shown

NARROWEST_NAME = 12
LONGEST_IMAGE = 60


class Guess(NamedTuple):
    label: int
    name: str
    probability: float


class Form:
    """One output format. Unreadable images are named on standard error besides."""

    def __init__(self, stream: TextIO, classes: Sequence[str], topk: int, paths: Sequence[str]) -> None:
        """`classes` and `paths` give the widths of columns before the first row."""
        self.stream, self.classes, self.topk, self.paths = stream, classes, min(topk, len(classes)), paths

    def begin(self) -> None: ...

    def failure(self, path: str, reason: str) -> None: ...

    def end(self) -> None: ...


class Csv(Form):
    """One line per guess, or one without a class; none for an unreadable image."""

    def begin(self) -> None:
        self.writer = csv.writer(self.stream, lineterminator="\n")
        self.writer.writerow(("image", "rank", "label", "class", "probability"))

    def image(self, path: str, best: list[Guess]) -> None:
        for rank, guess in enumerate(best, start=1):
            self.writer.writerow((path, rank, guess.label, guess.name, f"{guess.probability:.6f}"))
        if not best:
            self.writer.writerow((path, "", "", "", ""))


class JsonLines(Form):
    """One JSON object per line."""

    def image(self, path: str, best: list[Guess]) -> None:
        guesses = [{"class": one.name, "label": one.label, "probability": round(one.probability, 6)} for one in best]
        self.write({"image": path, "guesses": guesses})

    def failure(self, path: str, reason: str) -> None:
        self.write({"image": path, "error": reason})

    def write(self, row: dict[str, object]) -> None:
        self.stream.write(_json(row) + "\n")


class Json(JsonLines):
    """JSON list of the same objects."""

    def begin(self) -> None:
        self.stream.write("[")
        self.separator = "\n"

    def write(self, row: dict[str, object]) -> None:
        self.stream.write(f"{self.separator}{_json(row)}")
        self.separator = ",\n"

    def end(self) -> None:
        self.stream.write("\n]\n")


class Table(Form):
    """Text table within the terminal's width: one line per image if all guesses fit, else one line per guess."""

    def begin(self) -> None:
        self.columns = columns = shutil.get_terminal_size(fallback=(120, 24)).columns
        longest_path = max([5, *(_width(shown(path)) for path in self.paths)])
        longest_class = max([5, *(_width(shown(name)) for name in self.classes)])
        cell = 2 + longest_class + 8
        self.one_line = min(longest_path, LONGEST_IMAGE) + self.topk * cell <= columns
        if self.one_line:
            self.image_width = min(longest_path, columns - self.topk * cell)
            self.class_width = longest_class
            head = "".join(_fit(f"{rank}", longest_class + 8) for rank in range(1, self.topk + 1))
        else:
            narrowed = min(longest_class, columns - 10 - min(longest_path, columns // 2))
            self.class_width = max(NARROWEST_NAME, narrowed)
            self.image_width = max(8, min(longest_path, columns - 10 - self.class_width))
            head = _fit("class", self.class_width)
        self._line("image", head)

    def image(self, path: str, best: list[Guess]) -> None:
        cells = [f"{_fit(shown(one.name), self.class_width)} {100 * one.probability:5.1f} %" for one in best]
        if self.one_line:
            self._line(path, "  ".join(cells) or "-")
            return
        if not cells:
            self._line(path, "-")
        for cell, first in zip(cells, (path, *[""] * len(cells)), strict=False):
            self._line(first, cell)

    def failure(self, path: str, reason: str) -> None:
        text = f"cannot be read: {shown(reason)}"
        self._line(path, _fit(text, min(_width(text), max(14, self.columns - 2 - self.image_width))))

    def _line(self, path: str, rest: str) -> None:
        self.stream.write(f"{_fit(shown(path), self.image_width, from_left=True)}  {rest}".rstrip() + "\n")


FORMATS: dict[str, type[Form]] = {"table": Table, "csv": Csv, "json": Json, "jsonl": JsonLines}
ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "jsonl"}


def _json(row: dict[str, object]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(row)


def _fit(text: str, width: int, from_left: bool = False) -> str:
    """Text in exactly `width` columns: too long text loses its end, or its beginning with `from_left`."""
    if _width(text) > width:
        while _width(text) > width - 1:
            text = text[1:] if from_left else text[:-1]
        text = f"…{text}" if from_left else f"{text}…"
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text if letter > "ÿ")
