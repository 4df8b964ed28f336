"""Tables of text: in columns for the terminal, in Markdown for a page of the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[str]]
"""The first row is the heading."""


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
