"""What the report of a measurement shows: tables with notes, as text and as Markdown, and charts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.common.tables import in_columns, in_markdown
from utils.program import as_started_here

NOT_MEASURED = ("-budget_min", "-json", "-plot", "-out")
"""Flags of this machine's files and time: they do not change what is measured."""


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    rows: list[list[str]]
    """The first row is the heading."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """One chart of the picture: bars (name -> value), or lines (name -> points)."""

    title: str
    unit: str
    bars: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    below: str = ""
    """Label of the x axis."""
    dashed: tuple[str, ...] = ()
    """Lines that were not measured."""


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
        text += [f"{section.title}:", "", *in_markdown(section.rows), "", *in_list(section.notes)]
    return text


def in_list(notes: Sequence[str]) -> list[str]:
    return [*(f"- {note}" for note in notes), ""] if notes else []


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
    return as_started_here(shlex.join(["python", f"scripts/{script}", *kept]))
