"""What a terminal can show, and which log lines one with a table of epochs shows (LOG_STYLE auto, table)."""

import logging
import os
import shutil
import sys

MOST_LINES = 10
"""Before the first update, warnings aside."""
MAIN_ROWS = ("device", "precision", "model", "data", "training", "output")
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
    """Chooses what the terminal shows of each log line: before training begins, one line each, and no details."""

    def __init__(self) -> None:
        """Begin before training: lines are counted, so that the banner and all notes fit into MOST_LINES."""
        self.can_redraw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        """Whether a line can be drawn again in place."""
        self.colours = self.can_redraw and not os.environ.get("NO_COLOR")
        self.training = False
        """Whether the first update has begun, after which lines are shown in full."""
        self.lines = 0
        """Lines shown so far."""
        self.left_out = 0
        """Notes that there was no room for."""
        self._has_banner = False
        """Whether the banner was shown, after which room is scarce."""

    def shown(self, record: logging.LogRecord, text: str) -> str | None:
        """Return the text of a log line as the terminal shows it; None if it is left out.

        Details are always left out. Before training, other lines are shortened to one line of the terminal, and left
        out if there is no room; warnings, and lines in full, are not.
        """
        is_detail = getattr(record, "detail", False)
        if is_detail:
            return None
        in_full = getattr(record, "in_full", False)
        is_warning = record.levelno >= logging.WARNING
        if not self.training and not is_warning and not in_full:
            # Two lines of room are for the note on what was left out, and for the first line of training.
            is_full = self._has_banner and self.lines >= MOST_LINES - 2
            if is_full:
                self.left_out += 1
                return None
            text = shortened(text.partition("\n")[0])
        self.count(text)
        return text

    def coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours else text

    def count(self, text: str) -> None:
        self.lines += text.count("\n") + 1

    def banner(self, text: str) -> str:
        """Return the main rows of the banner. From now on, only as many notes are shown as there is room for."""
        self._has_banner = True
        head, *rows = text.splitlines()
        starts = tuple(f"  {name} " for name in MAIN_ROWS)
        main = [row for row in rows if row.startswith(starts)]
        return "\n".join(map(shortened, [head, *main]))
