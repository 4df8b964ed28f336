"""Format tables and names for the terminal, and collect the settings that results of measurements record."""

from collections.abc import Sequence
from typing import Any

from utils.config import Config
from utils.config.keys import OF_ONE_START, deciding, default_of, settings, value_of
from utils.config.kinds import one_line

PATHS = (*deciding("nothing"), "OUTPUT", "DATA.DATA_PATH")
"""Settings that name places or give names, and do not change what is measured"""


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  " + "  ".join(cells))
    return lines


def shown(text: str) -> str:
    """Make a name safe on a terminal: characters that would move the cursor are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def rounded(value: float | None, digits: int = 3) -> str:
    """Format a value with at least `digits` significant digits, and no decimals beyond them; '-' for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def non_defaults(config: Config) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as the results of a measurement record them."""
    keys = [key for key in settings() if key not in PATHS]
    return {key: str(value_of(config, key)) for key in keys if value_of(config, key) != default_of(key)}


def differing_settings(configs: Sequence[Config], besides: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the settings in which runs differ, with the value of each run as text.

    Settings of one start of a run, and those in `besides`, are left out.
    """
    differing = dict[str, list[str]]()
    for key in settings():
        texts = [one_line(value_of(config, key)) for config in configs]
        if key not in OF_ONE_START and key not in besides and len(set(texts)) > 1:
            differing[key] = texts
    return differing
