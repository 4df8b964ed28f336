"""Plain text for the log and the console: numbers with their nouns, and aligned tables."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: float, noun: str) -> str:
    """'1 update', '1,234 updates', '2 processes'."""
    plural = noun + ("es" if noun.endswith(("s", "x", "tch", "sh")) else "s")
    return f"{number:{'g' if isinstance(number, float) else ','}} {noun if number == 1 else plural}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns two blanks apart, padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
