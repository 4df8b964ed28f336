"""Tables of measurements: in columns for the terminal, in Markdown for a page of the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.config import Config
from utils.config.keys import default_of, settings, value_of
from utils.program import typed

Rows = Sequence[Sequence[str]]
"""The first row is the heading."""
Columns = Sequence[tuple[str, Callable[[str], str]]]
"""Heading of each column, and its cell for a row's name."""
NOT_MEASURED = ("-budget_min", "-json", "-plot", "-out")
"""Flags of this machine's files and time: they do not change what is measured."""
PATHS = ("SAVE", "OUTPUT", "TAG", "DATA.CACHE", "DATA.DATA_PATH")
"""Settings that name places and do not change what is measured."""


@dataclass(frozen=True)
class Section:
    """One table of a report."""

    title: str
    rows: Rows
    notes: Sequence[str] = field(default_factory=list)


def with_columns(names: Iterable[str], columns: Columns, first: str = "") -> list[list[str]]:
    """A heading, and one row per name. `first`: the heading of the names."""
    heading = [first, *(title for title, _ in columns)]
    return [heading, *([name, *(cell(name) for _, cell in columns)] for name in names)]


def in_columns(rows: Rows) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(["", row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def in_markdown(rows: Rows) -> list[str]:
    head, *body = rows
    cells = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in cells]


def for_terminal(sections: Iterable[Section]) -> list[str]:
    """The tables in columns, each below its title, with an empty line before it."""
    text: list[str] = []
    for section in sections:
        text += ["", section.title, *in_columns(section.rows), *(f"  {note}" for note in section.notes)]
    return text


def for_docs(sections: Iterable[Section]) -> list[str]:
    """The tables in Markdown, with an empty line after each part."""
    text: list[str] = []
    for section in sections:
        text += [f"{section.title}:", "", *in_markdown(section.rows), ""]
        text += [*(f"- {note}" for note in section.notes), ""] if section.notes else []
    return text


def at_commit(about: Mapping[str, Any]) -> str:
    """', commit 7151f42' of measurements, if they were made in a checkout."""
    git = about.get("git")
    return f", commit {git['commit'][:7]}{' with changes' * git['changed']}" if git else ""


def source(link: str) -> str:
    """Sentence that links the file with all measurements of a table."""
    return f"All measurements: [{Path(link).name}]({link})."


def shown(text: str) -> str:
    """A name that is safe on a terminal: characters that would move the cursor are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def as_typed(script: str, words: Sequence[str]) -> str:
    """The command as a reader would type it, without flags for files of this machine."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.replace("--", "-", 1).partition("=")
        if flag == "-overwrite":
            continue
        if flag in NOT_MEASURED:
            if not value and rest:
                rest.pop(0)
        elif not word.startswith("DATA.CACHE="):
            kept.append(word)
    return typed(f"scripts/{script}", kept)


def non_defaults(config: Config) -> dict[str, Any]:
    """Settings that differ from their defaults, as the results of a measurement record them."""
    keys = [key for key in settings() if key not in PATHS]
    return {key: str(value_of(config, key)) for key in keys if value_of(config, key) != default_of(key)}
