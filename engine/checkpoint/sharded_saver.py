"""Saving with several ranks that hold shards: each rank writes its own rows, and rank 0 the rest.

With FSDP, each rank writes its rows of the weights into a file of its own: `model.safetensors` becomes
`model.shard-1-of-2.safetensors` and `model.shard-2-of-2.safetensors`. Both have the same tensor names; rows of the
first file come before rows of the second. So any number of ranks can read what any other number wrote.

Rank 0 puts an order with the hidden folder's path into the store that the ranks met at, and each other rank puts its
answer there. Only threads beside training use the store; nothing passes through the process group.
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

from engine.checkpoint.folder import write_files, write_tensors
from engine.checkpoint.saver import SECONDS_AFTER_A_FAILURE, HostCopy, RankSaver, Saver, Snapshot
from engine.parallel.shards import is_sharded, local_shard
from utils.config import Config
from utils.errors import TrainingError
from utils.log import log
from vitamp.checkpoints import folder_name, shard_name

if TYPE_CHECKING:
    from torch.distributed import Store

    from engine.parallel.fsdp import Sharding

SECONDS_BETWEEN_LOOKS = 0.2
OPTIMIZER = "optimizer.safetensors"


def into_shards(
    tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any], sharding: Sharding
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors that this rank saves, by file, and the state without the moments that are among them."""
    moments: dict[str, Tensor] = {}  # sharded tensors of the optimizer's state, by number and key
    rest: dict[Any, dict[str, Any]] = {}
    for number, values in state["optimizer"]["state"].items():
        moments |= {f"{number}.{key}": value for key, value in values.items() if is_sharded(value)}
        rest[number] = {key: value for key, value in values.items() if not is_sharded(value)}
    shards: dict[str, dict[str, Tensor]] = {}
    for file, named in {**tensors, OPTIMIZER: moments}.items():
        # This rank's rows of sharded tensors, if it has any. The first rank also saves what is not sharded.
        own = {}
        for name, tensor in named.items():
            if len(local_shard(tensor)) if is_sharded(tensor) else sharding.nth == 0:
                own[name] = local_shard(tensor.detach())
        shards[shard_name(file, sharding.nth, sharding.count)] = own
    return shards, {**state, "optimizer": {**state["optimizer"], "state": rest}}


def connect_to_store() -> Store:
    """Open a connection of our own: torch's may be blocked by a call that waits for an answer."""
    from torch.distributed import PrefixStore, distributed_c10d

    return PrefixStore("saving", distributed_c10d._get_default_store().clone())


class ShardedSaver(Saver):
    """Rank 0's saver where the other ranks hold rows: orders them to write, and waits for their answers."""

    def __init__(self, root: Path, config: Config, pinned: bool, store: Store, ranks: int) -> None:
        super().__init__(root, config, pinned)
        self._store = store
        self._others = range(1, ranks)
        self._orders = 0

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write together with the other ranks. Raise what failed on any of them once all have stopped writing."""
        self._orders += 1
        order = {"update": snapshot.update, "folder": str(folder.resolve())}
        self._store.set(f"{self._orders}/order", json.dumps(order))
        problem: Exception | None = None
        try:
            write_files(folder, snapshot.tensors, snapshot.state)
        except Exception as error:  # others still write into this folder, which is removed once this is raised
            problem = error
        for rank in self._others:
            key = f"{self._orders}/{rank}"
            while not self._store.check([key]):
                time.sleep(SECONDS_BETWEEN_LOOKS / 10)
            answer = json.loads(self._store.get(key))
            if answer is not None:
                number, words, path = answer
                words = f"{words} (rank {rank})"
                problem = OSError(number, words, path) if number else RuntimeError(words)
        if problem is not None:
            raise problem


class ShardWriter(RankSaver):
    """Saver of another rank that holds rows: keeps a copy and writes it whenever rank 0 orders it to."""

    def __init__(self, root: Path, rank: int, store: Store, pinned: bool) -> None:
        self._root = root
        self._rank = rank
        self._store = store
        self._copy = HostCopy(pinned)
        self._orders_done = 0
        self._update = 0
        self._thread: threading.Thread | None = None
        self._superseded = threading.Event()

    def save(self, snapshot: Snapshot) -> None:
        """Copy, and wait for orders in a thread. Called once rank 0 has finished the previous checkpoint."""
        self._superseded.set()
        if self._thread is not None:
            self._thread.join()
        self._update = snapshot.update
        rows = self._copy.take(snapshot.tensors)
        if rows is None:
            raise TrainingError(
                f"no host memory for a copy of this rank's rows ({self._copy.problem}), so the checkpoint of update "
                f"{snapshot.update} cannot be written. Use fewer processes per machine, or a machine with more memory."
            )
        self._superseded.clear()
        job = rows, snapshot.update
        self._thread = threading.Thread(target=self._follow_orders, args=job, name="saver", daemon=True)
        self._thread.start()

    def finish_after_failure(self) -> None:
        """Give rank 0 time to finish the checkpoint: this rank may be needed for it."""
        end = time.monotonic() + SECONDS_AFTER_A_FAILURE
        checkpoint = self._root / folder_name(self._update)
        while self._thread is not None and not checkpoint.exists() and time.monotonic() < end:
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _follow_orders(self, rows: dict[str, dict[str, Tensor]], update: int) -> None:
        """Write `rows` at each order of rank 0, in the thread, until a newer snapshot replaces this one."""
        try:
            while not self._superseded.wait(SECONDS_BETWEEN_LOOKS):
                if not self._store.check([f"{self._orders_done + 1}/order"]):
                    continue
                order = json.loads(self._store.get(f"{self._orders_done + 1}/order"))
                if order["update"] != update:
                    continue  # rank 0 is ahead: the order is for the snapshot after this one
                self._orders_done += 1
                answer = self._write(Path(order["folder"]), rows)
                self._store.set(f"{self._orders_done}/{self._rank}", json.dumps(answer))
        except RuntimeError:  # the store is gone, and the run with it
            log.debug("No more orders from rank 0.", exc_info=True)

    def _write(self, folder: Path, rows: dict[str, dict[str, Tensor]]) -> tuple[int, str, str] | None:
        """Write `rows` into `folder`; the error number, message and path if that failed."""
        try:
            if not folder.is_dir():
                raise OSError(
                    2, "this rank cannot see the folder; checkpoints need a file system that all machines share", folder
                )
            write_tensors(folder, rows)
            for name in rows:
                with (folder / name).open("rb+") as file:
                    os.fsync(file.fileno())  # another machine cannot sync what this one still buffers
        except OSError as error:
            return error.errno or 5, error.strerror or str(error), str(error.filename or folder)
        except Exception as error:
            return 0, f"{type(error).__name__}: {error}", ""
        return None
