"""Saving while training goes on: a copy of that moment in standing memory, and a thread that writes it.

What the disk refuses does not end a run. It is told and tried again; no earlier checkpoint is removed before the new
one is safely there. Only a run that would end with its last state unsaved fails.
"""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.folder import best_of, folder_name, prune, publish, read_index, write_files, write_index
from engine.checkpoint.host_copy import StandingCopy, copied, size_words
from engine.measure.meters import Means
from engine.measure.progress import Best, Position
from utils.config.schema import Config
from utils.errors import TrainingError
from utils.log import log

PAUSES = (5.0, 20.0, 60.0)
"""Seconds between attempts while training goes on; the last one again and again."""
PAUSES_AT_THE_END = (1.0, 3.0, 6.0)
SECONDS_OF_SILENCE, SECONDS_AFTER_A_FAILURE = 60.0, 10.0


@dataclass(frozen=True)
class Snapshot:
    """The run at one update, ready to be written. Where its tensors come from is the business of `fill` alone."""

    update: int
    meta: dict[str, Any]
    fill: Callable[[Path], None]
    """Writes all files but meta.json into the folder it is given; called again where that failed."""
    best: int | None
    """The update of the best validation so far."""


@dataclass(frozen=True)
class _Written:
    folder: Path
    size: int
    seconds: float
    trouble: OSError | None
    """What kept index.json or the removal of older ones from following."""


@dataclass(frozen=True)
class _Failed:
    update: int
    error: Exception


def progress(position: Position, finished_epoch: int | None, figures: dict[str, Means], best: Best) -> dict[str, Any]:
    """Where a checkpoint stands, for its meta.json. `figures`: of a validation at this very update."""
    return {
        "epoch": finished_epoch or position.epoch,
        "epoch_finished": finished_epoch is not None,
        "update": position.update,
        "metrics": {
            f"{prefix}{name}": value for prefix, means in figures.items() for name, value in vars(means).items()
        },
        "best": best.record(),
    }


class Saver:
    """Writes a run's checkpoints, one at a time. Lives on the rank that writes; on the others it has nothing to do."""

    def __init__(self, root: Path, config: Config, pinned: bool) -> None:
        self._root, self._config = root, config
        self._copy = StandingCopy(pinned) if config.SAVE_IN_BACKGROUND else None
        self._thread: threading.Thread | None = None
        self._superseded = threading.Event()
        self._outcomes: queue.SimpleQueue[_Written | _Failed] = queue.SimpleQueue()
        self._unsaved: Snapshot | None = None
        self._failing: dict[int, str] = {}
        self._blocked: dict[str, float] = {}
        self._saves = 0
        self.prepared = False
        self.blocked = 0.0
        """Seconds that training stood still for saving, in all."""
        self.longest = 0.0
        """Seconds that the slowest checkpoint took to write."""

    def prepare(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Get the memory for the copies before it is needed, while training goes on."""
        self.prepared = True
        if self._copy is not None:
            size = self._copy.reserve((tensors, state))
            log.info(
                "Checkpoints are copied to %s of host memory and written from there while training goes on "
                "(SAVE_IN_BACKGROUND).",
                size_words(size),
            )

    def save(
        self,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        meta: dict[str, Any],
        best: Best,
        began: float,
    ) -> None:
        """Save what these hold now. `began`: since when training stands still for it, by time.perf_counter."""
        self.wait_for_writer()
        if not self.prepared:
            self.prepare(tensors, state)
        if self._copy is not None:
            tensors, state = self._copy.take((tensors, state))
        else:
            tensors, state = copied((tensors, state))

        def fill(folder: Path) -> None:
            self.write(folder, tensors, state)

        best_update = best.update if best.figure is not None else None
        self.start(Snapshot(meta["update"], meta, fill, best_update), began)

    def write(self, folder: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Put the tensors and the state into `folder`."""
        write_files(folder, tensors, state)

    def start(self, snapshot: Snapshot, began: float) -> None:
        """Write `snapshot`, whose tensors nobody changes until the next one is started."""
        self.wait_for_writer()
        self._unsaved = snapshot
        if self._copy is None:
            self._attempt(snapshot)
        else:
            self._superseded.clear()
            self._thread = threading.Thread(target=self._keep_trying, args=(snapshot,), name="saver", daemon=True)
            self._thread.start()
        passed = time.perf_counter() - began
        self._blocked[folder_name(snapshot.update)] = passed
        self.blocked += passed
        self._saves += 1
        self.look()

    def look(self) -> None:
        """Tell what became of what was being written; costs nothing where nothing was."""
        while not self._outcomes.empty():
            self._tell(self._outcomes.get())

    def finish(self) -> None:
        """Wait until the last snapshot is safe, and fail if it cannot be saved."""
        self.wait_for_writer()
        self.look()
        if self._saves > 1:
            log.info("For %d checkpoints training stood still for %.3f s in all.", self._saves, self.blocked)
        for pause in PAUSES_AT_THE_END:
            if self._unsaved is None:
                return
            log.info("The last state is not saved yet: trying again in %g s.", pause)
            time.sleep(pause)
            self._attempt(self._unsaved)
            self.look()
        if self._unsaved is not None:
            last = read_index(self._root)["last"]
            raise TrainingError(
                f"the state after update {self._unsaved.update} could not be saved and is lost: "
                f"{self._failing.get(self._unsaved.update, self._root)}. "
                + (f"The last checkpoint is {last}; mend that, and go on by -resume." if last else "There is none.")
            )

    def let_end(self) -> None:
        """The run has failed: what is being written was good before that, and is still to become a checkpoint."""
        self._superseded.set()
        if self._thread is not None:
            self._thread.join(SECONDS_AFTER_A_FAILURE)

    def wait_for_writer(self) -> None:
        """Let the thread end what it is writing; what it could not write until now it is not to try again."""
        self._superseded.set()
        thread, self._thread = self._thread, None
        while thread is not None and thread.is_alive():
            thread.join(SECONDS_OF_SILENCE)
            if thread.is_alive():
                log.warning("Still waiting for a checkpoint to be written to %s.", self._root)

    def _keep_trying(self, snapshot: Snapshot) -> None:
        """In the thread: write, and after a pause again, until it is done or a newer snapshot takes its place."""
        attempt = 0
        while not self._attempt(snapshot):
            if self._superseded.wait(PAUSES[min(attempt, len(PAUSES) - 1)]):
                return
            attempt += 1

    def _attempt(self, snapshot: Snapshot) -> bool:
        """Whether there is nothing more to do for this snapshot."""
        began = time.perf_counter()
        try:
            folder = publish(self._root, snapshot.update, snapshot.meta, snapshot.fill)
            size = sum(path.stat().st_size for path in folder.iterdir())
            trouble = self._tend(folder, snapshot.best)
        except Exception as error:  # told in the training thread; one that is not the disk's ends the run there
            self._outcomes.put(_Failed(snapshot.update, error))
            return not isinstance(error, OSError)
        self._unsaved = None
        self.longest = max(self.longest, time.perf_counter() - began)
        self._outcomes.put(_Written(folder, size, time.perf_counter() - began, trouble))
        return True

    def _tend(self, folder: Path, best_update: int | None) -> OSError | None:
        """Name the last and the best one, and remove those that need not be kept."""
        try:
            best = best_of(self._root, best_update)
            write_index(self._root, folder.name, best)
            prune(self._root, self._config.KEEP_LAST, folder.name, best, self._config.KEEP_EVERY)
        except OSError as error:
            return error
        return None

    def _tell(self, outcome: _Written | _Failed) -> None:
        if isinstance(outcome, _Written):
            self.longest = max(self.longest, outcome.seconds)
            log.info(
                "Checkpoint %s: %s, written in %.1f s; training stood still for %.3f s.",
                outcome.folder.name,
                size_words(outcome.size),
                outcome.seconds,
                self._blocked.pop(outcome.folder.name, 0.0),
            )
            self._failing = {}
            if outcome.trouble:
                log.warning("Older checkpoints and index.json stay as they are: %s.", self._words(outcome.trouble))
            return
        if not isinstance(outcome.error, OSError):
            raise outcome.error
        words = self._words(outcome.error)
        if self._failing.get(outcome.update) != words:  # another attempt may fail for another reason
            log.warning(
                "The checkpoint of update %d could not be written: %s. Earlier ones are untouched; training goes on, "
                "and it is tried again.",
                outcome.update,
                words,
            )
        self._failing = {outcome.update: words}

    def _words(self, error: OSError) -> str:
        # A hidden folder that is gone already helps nobody.
        where = self._root if ".tmp-" in str(error.filename) else error.filename
        text = f"{where or self._root}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += f", {size_words(shutil.disk_usage(self._root.parent).free)} are free"
        return text
