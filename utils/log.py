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
"""Number of warnings that the terminal shows before a training's banner; log.txt has all."""
DETAIL = {"detail": True}
"""`extra` of a log line that is in log.txt alone, unless LOG_STYLE prints all lines."""
TABLED = {"tabled": True}
"""`extra` of a log line that a table of epochs takes the place of."""
IN_FULL = {"in_full": True}
"""`extra` of a log line that is neither shortened nor left out before training begins."""
ESCAPED = list(range(32)) + list(range(127, 160)) + list(range(0xDC80, 0xDD00))
IN_LINE = {code: ascii(chr(code))[1:-1] for code in ESCAPED}
"""Control characters, and bytes that are not UTF-8, -> their escapes in a name or setting inside a log line."""
CONTROL = {code: text for code, text in IN_LINE.items() if chr(code) not in "\t\n"}
"""The same for a text of several lines, in which tabs and line breaks stay; a terminal would obey the others."""


@contextlib.contextmanager
def unheard(least: int = logging.ERROR) -> Iterator[None]:
    """Drop the log records of the block that are below a level: by default, all but errors. No file gets them."""
    old_level = log.level
    log.setLevel(max(old_level, least))
    try:
        yield
    finally:
        log.setLevel(old_level)


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Print only warnings and errors inside the block; the run's files get all lines."""
    terminal = _terminal() or logging.NullHandler()  # This process may print nothing.
    terminal.setLevel(logging.WARNING)
    try:
        yield
    finally:
        terminal.setLevel(logging.NOTSET)  # all lines, as before the block


def log_lines(lines: Iterable[str]) -> None:
    """Log each of these lines that is not empty."""
    for line in filter(None, lines):
        log.info("%s", line)


def warn_once(text: str, level: int = logging.WARNING) -> None:
    """Log a text as a warning, once per process; it does not count as logged if `unheard` suppresses it."""
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
        """Chooses and shortens the lines that are shown; None: all are shown in full."""
        self.warnings_left: int | None = None
        """Number of warnings to show before others are held; None: all are shown."""
        self.held: list[str] = []
        """Warnings that are not shown, unless an error comes before `stop_holding_warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless `brief` leaves it out, or it is one warning too many.

        Before an error, the warnings that were held are printed, because they may explain it.
        """
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
        """Print a text above the progress bar; if that fails, raise the error, or continue without this stream.

        The run continues only if `survives_closed_pipe` was given to `start_log`. The error is BrokenPipeError if the
        reader of the stream is gone, and OutputError if the disk is full; then the log must also be in a file.
        """
        if stream is sys.stderr:
            # If both streams go into one pipe, the lines that were printed before must come first. An error in this is
            # reported by the next line on standard output, or at the end.
            with contextlib.suppress(OSError, OutputError):
                sys.stdout.flush()
        try:
            tqdm.write(text, file=stream)
            stream.flush()
        except (OSError, OutputError) as error:
            logs_to_file = any(isinstance(handler, _File) for handler in log.handlers)  # A dry run does not.
            must_stop = isinstance(error, OutputError) and not logs_to_file  # no place is left for the log
            if not self._survives_closed_pipe or must_stop:
                raise
            discard_output(stream)
            name = "standard error" if stream is sys.stderr else "standard output"
            if isinstance(error, BrokenPipeError):
                log.info("The program reading %s has closed its pipe: the run continues and logs to %s.", name, LOG)
            else:
                problem = error if isinstance(error, OutputError) else f"{name} cannot be written ({error.strerror})"
                log.warning("%s: the run continues and logs to %s.", problem, LOG)


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
    """Escape control characters in a record, and hide passwords of URLs; a filter that drops no record.

    It applies to messages of libraries, too, which may have a URL or the name of a file in them.
    """
    # Log calls of the form log.info("%s", text) log a whole text, which may have several lines: only CONTROL is escaped
    # in it. In all others, the arguments are names and settings, in which IN_LINE also escapes tabs and line breaks.
    if isinstance(record.args, tuple) and str(record.msg).strip() != "%s":
        arguments: list[object] = []
        for argument in record.args:
            is_text = isinstance(argument, str | Path)
            arguments.append(str(argument).translate(IN_LINE) if is_text else argument)
        record.args = tuple(arguments)
    record.msg = redacted(record.getMessage()).translate(CONTROL)
    record.args = None
    return True


def start_log(to_terminal: bool, survives_closed_pipe: bool = False) -> None:
    """Begin logging. Records are also kept in memory, until `log_into` writes them into the run's files.

    to_terminal: whether this process prints; only one process of a run does
    survives_closed_pipe: whether to continue without the terminal if it fails, instead of raising the error: if its
        reader, such as `| head`, closes the pipe, or if the disk of its file is full, and the run also logs to files
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
    # This keeps all records until the run's folder exists.
    log.addHandler(MemoryHandler(sys.maxsize, flushLevel=sys.maxsize))


def log_into(folder: Path, rank: int) -> None:
    """Log to files in the run's folder, too, from now on; they begin with the records that were logged before."""
    ranks_folder = folder / "ranks"
    files = [ranks_folder / f"{rank}.log"]
    if rank == 0:
        files.append(folder / LOG)
    # They hold the records that were logged before; see `start_log`.
    memory_handlers = [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]
    if ranks_folder.is_symlink():  # The folder may come from someone else: the link could lead anywhere.
        raise NotRegular(errno.ELOOP, LINK, str(ranks_folder))
    for path in files:
        handler = _File(path)
        handler.setFormatter(_WithLevel("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
        for memory_handler in memory_handlers:
            for record in memory_handler.buffer:
                handler.handle(record)
    for memory_handler in memory_handlers:
        log.removeHandler(memory_handler)


def write_to_files(text: str, rank_0_is_lost: bool) -> None:
    """Write an error to this rank's log file, ranks/N.log, without printing it.

    rank_0_is_lost: whether to write it to log.txt, too, which otherwise only rank 0 writes
    """
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, redacted(text), (), None)
    for handler in [handler for handler in log.handlers if isinstance(handler, _File)]:
        handler.handle(record)
        if rank_0_is_lost:
            run_folder = handler.path.parents[1]
            with contextlib.suppress(NotRegular):  # a link from someone else
                run_log = _File(run_folder / LOG)
                run_log.setFormatter(handler.formatter)
                run_log.handle(record)
                run_log.close()


def logs_to_terminal() -> bool:
    """Whether this process prints log lines."""
    return _terminal() is not None


def _terminal() -> _Terminal | None:
    """The handler that prints log lines; None if this process does not print them."""
    for handler in log.handlers:
        if isinstance(handler, _Terminal):
            return handler
    return None


def shorten_on_terminal(has_table: bool) -> None:
    """Leave out details on standard output from now on, if this process logs to it.

    has_table: whether a table of epochs takes the place of log lines; otherwise details are left out until training
    """
    terminal = _terminal()
    if terminal:
        from utils.terminal import Brief

        terminal.brief = Brief(has_table)


def hold_warnings(after: int = MOST_WARNINGS) -> None:
    """Show this many more warnings on the terminal, if this process logs to it, and hold back the others."""
    terminal = _terminal()
    if terminal:
        terminal.warnings_left = after


def stop_holding_warnings(counts: bool = True) -> None:
    """Show all warnings on the terminal from now on, and forget those that were held back, which are in log.txt.

    counts: whether to print how many were held back
    """
    terminal = _terminal()
    if terminal:
        if terminal.held and counts:
            print_on_terminal(f"{counted(len(terminal.held), 'more warning')} in {LOG}")
        terminal.held.clear()
        terminal.warnings_left = None  # no limit


def end_introduction() -> None:
    """Say how many lines were left out before training, and show the lines of training from now on."""
    brief = brief_terminal()
    if brief is not None:
        if brief.left_out:
            print_on_terminal(f"{counted(brief.left_out, 'more line')} in {LOG}")
        brief.training = True


def brief_terminal() -> Brief | None:
    """The object that chooses the lines on standard output; None if all are shown."""
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
