"""TensorBoard's files. Points that the disk refuses are kept, and drawn when it takes them again."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from utils.log import log

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

SECONDS_BETWEEN_TRIES = 30.0
POINTS_BETWEEN_FLUSHES = 2000


class Board:
    def __init__(self, folder: Path, start: int) -> None:
        """`start`: what an earlier process drew from this update on is not shown."""
        self._folder, self._start = folder, start
        self._unsure: list[tuple[str, float, int]] = []
        """Points that may not have reached the file yet."""
        self._writer: SummaryWriter | None = None
        self._tried = self._told = False
        self._tried_at = 0.0
        _keep_quiet()

    def add(self, name: str, value: float, update: int) -> None:
        self._unsure.append((name, value, update))
        if self._writer is None:
            self._draw_all()
            return
        try:
            self._writer.add_scalar(name, value, update)
        except OSError as error:
            self._give_up(error)
        if len(self._unsure) >= POINTS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.flush()
            self._unsure.clear()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._writer is None and self._unsure:
            self._tried = False
            self._draw_all()
        self.flush()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _draw_all(self) -> None:
        """Begin a file, at first or after trouble; not at every point while the trouble lasts."""
        if self._tried and monotonic() - self._tried_at < SECONDS_BETWEEN_TRIES:
            return
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import: not before there is a point

        self._tried, self._tried_at = True, monotonic()
        first = min((update for _, _, update in self._unsure), default=self._start)
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._start if not self._told else first)
            for name, value, update in self._unsure:
                self._writer.add_scalar(name, value, update)
            self._writer.flush()
        except OSError as error:
            self._give_up(error)
            return
        self._unsure.clear()
        if self._told:
            self._told = False
            log.info("TensorBoard's files can be written again.")

    def _give_up(self, error: OSError) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
        if not self._told:
            self._told = True
            log.warning(
                "%s cannot be written (%s). Its points are kept and drawn when it can be; training goes on.",
                self._folder,
                error.strerror,
            )


def _keep_quiet() -> None:
    """TensorBoard's thread raises what the disk says at its end, too, where nobody can catch it."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (type(args.thread).__name__ == "_AsyncWriterThread" and issubclass(args.exc_type, OSError)):
            before(args)

    threading.excepthook = hook
