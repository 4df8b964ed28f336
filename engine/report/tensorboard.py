"""TensorBoard's files. If they cannot be written, a warning says so; metrics.jsonl has the same points."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from utils.log import log

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Board:
    def __init__(self, folder: Path, start: int) -> None:
        """`start`: points that an earlier process wrote from this update on are hidden."""
        self._folder, self._start = folder, start
        self._writer: SummaryWriter | None = None
        self._ended = False
        _silence_writer_thread()

    def add(self, name: str, value: float, update: int) -> None:
        if self._ended:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard.writer import SummaryWriter  # slow, so only once there is a point

                self._writer = SummaryWriter(str(self._folder), purge_step=self._start)
            self._writer.add_scalar(name, value, update)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        if self._writer is None or self._ended:
            return
        try:
            self._writer.flush()
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _end(self, error: OSError) -> None:
        self._ended = True
        log.warning(
            "%s cannot be written (%s): TensorBoard shows no later points. Training continues, and metrics.jsonl has "
            "them all; if you remove the folder, a resumed run draws them again.",
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
