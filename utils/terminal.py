"""What a terminal can show, and which log lines standard output shows (LOG_STYLE auto, table)."""

import logging
import os
import shutil
import sys

MOST_LINES = 12
"""Before the first epoch, warnings aside"""
MAIN_ROWS = ("device", "precision", "model", "data", "inputs", "training")
"""Of the banner"""


def terminal_width() -> int:
    """Columns that a line may fill: some terminals wrap a line that fills the last one; files and pipes take any."""
    return max(shutil.get_terminal_size(fallback=(10_000, 24)).columns - 1, 20)


def shortened(text: str) -> str:
    """Cut at a blank to one line of the terminal."""
    width = terminal_width()
    if len(text) <= width:
        return text
    cut = text[: width - 3]
    at_blank = cut.rpartition(" ")[0].rstrip(" ,;:")
    return f"{at_blank or cut}..."


class Brief:
    """Chooses which log lines standard output shows: few before training begins, and details only in log.txt."""

    def __init__(self, has_table: bool) -> None:
        """Begin before training: lines are counted, so that the banner and all notes fit into MOST_LINES.

        has_table: whether a table of epochs takes the place of log lines
        """
        self.has_table = has_table
        self.can_redraw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        """Whether a line can be drawn again in place"""
        self.colours = self.can_redraw and not os.environ.get("NO_COLOR")
        self.training = False
        """Whether training has begun, after which lines are shown in full"""
        self.lines = 0
        """Lines shown so far"""
        self.left_out = 0
        """Lines left out before training"""
        self._has_banner = False
        """Whether the banner was shown, after which room is scarce"""

    def shown(self, record: logging.LogRecord, text: str) -> str | None:
        """Return the text of a log line as standard output shows it; None if it is left out.

        Details are always left out, and the lines that a table takes the place of. Before training, other lines are
        shortened to one line of the terminal, and left out if there is no room; warnings and lines in full are not.
        """
        is_left_out = getattr(record, "detail", False) or (self.has_table and getattr(record, "tabled", False))
        if not self.training:
            is_kept = record.levelno >= logging.WARNING or getattr(record, "in_full", False)
            is_full = self._has_banner and self.lines >= MOST_LINES - 1  # one line says how many are left out
            is_left_out = is_left_out or (is_full and not is_kept)
            if is_left_out:
                self.left_out += text.count("\n") + 1
            elif not is_kept:
                text = shortened(text.partition("\n")[0])
        if is_left_out:
            return None
        if record.levelno < logging.WARNING:
            self.count(text)
        return text

    def coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours else text

    def count(self, text: str) -> None:
        self.lines += text.count("\n") + 1

    def banner(self, text: str) -> str:
        """Return the main rows of the banner. From now on, only as many lines are shown as there is room for."""
        self._has_banner = True
        head, *rows = text.splitlines()
        starts = tuple(f"  {name} " for name in MAIN_ROWS)
        main = [row for row in rows if row.startswith(starts)]
        self.left_out -= len(main) + 1
        return "\n".join(map(shortened, [head, *main]))
