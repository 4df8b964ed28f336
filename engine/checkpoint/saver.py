"""Saving in the background: training pauses only for a copy to host memory, which a thread writes to the disk.

A disk error does not end a run: it is logged, and the next save writes a newer state. No earlier checkpoint is removed
before the new one is safely on the disk. The last state of a run is retried; a run fails only if it would end with it
unsaved."""

import errno
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.checkpoint.folder import new_checkpoint, prune, write_files
from engine.machine.stopping import signals
from engine.update import TrainState
from utils.config.schema import Config
from utils.errors import TrainingError
from utils.log import DETAIL, log
from utils.record.run_folder import reason
from vitamp.checkpoints import best_of, folder_name, read_index, write_index

T = TypeVar("T")


class HostCopy:
    """Host memory for one snapshot at a time: `take` overwrites the previous one."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._places: list[Tensor] = []
        self.problem = ""
        """Why memory could not be allocated"""

    def take(self, tree: T) -> T | None:
        """Copy `tree` with its tensors to host memory, which stays unchanged until the next call.

        None if there is not enough memory.
        """
        tensors = [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._layout != layout and not self._allocate(layout):
            return None
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # In one thread: memory is the limit, and on a busy machine torch's threads wait long for each other.
                np.copyto(_bytes(place), _bytes(tensor))
            else:
                place.copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        places = iter(self._places)
        return tree_map_only(Tensor, lambda _: next(places), tree)

    def _allocate(self, layout: list[tuple[torch.Size, torch.dtype]]) -> bool:
        """Whether there is memory for tensors of this layout, which is pageable if it cannot be page-locked."""
        self._places = []  # the old memory first: there may be no room for both
        try:
            self._places = [torch.empty(shape, dtype=dtype, pin_memory=self._pinned) for shape, dtype in layout]
        except (RuntimeError, MemoryError) as error:
            self._layout = []
            size = sum(shape.numel() * dtype.itemsize for shape, dtype in layout)
            self.problem = f"{size_words(size)}: {error}".partition("\n")[0]
            if not self._pinned:
                return False
            log.warning(
                "There is no page-locked host memory for copies of checkpoints (%s). They are made in pageable "
                "memory, so each save pauses training for longer.",
                self.problem,
            )
            self._pinned = False
            return self._allocate(layout)
        self._layout = layout
        return True


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def size_words(size: int) -> str:
    """1385082496 -> '1.39 GB'."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1e3:.0f} kB"


PAUSES_AT_THE_END = (1.0, 3.0, 6.0)
"""Seconds before each further attempt to write the last state"""
SECONDS_OF_SILENCE = 60.0
SECONDS_AFTER_A_FAILURE = 10.0
BYTES_SAVED_PER_SECOND = 200e6


@dataclass(frozen=True)
class Snapshot:
    """State of a run after one update: all that this rank saves."""

    tensors: dict[str, dict[str, Tensor]]
    """By the file they are written to."""
    state: dict[str, Any]
    meta: dict[str, Any]
    best: int | None
    """Update of the best validation so far."""
    paused_at: float = field(default_factory=time.perf_counter)
    """When training was paused to take it, by time.perf_counter."""

    @property
    def update(self) -> int:
        return self.meta["update"]


def estimate_seconds(parts: TrainState) -> float:
    """Cautious estimate for the first checkpoint: all weights, and two optimiser moments of each weight."""
    weights = sum(p.nbytes for p in parts.model.parameters())
    return (3 + len(parts.others)) * weights / BYTES_SAVED_PER_SECOND


class RankSaver:
    """Saver of a rank that writes nothing, and base class of those that write.

    The trainer calls the same methods on every rank.
    """

    longest = 0.0
    """Seconds that the slowest checkpoint took to write; only rank 0 knows."""
    failing: Mapping[int, str] = {}
    """The update whose checkpoint could not be written, and why, until one is written; only rank 0 knows."""

    def save(self, snapshot: Snapshot) -> None:
        """Save `snapshot`, whose tensors training may change as soon as this returns."""

    def wait_for_writer(self) -> None:
        """Wait until the previous snapshot is written, and log the outcome."""

    def report(self) -> None:
        """Log what has been written, or could not be, since the last call."""

    def finish(self) -> None:
        """Wait until the last snapshot is saved; raise TrainingError if it cannot be."""

    def finish_after_failure(self) -> None:
        """Give a write in progress some time: the run has failed, but this snapshot was taken before."""


class Saver(RankSaver):
    """Rank 0's saver: writes checkpoints, one at a time, and removes old ones."""

    def __init__(self, root: Path, config: Config, pinned: bool) -> None:
        self._root = root
        self._config = config
        self._copy: HostCopy | None = HostCopy(pinned)
        self._thread: threading.Thread | None = None
        self._outcomes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unsaved: Snapshot | None = None
        self._ending = False
        self._pauses: dict[str, float] = {}

    def save(self, snapshot: Snapshot) -> None:
        self.wait_for_writer()
        live = snapshot.tensors, snapshot.state
        copied = self._copy.take(live) if self._copy is not None else None
        if self._copy is not None and copied is None:
            log.warning(
                "There is no host memory for copies of checkpoints (%s). From now on, training pauses until the files "
                "are written.",
                self._copy.problem,
            )
            self._copy = None
        # Without a copy, tensors that are on the host already are written as they are.
        tensors, state = copied or tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), live)
        self._unsaved = snapshot = replace(snapshot, tensors=tensors, state=state)
        if self._copy is None:
            self._attempt(snapshot)
        else:
            self._thread = threading.Thread(target=self._attempt, args=(snapshot,), name="saver", daemon=True)
            self._thread.start()
        self._pauses[folder_name(snapshot.update)] = time.perf_counter() - snapshot.paused_at
        self.report()

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write all files but meta.json into `folder`."""
        write_files(folder, snapshot.tensors, snapshot.state)

    def report(self) -> None:
        while not self._outcomes.empty():
            self._outcomes.get()()

    def finish(self) -> None:
        self._ending = True
        self.wait_for_writer()
        for pause in PAUSES_AT_THE_END:
            if self._unsaved is None:
                return
            log.info("The last state is not saved yet; retrying in %g s.", pause)
            time.sleep(pause)
            self._attempt(self._unsaved)
            self.report()
        if self._unsaved is not None:
            update = self._unsaved.update
            last = read_index(self._root)["last"]
            way = "There is no earlier checkpoint."
            if last:
                way = f"The last checkpoint is {last}; fix the cause and resume with -resume."
            raise TrainingError(
                f"the state after update {update} could not be saved and is lost: "
                f"{self.failing.get(update, self._root)}. {way}"
            )

    def finish_after_failure(self) -> None:
        if self._thread is not None:
            self._thread.join(SECONDS_AFTER_A_FAILURE)

    def wait_for_writer(self) -> None:
        thread = self._thread
        self._thread = None
        while thread is not None and thread.is_alive():
            thread.join(SECONDS_OF_SILENCE)
            if thread.is_alive():
                log.warning("Still waiting for a checkpoint to be written to %s.", self._root)
        self.report()

    def _attempt(self, snapshot: Snapshot) -> None:
        """Write a snapshot, and note the outcome for `report`."""
        began = time.perf_counter()
        folder = self._root / folder_name(snapshot.update)
        try:
            with new_checkpoint(self._root, snapshot.update, snapshot.meta) as hidden:
                self.write(hidden, snapshot)
            size = sum(path.stat().st_size for path in folder.iterdir())
            index_error = None  # kept index.json from being updated, or older checkpoints from being removed
            try:
                best = best_of(self._root, snapshot.best)
                write_index(self._root, folder.name, best)
                prune(self._root, self._config.KEEP_LAST, folder.name, best, self._config.KEEP_EVERY)
            except OSError as error:
                index_error = error
        except Exception as error:  # reported in the training thread, where all but a disk error ends the run
            self._outcomes.put(partial(self._report_failed, snapshot.update, error))
            return
        self._unsaved = None
        signals.saved = True
        seconds = time.perf_counter() - began
        self.longest = max(self.longest, seconds)
        self._outcomes.put(partial(self._report_written, folder.name, size, seconds, index_error))

    def _report_written(self, name: str, size: int, seconds: float, index_error: OSError | None) -> None:
        log.info(
            "Checkpoint %s: %s, written in %.1f s; training paused for %.3f s.",
            name,
            size_words(size),
            seconds,
            self._pauses.pop(name, 0.0),
            extra=None if self.failing else DETAIL,
        )
        self.failing = {}
        if index_error:
            words = "index.json was not updated, or older checkpoints were not removed: %s."
            log.warning(words, self._words(index_error))

    def _report_failed(self, update: int, error: Exception) -> None:
        if not isinstance(error, OSError):
            raise error
        words = self._words(error)
        if self.failing.get(update) != words:  # another attempt may fail for another reason
            left = "Earlier checkpoints are untouched" if signals.saved else "Nothing is saved yet"
            then = "" if self._ending else "; training continues, and the next save writes a newer state"
            log.warning("The checkpoint of update %d could not be written: %s. %s%s.", update, words, left, then)
        self.failing = {update: words}

    def _words(self, error: OSError) -> str:
        # The hidden folder is removed by now, so its path would only confuse.
        where = error.filename or self._root
        if ".tmp-" in str(where):
            where = self._root
        free = ""
        if error.errno == errno.ENOSPC:
            disk = self._root if self._root.exists() else self._root.parent  # it may be a link to another disk
            free = f", {size_words(shutil.disk_usage(disk).free)} free"
        return f"{where}: {reason(error, self._root)}{free}"
