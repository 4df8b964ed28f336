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
    """Columns that a line may fill: some terminals wrap a line that fills the last one."""
    return max(shutil.get_terminal_size().columns - 1, 20)


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
        self.moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        """Whether a line can be drawn again in place."""
        self.colours = self.moves and not os.environ.get("NO_COLOR")
        self.training = False
        """From the first update on, lines are shown in full."""
        self.lines = 0
        """Lines shown so far."""
        self.left_out = 0
        """Notes that there was no room for."""
        self._banner = False

    def shown(self, record: logging.LogRecord, text: str) -> str | None:
        """The text as it is shown; None: not at all."""
        if record.levelno < logging.WARNING and not self.training:
            detail = getattr(record, "detail", False)
            in_full = getattr(record, "in_full", False)
            if detail or (self._banner and self.lines >= MOST_LINES - 2 and not in_full):
                self.left_out += not detail
                return None
            if not in_full:
                text = shortened(text.partition("\n")[0])
        elif getattr(record, "detail", False):
            return None
        self.count(text)
        return text

    def coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours else text

    def count(self, text: str) -> None:
        self.lines += text.count("\n") + 1

    def banner(self, text: str) -> str:
        """The main rows of the banner. From now on, only as many notes are shown as there is room for."""
        self._banner = True
        head, *rows = text.splitlines()
        starts = tuple(f"  {name} " for name in MAIN_ROWS)
        main = [row for row in rows if row.startswith(starts)]
        return "\n".join(map(shortened, [head, *main]))
