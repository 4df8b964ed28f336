"""Plain text for the log and the console: nouns, aligned tables; and passwords, which it leaves out."""

import json
import re
from collections.abc import Sequence
from typing import Any


def counted(number: float, noun: str) -> str:
    """'1 update', '1,234 updates', '2 processes'."""
    amount = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    if number == 1:
        return f"{amount} {noun}"
    ending = "es" if noun.endswith(("s", "x", "tch", "sh")) else "s"
    return f"{amount} {noun}{ending}"


def clock(seconds: float) -> str:
    """Format seconds: 3725.4 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def some_of(names: Sequence[object], most: int = 5, separator: str = ", ") -> str:
    """'a, b and 3 more', with the first `most` of these names."""
    more = f"{separator.strip(', ')} and {len(names) - most} more" if len(names) > most else ""
    return separator.join(map(str, names[:most])) + more


CONTROLS = list(range(32)) + list(range(127, 160)) + [0x2028, 0x2029]
LINE_BREAKING = {code: ascii(chr(code))[1:-1] for code in CONTROLS}


def one_line(name: str) -> str:
    """A file's name with its control characters as escapes: it can neither forge a line of a log nor break a list."""
    return name if name.isprintable() else name.translate(LINE_BREAKING)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns two blanks apart, padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY = r"(?:[^\s'\"\\]|\\[^\s'\"])*"  # in JSON, the backslash before a quotation mark is no part of it
_SIGNED = re.compile(
    rf"(://[^\s?'\"]+)\?{_QUERY}(?:sig|token|key|credential|secret|password|auth){_QUERY}", re.IGNORECASE
)
"""A URL whose query has a signature or a token."""


def redacted(text: str) -> str:
    """Text whose URLs have *** in place of user:password and of signed queries."""
    return _SIGNED.sub(rf"\1?{HIDDEN}", _USER.sub(f"{HIDDEN}@", text)) if "://" in text else text


def redacted_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can hold, as JSON gives them back, with `redacted` texts."""
    return json.loads(redacted(json.dumps(values)))


def is_redacted(url: str) -> bool:
    return f"://{HIDDEN}@" in url or url.endswith(f"?{HIDDEN}")


def multiples_near(number: int, unit: int) -> str:
    """'96 or 128': the multiples of 32 beside 100."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
