"""Saves in the background: training pauses only for a copy to host memory, which a thread writes to the disk.

A disk error does not end a run: it is logged, and the next save writes a newer state. No earlier checkpoint is removed
before the new one is safely on the disk. At the end of a run, writing is tried again several times; the run fails only
if its last state cannot be saved."""

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
    """Host memory for a copy of one snapshot at a time: `take` overwrites the previous copy.

    `pinned`: use page-locked memory, into which a GPU copies faster, if there is enough of it.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._copies: list[Tensor] = []
        self.problem = ""
        """Why memory could not be allocated"""

    def take(self, tree: T) -> T | None:
        """Return a copy of `tree` whose tensors are in host memory; None if there is not enough memory.

        The copy stays unchanged until the next call, which writes into the same memory.
        """
        tensors = [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._layout != layout and not self._allocate(layout):
            return None
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # NumPy copies in one thread. Memory is the limit, and on a busy machine torch's threads wait long for
                # each other.
                np.copyto(_view_as_bytes(copy), _view_as_bytes(tensor))
            else:
                copy.copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        # The same tree with each tensor replaced by its copy: both functions of torch visit tensors in the same order.
        copies = iter(self._copies)
        return tree_map_only(Tensor, lambda _: next(copies), tree)

    def _allocate(self, layout: list[tuple[torch.Size, torch.dtype]]) -> bool:
        """Allocate memory for tensors of these shapes and types. Returns False if there is not enough.

        Falls back to pageable memory, with a warning, if page-locked memory does not suffice.
        """
        self._copies = []  # free the old memory first: there may be no room for both
        try:
            self._copies = [torch.empty(shape, dtype=dtype, pin_memory=self._pinned) for shape, dtype in layout]
        except (RuntimeError, MemoryError) as error:
            self._layout = []
            size = sum(shape.numel() * dtype.itemsize for shape, dtype in layout)
            self.problem = f"{size_words(size)}: {error}".partition("\n")[0]  # only the first line of the message
            if not self._pinned:
                return False
            log.warning(
                "There is no page-locked host memory for copies of checkpoints (%s). They are made in pageable "
                "memory, so each save pauses training for longer.",
                self.problem,
            )
            self._pinned = False
            return self._allocate(layout)  # once more, in pageable memory
        self._layout = layout
        return True


def _view_as_bytes(tensor: Tensor) -> np.ndarray:
    """View a contiguous tensor of any type as bytes: NumPy lacks bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def size_words(size: int) -> str:
    """Write a number of bytes for people: 1385082496 -> '1.39 GB'."""
    for bytes_per_unit, unit in ((1e9, "GB"), (1e6, "MB")):
        if size >= bytes_per_unit:
            return f"{size / bytes_per_unit:.2f} {unit}"
    return f"{size / 1e3:.0f} kB"


PAUSES_AT_THE_END = (1.0, 3.0, 6.0)
"""Seconds before each further attempt to write the last state"""
SECONDS_OF_SILENCE = 60.0
"""Time between warnings that a checkpoint is still being written"""
SECONDS_AFTER_A_FAILURE = 10.0
"""Time that a write in progress gets once the run has failed"""
BYTES_SAVED_PER_SECOND = 200e6


@dataclass(frozen=True)
class Snapshot:
    """State of a run after one update: all that this rank saves of it."""

    tensors: dict[str, dict[str, Tensor]]
    """By the file they are written to."""
    state: dict[str, Any]
    meta: dict[str, Any]
    best: int | None
    """Update of the best validation so far."""
    paused_at: float = field(default_factory=time.perf_counter)
    """When training was paused to take the snapshot, by time.perf_counter."""

    @property
    def update(self) -> int:
        return self.meta["update"]


def estimate_seconds(parts: TrainState) -> float:
    """Estimate, rather too high, how long the first checkpoint takes to write, before one has been measured."""
    weights = sum(parameter.nbytes for parameter in parts.model.parameters())
    copies = 3 + len(parts.others)  # the weights, two optimiser moments of each, and other sets such as the EMA
    return copies * weights / BYTES_SAVED_PER_SECOND


class RankSaver:
    """Saver of a rank that writes nothing, and base class of the savers that write.

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
    """Rank 0's saver: writes checkpoints into the folder `root`, one at a time, and removes old ones."""

    def __init__(self, root: Path, config: Config, pinned: bool) -> None:
        self._root = root
        self._config = config
        # None once there is no host memory for a copy: then training pauses until the files are written.
        self._host_copy: HostCopy | None = HostCopy(pinned)
        self._thread: threading.Thread | None = None
        # Calls that log what the thread has written, to be made in the training thread.
        self._reports: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The last snapshot, until it is on the disk.
        self._unsaved: Snapshot | None = None
        # Whether the run is ending, so that no later save makes up for a failed one.
        self._is_ending = False
        # Name of a checkpoint -> seconds that training paused for it.
        self._pauses: dict[str, float] = {}

    def save(self, snapshot: Snapshot) -> None:
        """Copy the snapshot to host memory, and write it in a thread. Waits for the previous one first.

        Without memory for a copy, the snapshot is written at once, and training pauses until then.
        """
        self.wait_for_writer()
        live = snapshot.tensors, snapshot.state
        copied = self._host_copy.take(live) if self._host_copy is not None else None
        if self._host_copy is not None and copied is None:
            log.warning(
                "There is no host memory for copies of checkpoints (%s). From now on, training pauses until the files "
                "are written.",
                self._host_copy.problem,
            )
            self._host_copy = None
        if copied is None:  # tensors that are on the host already are written as they are, without a copy
            copied = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), live)
        tensors, state = copied
        on_host = replace(snapshot, tensors=tensors, state=state)
        self._unsaved = on_host
        if self._host_copy is None:  # training would change the tensors: write them before it continues
            self._try_to_write(on_host)
        else:
            self._thread = threading.Thread(target=self._try_to_write, args=(on_host,), name="saver", daemon=True)
            self._thread.start()
        self._pauses[folder_name(snapshot.update)] = time.perf_counter() - snapshot.paused_at
        self.report()

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write all files but meta.json into `folder`."""
        write_files(folder, snapshot.tensors, snapshot.state)

    def report(self) -> None:
        """Log, in the training thread, what the writing thread has written or failed to write."""
        while not self._reports.empty():
            report = self._reports.get()
            report()

    def finish(self) -> None:
        """Wait for the thread, and try again if the last state is not saved; raise TrainingError if it stays so."""
        self._is_ending = True
        self.wait_for_writer()
        for pause in PAUSES_AT_THE_END:
            if self._unsaved is None:
                return
            log.info("The last state is not saved yet; retrying in %g s.", pause)
            time.sleep(pause)
            self._try_to_write(self._unsaved)
            self.report()
        if self._unsaved is not None:
            update = self._unsaved.update
            last = read_index(self._root)["last"]
            advice = "There is no earlier checkpoint."
            if last:
                advice = f"The last checkpoint is {last}; fix the cause and resume with -resume."
            raise TrainingError(
                f"the state after update {update} could not be saved and is lost: "
                f"{self.failing.get(update, self._root)}. {advice}"
            )

    def finish_after_failure(self) -> None:
        if self._thread is not None:
            self._thread.join(SECONDS_AFTER_A_FAILURE)

    def wait_for_writer(self) -> None:
        """Wait until the thread has written the previous snapshot, with a warning per minute, and log the outcome."""
        thread = self._thread
        self._thread = None
        while thread is not None and thread.is_alive():
            thread.join(SECONDS_OF_SILENCE)
            if thread.is_alive():
                log.warning("Still waiting for a checkpoint to be written to %s.", self._root)
        self.report()

    def _try_to_write(self, snapshot: Snapshot) -> None:
        """Write a snapshot as a checkpoint, then remove old checkpoints.

        It mostly runs in the writing thread. So it neither logs nor raises, but puts the outcome into `_reports`, and
        `report` does both in the training thread.
        """
        began = time.perf_counter()
        folder = self._root / folder_name(snapshot.update)
        try:
            with new_checkpoint(self._root, snapshot.update, snapshot.meta) as hidden:
                self.write(hidden, snapshot)
            size = sum(path.stat().st_size for path in folder.iterdir())
            # The checkpoint is complete. An error from here on only leaves index.json or older checkpoints as they are,
            # which `_report_written` warns about.
            index_error = None
            try:
                best = best_of(self._root, snapshot.best)
                write_index(self._root, folder.name, best)
                prune(self._root, self._config.KEEP_LAST, folder.name, best, self._config.KEEP_EVERY)
            except OSError as error:
                index_error = error
        except Exception as error:  # reported in the training thread, where all but a disk error ends the run
            self._reports.put(partial(self._report_failed, snapshot.update, error))
            return
        self._unsaved = None
        signals.saved = True
        seconds = time.perf_counter() - began
        self.longest = max(self.longest, seconds)
        self._reports.put(partial(self._report_written, folder.name, size, seconds, index_error))

    def _report_written(self, name: str, size: int, seconds: float, index_error: OSError | None) -> None:
        """Log that a checkpoint of `size` bytes is written, and a warning of what failed after that.

        It is a detail of the log, except after a failure: then users want to see that saving works again.
        """
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
            message = "index.json was not updated, or older checkpoints were not removed: %s."
            log.warning(message, self._describe(index_error))

    def _report_failed(self, update: int, error: Exception) -> None:
        """Warn that the checkpoint of an update could not be written; raise any error but one of the system."""
        if not isinstance(error, OSError):
            raise error
        problem = self._describe(error)
        is_repeated = self.failing.get(update) == problem  # an earlier attempt failed for the same reason
        if not is_repeated:
            saved = "Earlier checkpoints are untouched" if signals.saved else "Nothing is saved yet"
            outlook = "" if self._is_ending else "; training continues, and the next save writes a newer state"
            log.warning("The checkpoint of update %d could not be written: %s. %s%s.", update, problem, saved, outlook)
        self.failing = {update: problem}

    def _describe(self, error: OSError) -> str:
        """Say where an error of the system occurred and why, and how much space is free if the disk is full."""
        path = error.filename or self._root
        if ".tmp-" in str(path):  # the hidden folder is removed by now, so its path would only confuse
            path = self._root
        free = ""
        if error.errno == errno.ENOSPC:
            # The folder may be a link to another disk, so its parent is asked only before the folder exists.
            on_disk = self._root if self._root.exists() else self._root.parent
            free = f", {size_words(shutil.disk_usage(on_disk).free)} free"
        return f"{path}: {reason(error, self._root)}{free}"
