"""scripts/predict.py: the forms a result can have. Each is written row by row."""

from __future__ import annotations

import csv
import json
import shutil
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from tools.common.tables import shown

NARROWEST_NAME = 12
LONGEST_IMAGE = 60


class Guess(NamedTuple):
    label: int
    name: str
    probability: float


class Form(ABC):
    """One form of output."""

    def __init__(self, stream: TextIO, classes: Sequence[str], topk: int, paths: Sequence[str]) -> None:
        """`classes`, `paths`: what may come, so that columns are wide enough from the first row on."""
        self.stream, self.classes, self.topk, self.paths = stream, classes, min(topk, len(classes)), paths

    def begin(self) -> None: ...  # noqa: B027 - most forms begin with nothing

    @abstractmethod
    def image(self, path: str, best: list[Guess]) -> None: ...

    @abstractmethod
    def failure(self, path: str, reason: str) -> None: ...

    def end(self) -> None: ...  # noqa: B027


class Csv(Form):
    """A line a guess. What cannot be read has none: it is named on standard error."""

    def begin(self) -> None:
        self.writer = csv.writer(self.stream, lineterminator="\n")
        self.writer.writerow(("image", "rank", "label", "class", "probability"))

    def image(self, path: str, best: list[Guess]) -> None:
        for rank, guess in enumerate(best, start=1):
            self.writer.writerow((path, rank, guess.label, guess.name, f"{guess.probability:.6f}"))

    def failure(self, path: str, reason: str) -> None: ...


class JsonLines(Form):
    """An object a line."""

    def image(self, path: str, best: list[Guess]) -> None:
        shown = [{"class": one.name, "label": one.label, "probability": round(one.probability, 6)} for one in best]
        self.write({"image": path, "guesses": shown})

    def failure(self, path: str, reason: str) -> None:
        self.write({"image": path, "error": reason})

    def write(self, row: dict[str, object]) -> None:
        self.stream.write(_json(row) + "\n")


class Json(JsonLines):
    """One list of the same objects."""

    def begin(self) -> None:
        self.stream.write("[")
        self.before = "\n"

    def write(self, row: dict[str, object]) -> None:
        self.stream.write(f"{self.before}{_json(row)}")
        self.before = ",\n"

    def end(self) -> None:
        self.stream.write("\n]\n")


class Table(Form):
    """For people: an image a line if all guesses fit beside it, else a guess a line. Never wider than the terminal."""

    def begin(self) -> None:
        self.room = room = shutil.get_terminal_size(fallback=(120, 24)).columns
        named = max([5, *(_width(shown(path)) for path in self.paths)])
        longest = max([5, *(_width(shown(name)) for name in self.classes)])
        cell = 2 + longest + 8
        self.beside = min(named, LONGEST_IMAGE) + self.topk * cell <= room
        if self.beside:
            self.of_image = min(named, room - self.topk * cell)
            self.of_name = longest
            heads = ["".join(_fit(f"{rank}", longest + 8) for rank in range(1, self.topk + 1))]
        else:
            self.of_name = max(NARROWEST_NAME, min(longest, room - 10 - min(named, room // 2)))
            self.of_image = max(8, min(named, room - 10 - self.of_name))
            heads = [_fit("class", self.of_name)]
        self._line("image", "  ".join(heads))

    def image(self, path: str, best: list[Guess]) -> None:
        cells = [f"{_fit(shown(one.name), self.of_name)} {100 * one.probability:5.1f} %" for one in best]
        if self.beside:
            self._line(path, "  ".join(cells))
            return
        for cell, beside in zip(cells, (path, *[""] * len(cells)), strict=False):
            self._line(beside, cell)

    def failure(self, path: str, reason: str) -> None:
        text = f"cannot be read: {shown(reason)}"
        self._line(path, _fit(text, min(_width(text), max(14, self.room - 2 - self.of_image))))

    def _line(self, path: str, rest: str) -> None:
        self.stream.write(f"{_fit(shown(path), self.of_image, from_left=True)}  {rest}".rstrip() + "\n")


FORMATS: dict[str, type[Form]] = {"table": Table, "csv": Csv, "json": Json, "jsonl": JsonLines}
ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "jsonl"}


def _json(row: dict[str, object]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(row)


def _fit(text: str, width: int, from_left: bool = False) -> str:
    """In exactly `width` columns; what is too long loses its end, or of a path its beginning."""
    if _width(text) > width:
        while _width(text) > width - 1:
            text = text[1:] if from_left else text[:-1]
        text = f"…{text}" if from_left else f"{text}…"
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text if letter > "ÿ")
