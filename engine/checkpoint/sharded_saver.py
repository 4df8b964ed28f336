"""Writing a checkpoint with many ranks: each writes its rows, rank 0 the rest, and rank 0 alone makes it appear.

Rank 0 leaves the order, which names the hidden folder, in the store where the ranks met; each of the others leaves
its answer there. Nothing of it passes through the process group: threads beside training do it.
"""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.checkpoint.folder import folder_name, write_files, write_tensors
from engine.checkpoint.host_copy import StandingCopy
from engine.checkpoint.saver import Saver
from engine.checkpoint.shard_files import into_shards
from engine.checkpoint.state import tensors_of
from engine.measure.progress import Best
from engine.update import Parts
from utils.config import Config
from utils.distributed.world import World
from utils.log import log

if TYPE_CHECKING:
    from torch.distributed import Store

BYTES_SAVED_IN_A_SECOND = 200e6

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_AFTER_A_FAILURE = 10.0


def meeting_place() -> Store:
    """A connection of one's own to the store: another's may be waiting for an answer."""
    from torch.distributed import PrefixStore, distributed_c10d

    return PrefixStore("saving", distributed_c10d._get_default_store().clone())


def saver_of(folder: Path, config: Config, parts: Parts, world: World) -> tuple[Saver | Helper, bool]:
    """What saves on this rank, and whether it has anything to save."""
    root, pinned, sharding = folder / "checkpoints", parts.precision.device.type == "cuda", parts.sharding
    if sharding is None:
        return Saver(root, config, pinned), world.first
    if world.first:
        return ShardedSaver(root, config, pinned, Orders(meeting_place(), sharding.count)), True
    return Helper(root, world.rank, meeting_place(), pinned), sharding.writes


def all_of_it(parts: Parts, state: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What this rank has to save: by file its tensors, and the state."""
    return (
        (tensors_of(parts), state) if parts.sharding is None else into_shards(tensors_of(parts), state, parts.sharding)
    )


class Orders:
    """Rank 0: has the other ranks write what they hold."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._others, self._number = store, range(1, ranks), 0

    def write(self, folder: Path, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write with all; raises what the disk refused to any of them, once none of them writes any more."""
        self._number += 1
        order = {"update": state["position"]["update"], "folder": str(folder.resolve())}
        self._store.set(f"{self._number}/order", json.dumps(order))
        problem: Exception | None = None
        try:
            write_files(folder, tensors, state)
        except Exception as error:  # others are still writing into that folder, which is removed once this is raised
            problem = error
        for rank in self._others:
            problem = self._answer(rank) or problem
        if problem is not None:
            raise problem

    def _answer(self, rank: int) -> Exception | None:
        key = f"{self._number}/{rank}"
        while not self._store.check([key]):
            time.sleep(SECONDS_BETWEEN_LOOKS / 10)
        answer = json.loads(self._store.get(key))
        if answer is None:
            return None
        number, words, path = answer
        words = f"{words} (rank {rank})"
        return OSError(number, words, path) if number else RuntimeError(words)


class ShardedSaver(Saver):
    """Rank 0's saver where the other ranks hold rows, which they write."""

    def __init__(self, root: Path, config: Config, pinned: bool, orders: Orders) -> None:
        super().__init__(root, config, pinned)
        self._orders = orders

    def write(self, folder: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        self._orders.write(folder, tensors, state)


class Helper:
    """The other ranks that hold rows: keeps a copy of them and writes it when rank 0 says so, as often as it says so.

    To the loop it is what `Saver` is on rank 0.
    """

    longest = 0.0
    """Rank 0 knows how long checkpoints take."""

    def __init__(self, root: Path, rank: int, store: Store, pinned: bool) -> None:
        self._root, self._rank, self._store = root, rank, store
        self._copy = StandingCopy(pinned)
        self._obeyed = 0
        self._update = 0
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self.prepared = False

    def prepare(self, tensors: dict[str, dict[str, Tensor]], _state: dict[str, Any]) -> None:
        self.prepared = True
        self._copy.reserve(tensors)

    def wait_for_writer(self) -> None:
        """Rank 0 knows when the earlier one is written, and all wait for rank 0."""

    def save(
        self,
        tensors: dict[str, dict[str, Tensor]],
        _state: dict[str, Any],
        meta: dict[str, Any],
        _best: Best,
        _began: float,
    ) -> None:
        """Copy, and be ready for orders. Only once rank 0 is through with the checkpoint before."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.prepared = True
        rows, self._update = self._copy.take(tensors), meta["update"]
        self._over.clear()
        self._thread = threading.Thread(target=self._obey, args=(rows, self._update), name="saver", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Rank 0 tells."""

    def finish(self) -> None:
        """The loop keeps all ranks until rank 0 has finished."""

    def let_end(self) -> None:
        """The run has failed: what rank 0 is having written was good before that."""
        end = time.monotonic() + SECONDS_AFTER_A_FAILURE
        done = self._root / folder_name(self._update)
        while self._thread is not None and not done.exists() and time.monotonic() < end:
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _obey(self, rows: dict[str, dict[str, Tensor]], update: int) -> None:
        """In the thread: until the next checkpoint takes this one's place."""
        try:
            while not self._over.wait(SECONDS_BETWEEN_LOOKS):
                if not self._store.check([f"{self._obeyed + 1}/order"]):
                    continue
                order = json.loads(self._store.get(f"{self._obeyed + 1}/order"))
                if order["update"] != update:
                    continue  # rank 0 is ahead: that one is for the thread that comes after this
                self._obeyed += 1
                answer = self._written(Path(order["folder"]), rows)
                self._store.set(f"{self._obeyed}/{self._rank}", json.dumps(answer))
        except RuntimeError:  # the store has gone, and the run with it
            log.debug("No more orders from rank 0.", exc_info=True)

    def _written(self, folder: Path, rows: dict[str, dict[str, Tensor]]) -> tuple[int, str, str] | None:
        """What went wrong, as the number of the system's error, words and path."""
        try:
            if not folder.is_dir():
                raise OSError(
                    2, "rank 0's folder is not there; checkpoints must lie where all machines see them", folder
                )
            write_tensors(folder, rows)
            for name in rows:
                handle = os.open(folder / name, os.O_RDWR)
                try:
                    os.fsync(handle)  # what this machine has not handed over, another cannot
                finally:
                    os.close(handle)
        except OSError as error:
            return error.errno or 5, error.strerror or str(error), str(error.filename or folder)
        except Exception as error:
            return 0, f"{type(error).__name__}: {error}", ""
        return None


def guessed_seconds(parts: Parts) -> float:
    """What the first checkpoint may take: weights, their average, and two moments of each, cautiously."""
    weights = sum(p.nbytes for p in parts.model.parameters())
    return (4 if parts.ema else 3) * weights / BYTES_SAVED_IN_A_SECOND
