"""TensorBoard's files. Points that cannot be written are kept in memory and written later."""

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
    """Writer of TensorBoard's files that survives disk errors."""

    def __init__(self, folder: Path, start: int) -> None:
        """`start`: points that an earlier process wrote from this update on are hidden."""
        self._folder, self._start = folder, start
        self._unsure: list[tuple[str, float, int]] = []
        """Points that may not be in the file yet."""
        self._writer: SummaryWriter | None = None
        self._tried = self._failing = False
        self._tried_at = 0.0
        _silence_writer_thread()

    def add(self, name: str, value: float, update: int) -> None:
        self._unsure.append((name, value, update))
        if self._writer is None:
            self._start_file()
            return
        try:
            self._writer.add_scalar(name, value, update)
        except OSError as error:
            self._drop_writer(error)
        if len(self._unsure) >= POINTS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.flush()
            self._unsure.clear()
        except OSError as error:
            self._drop_writer(error)

    def close(self) -> None:
        if self._writer is None and self._unsure:
            self._tried = False
            self._start_file()
        self.flush()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _start_file(self) -> None:
        """Start a new file, at first or after an error; while the error lasts, not at every point."""
        if self._tried and monotonic() - self._tried_at < SECONDS_BETWEEN_TRIES:
            return
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, so only once there is a point

        self._tried, self._tried_at = True, monotonic()
        first = min((update for _, _, update in self._unsure), default=self._start)
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._start if not self._failing else first)
            for name, value, update in self._unsure:
                self._writer.add_scalar(name, value, update)
            self._writer.flush()
        except OSError as error:
            self._drop_writer(error)
            return
        self._unsure.clear()
        if self._failing:
            self._failing = False
            log.info("TensorBoard's files can be written again.")

    def _drop_writer(self, error: OSError) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
        if not self._failing:
            self._failing = True
            log.warning(
                "%s cannot be written (%s). Its points are kept in memory and written later; training continues.",
                self._folder,
                error.strerror,
            )


def _silence_writer_thread() -> None:
    """Ignore disk errors that TensorBoard's own thread raises, where nobody can catch them."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (type(args.thread).__name__ == "_AsyncWriterThread" and issubclass(args.exc_type, OSError)):
            before(args)

    threading.excepthook = hook
