"""One line on the terminal that is drawn again in place, below everything else that is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from utils.terminal import Looks, terminal_width

SECONDS_BETWEEN_DRAWINGS = 0.1
GAP = "  "
CYAN, DIM = "36", "2"
LONGEST, SHORTEST = 30, 8
BEFORE_BAR = 3
"""So many pieces are more important than the bar"""


class Piece(NamedTuple):
    text: str
    rank: int
    """Where the line is too long, pieces with the largest rank are left out"""


def line_of(pieces: Sequence[Piece], fraction: float | None, width: int, looks: Looks) -> str:
    """The pieces that fit. `fraction`: drawn after the first piece, if there is room."""
    kept, bar = list(pieces), 0 if fraction is None else len(GAP) + SHORTEST
    while len(kept) > 1 and len(GAP.join(piece.text for piece in kept)) + bar > width:
        if bar and len(kept) <= BEFORE_BAR:
            bar = 0
        else:
            kept.remove(max(kept, key=lambda piece: piece.rank))
    texts = [piece.text for piece in kept]
    room = min(width - len(GAP.join(texts)) - len(GAP), LONGEST)
    if fraction is not None and room >= SHORTEST:
        texts.insert(1, _drawn(round(fraction * room), room, looks))
    return GAP.join(texts)


def _drawn(done: int, room: int, looks: Looks) -> str:
    full, empty = ("━", "━" if looks.colours else "·") if looks.unicode else ("#", ".")
    return looks.coloured(full * done, CYAN) + looks.coloured(empty * (room - done), DIM)


class Bar:
    """tqdm keeps it below log lines; here it is drawn at most ten times a second."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._drawn = 0.0
        self._stderr: TextIO | None = None
        self._line: tqdm | None = None
        if looks.moves:
            self._line = tqdm(file=sys.stdout, bar_format="{desc}", leave=False)
            self._stderr, sys.stderr = sys.stderr, _AboveBar(sys.stderr)

    def is_due(self, now: float) -> bool:
        return self._line is not None and now - self._drawn >= SECONDS_BETWEEN_DRAWINGS

    def draw(self, pieces: Sequence[Piece], fraction: float | None, now: float) -> None:
        if self._line is not None:
            self._drawn = now
            self._line.set_description_str(line_of(pieces, fraction, terminal_width(), self._looks))

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._stderr is not None:
            sys.stderr.flush()
            sys.stderr, self._stderr = self._stderr, None


class _AboveBar:
    """Standard error: whole lines, which warnings of Python and of libraries are, are printed above the bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begun = stream, ""

    def write(self, text: str) -> int:
        whole, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            with tqdm.external_write_mode(file=self):  # pyright: ignore[reportArgumentType]
                self._stream.write(whole + newline)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
