"""The log: one voice on the terminal, a file for the run, a file for each rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from utils.line_file import LineFile

log = logging.getLogger("vitamp")
LOG = "log.txt"


class _Terminal(logging.Handler):
    """Prints above a progress bar instead of through it; warnings and errors go to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        tqdm.write(self.format(record), file=stream)
        stream.flush()


class _Early(logging.Handler):
    """Keeps what was said before the run's folder existed, to write it there later."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _File(logging.Handler):
    """Adds to a file of the run, whatever becomes of the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lines = LineFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.add(self.format(record))

    def close(self) -> None:
        self._lines.close()
        super().close()


def _close(logger: logging.Logger) -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def start_log(speaks: bool) -> None:
    """Begin logging; only one process of a run `speaks` on the terminal."""
    _close(log)
    log.setLevel(logging.INFO)
    log.propagate = False
    if speaks:
        terminal = _Terminal()
        terminal.setFormatter(_WithLevel("%(message)s"))
        log.addHandler(terminal)
    log.addHandler(_Early())


def log_into(folder: Path, rank: int) -> None:
    """From now on also write to the run's folder, what was said until now included."""
    files = [folder / "ranks" / f"{rank}.log"]
    if rank == 0:
        files.append(folder / LOG)
    early = [handler for handler in log.handlers if isinstance(handler, _Early)]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _File(path)
        handler.setFormatter(_WithLevel("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
        for kept in early:
            for record in kept.records:
                handler.handle(record)
    for kept in early:
        log.removeHandler(kept)


def write_to_files(text: str, first_is_gone: bool = False) -> None:
    """Write an error to this rank's files without printing it; to log.txt, too, where rank 0 cannot any more."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None)
    for handler in [handler for handler in log.handlers if isinstance(handler, _File)]:
        handler.handle(record)
        if first_is_gone:
            in_its_place = _File(handler.path.parents[1] / LOG)
            in_its_place.setFormatter(handler.formatter)
            in_its_place.handle(record)
            in_its_place.close()


def is_heard() -> bool:
    """Whether this process speaks on the terminal."""
    return any(isinstance(handler, _Terminal) for handler in log.handlers)


class _WithLevel(logging.Formatter):
    """Marks warnings and errors with a word, and leaves ordinary lines as they are, for grep."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return text.replace(record.getMessage(), f"{record.levelname.lower()}: {record.getMessage()}", 1)
