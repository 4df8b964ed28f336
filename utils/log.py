"""The log: on the terminal by one process, in log.txt for the run, in ranks/N.log for each rank."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import sys
from collections.abc import Iterable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from utils.standard_output import LineFile, OutputError, discard_output
from utils.text import counted, redacted
from vitamp.files import LINK, NotRegular

if TYPE_CHECKING:
    from utils.terminal import Brief

log = logging.getLogger("vitamp")
LOG = "log.txt"
MOST_WARNINGS = 5
"""On the terminal before a training's banner; its log.txt has all."""
DETAIL = {"detail": True}
"""`extra` of a log line that a terminal with a table of epochs leaves out; log.txt and pipes have it."""
IN_FULL = {"in_full": True}
"""`extra` of a log line that such a terminal neither shortens nor leaves out before training begins."""
SHOWN = list(range(32)) + list(range(127, 160)) + list(range(0xDC80, 0xDD00))
IN_LINE = {code: ascii(chr(code))[1:-1] for code in SHOWN}
"""What a line shows of control characters in a name or setting, and of bytes that are not UTF-8"""
CONTROL = {code: text for code, text in IN_LINE.items() if chr(code) not in "\t\n"}
"""The same for a text with lines of its own; a terminal would obey the others."""


@contextlib.contextmanager
def unheard(least: int = logging.ERROR) -> Iterator[None]:
    """Log nothing but errors, or what is at `least` of this level."""
    level = log.level
    log.setLevel(max(level, least))
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Print only warnings and errors; the run's files get all lines."""
    terminal = _terminal() or logging.NullHandler()
    terminal.setLevel(logging.WARNING)
    try:
        yield
    finally:
        terminal.setLevel(logging.NOTSET)


def log_lines(lines: Iterable[str]) -> None:
    """Log those of the lines that are not empty."""
    for line in filter(None, lines):
        log.info("%s", line)


def warn_once(text: str, level: int = logging.WARNING) -> None:
    """Log a warning, once per process. What `unheard` keeps from the log does not count."""
    if log.isEnabledFor(level):
        _log_once(text, level)


@functools.cache
def _log_once(text: str, level: int) -> None:
    log.log(level, "%s", text)


class _Terminal(logging.Handler):
    """Prints above a progress bar instead of through it; warnings and errors go to stderr."""

    def __init__(self, survives_closed_pipe: bool) -> None:
        super().__init__()
        self._survives_closed_pipe = survives_closed_pipe
        self.brief: Brief | None = None
        """What chooses the lines that are shown; None: all are."""
        self.warnings_left: int | None = None
        """How many warnings are shown before others are held; None: all."""
        self.held: list[str] = []
        """Warnings that only log.txt will have, unless an error comes before it"""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno == logging.WARNING and self.warnings_left is not None:
            self.warnings_left -= 1
            if self.warnings_left < 0:
                self.held.append(text)
                return
        if record.levelno > logging.WARNING:
            while self.held:
                self.print(self.held.pop(0), sys.stderr)
        if self.brief is not None:
            text = self.brief.shown(record, text)
        if text is not None:
            self.print(text, sys.stderr if record.levelno >= logging.WARNING else sys.stdout)

    def print(self, text: str, stream: TextIO) -> None:
        if stream is sys.stderr:  # where both go into one pipe, what a tool has printed comes first
            with contextlib.suppress(OSError, OutputError):  # reported by what is printed next, or at the end
                sys.stdout.flush()
        try:
            tqdm.write(text, file=stream)
            stream.flush()
        except (OSError, OutputError) as error:
            in_file = any(isinstance(handler, _File) for handler in log.handlers)  # not in a dry run
            if not self._survives_closed_pipe or (isinstance(error, OutputError) and not in_file):
                raise
            discard_output(stream)
            name = "standard error" if stream is sys.stderr else "standard output"
            if isinstance(error, BrokenPipeError):
                log.info("The program reading %s has closed its pipe: the run continues and logs to %s.", name, LOG)
            else:
                why = error if isinstance(error, OutputError) else f"{name} cannot be written ({error.strerror})"
                log.warning("%s: the run continues and logs to %s.", why, LOG)


class _File(logging.Handler):
    """Appends to a file of the run; a full disk does not stop the run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lines = LineFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.add(self.format(record))

    def close(self) -> None:
        self._lines.close()
        super().close()


def _make_harmless(record: logging.LogRecord) -> bool:
    """Filter of the logger: messages of libraries, too, may have a URL or a file's name in them."""
    if isinstance(record.args, tuple) and str(record.msg).strip() != "%s":  # else it is a text with lines of its own
        record.args = tuple(str(one).translate(IN_LINE) if isinstance(one, str | Path) else one for one in record.args)
    record.msg = redacted(record.getMessage()).translate(CONTROL)
    record.args = None
    return True


def start_log(to_terminal: bool, survives_closed_pipe: bool = False) -> None:
    """Begin logging; only one process of a run logs `to_terminal`.

    `survives_closed_pipe`: continue without the terminal once its reader, `| head` for example, has closed the pipe,
    and with files of the run also once its disk is full. Otherwise the error is raised.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addFilter(_make_harmless)
    if to_terminal:
        terminal = _Terminal(survives_closed_pipe)
        terminal.setFormatter(_WithLevel("%(message)s"))
        log.addHandler(terminal)
    # Until the run's folder exists.
    log.addHandler(MemoryHandler(sys.maxsize, flushLevel=sys.maxsize))


def log_into(folder: Path, rank: int) -> None:
    """From now on, also log to files in the run's folder; records logged before are added."""
    files = [folder / "ranks" / f"{rank}.log"]
    if rank == 0:
        files.append(folder / LOG)
    buffers = [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]
    if files[0].parent.is_symlink():
        raise NotRegular(errno.ELOOP, LINK, str(files[0].parent))
    for path in files:
        handler = _File(path)
        handler.setFormatter(_WithLevel("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
        for buffer in buffers:
            for record in buffer.buffer:
                handler.handle(record)
    for buffer in buffers:
        log.removeHandler(buffer)


def write_to_files(text: str, rank_0_is_lost: bool) -> None:
    """Write an error to this rank's log file without printing it; to log.txt too, if rank 0 no longer can."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, redacted(text), (), None)
    for handler in [handler for handler in log.handlers if isinstance(handler, _File)]:
        handler.handle(record)
        if rank_0_is_lost:
            with contextlib.suppress(NotRegular):
                run_log = _File(handler.path.parents[1] / LOG)
                run_log.setFormatter(handler.formatter)
                run_log.handle(record)
                run_log.close()


def logs_to_terminal() -> bool:
    return _terminal() is not None


def _terminal() -> _Terminal | None:
    return next((handler for handler in log.handlers if isinstance(handler, _Terminal)), None)


def shorten_on_terminal() -> None:
    """From now on, the terminal, or what takes its place, leaves out details, if this process logs to it."""
    terminal = _terminal()
    if terminal:
        from utils.terminal import Brief

        terminal.brief = Brief()


def hold_warnings(after: int = MOST_WARNINGS) -> None:
    """Show this many warnings on the terminal, if this process logs to one, and hold the others."""
    terminal = _terminal()
    if terminal:
        terminal.warnings_left = after


def stop_holding_warnings(counts: bool = True) -> None:
    """Show all warnings from now on. Those held are in log.txt, and counted on the terminal if `counts`."""
    terminal = _terminal()
    if terminal:
        if terminal.held and counts:
            print_on_terminal(f"{counted(len(terminal.held), 'more warning')} in {LOG}")
        terminal.held.clear()
        terminal.warnings_left = None


def brief_terminal() -> Brief | None:
    """What chooses the lines on the terminal; None where it shows all of them, as pipes and files do."""
    terminal = _terminal()
    return terminal.brief if terminal else None


def print_on_terminal(text: str) -> None:
    """Print text that log.txt does not get."""
    terminal = _terminal()
    if terminal:
        if terminal.brief is not None:
            terminal.brief.count(text)
        terminal.print(redacted(text), sys.stdout)


class _WithLevel(logging.Formatter):
    """Prefixes warnings and errors with their level; ordinary lines have no prefix, for grep."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return text.replace(record.getMessage(), f"{record.levelname.lower()}: {record.getMessage()}", 1)
