"""Saves when several ranks hold shards (FSDP): each rank writes its own rows, and rank 0 everything else.

Each rank writes its rows of the weights into a file of its own: `model.safetensors` becomes
`model.shard-1-of-2.safetensors` and `model.shard-2-of-2.safetensors`. Both have the same tensor names; rows of the
first file come before rows of the second. So any number of ranks can read what any other number wrote.

Rank 0 puts an order with the hidden folder's path into torch's key-value store, through which the ranks found each
other, and each other rank puts its answer there. Only threads beside training use the store; nothing passes through
the process group.
"""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import errno
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
    """Pick what this rank saves of a snapshot: its rows of all tensors, by file name, and the training state.

    Sharded tensors of the optimiser's state, such as Adam's moments, move from the state to a file of tensors, so
    that each rank saves its rows of them too. `load_optimizer` puts them back.
    """
    moments: dict[str, Tensor] = {}  # by the number of the weight and the key of its state, such as "12.exp_avg"
    not_sharded: dict[Any, dict[str, Any]] = {}
    for number, values in state["optimizer"]["state"].items():
        moments |= {f"{number}.{key}": value for key, value in values.items() if is_sharded(value)}
        not_sharded[number] = {key: value for key, value in values.items() if not is_sharded(value)}
    shards: dict[str, dict[str, Tensor]] = {}
    for file_name, tensors_of_file in {**tensors, OPTIMIZER: moments}.items():
        rows = {}
        for name, tensor in tensors_of_file.items():
            if is_sharded(tensor):
                is_saved_here = len(local_shard(tensor)) > 0  # a tensor may have fewer rows than there are ranks
            else:
                is_saved_here = sharding.nth == 0  # whole tensors are in the first file only
            if is_saved_here:
                rows[name] = local_shard(tensor.detach())
        shards[shard_name(file_name, sharding.nth, sharding.count)] = rows
    return shards, {**state, "optimizer": {**state["optimizer"], "state": not_sharded}}


def connect_to_store() -> Store:
    """Open a second connection to torch's store: the first may be blocked by a call that waits for an answer."""
    from torch.distributed import PrefixStore, distributed_c10d

    return PrefixStore("saving", distributed_c10d._get_default_store().clone())


class ShardedSaver(Saver):
    """Rank 0's saver where other ranks hold rows too: orders them to write, and waits for their answers."""

    def __init__(self, root: Path, config: Config, pinned: bool, store: Store, ranks: int) -> None:
        super().__init__(root, config, pinned)
        self._store = store
        self._other_ranks = range(1, ranks)
        self._orders_given = 0

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write together with the other ranks. Once all have stopped writing, raise what failed on any of them."""
        self._orders_given += 1
        order = {"update": snapshot.update, "folder": str(folder.resolve())}
        self._store.set(f"{self._orders_given}/order", json.dumps(order))
        problem: Exception | None = None
        try:
            write_files(folder, snapshot.tensors, snapshot.state)
        except Exception as error:
            # Raised only at the end: the caller then removes the folder, into which other ranks still write.
            problem = error
        for rank in self._other_ranks:
            key = f"{self._orders_given}/{rank}"
            while not self._store.check([key]):
                time.sleep(SECONDS_BETWEEN_LOOKS / 10)  # more often than others look: training may wait for this
            answer = json.loads(self._store.get(key))
            if answer is not None:  # `ShardWriter._write` failed there
                error_number, message, path = answer
                message = f"{message} (rank {rank})"
                problem = OSError(error_number, message, path) if error_number else RuntimeError(message)
        if problem is not None:
            raise problem


class ShardWriter(RankSaver):
    """Saver of a rank besides 0 that holds rows: keeps a copy of them, and writes it whenever rank 0 orders it to.

    Rank 0 may order the same copy several times, since it tries again after an error.
    """

    def __init__(self, root: Path, rank: int, store: Store, pinned: bool) -> None:
        self._root = root
        self._rank = rank
        self._store = store
        self._host_copy = HostCopy(pinned)
        self._orders_done = 0
        """Number of rank 0's orders that this rank has followed; rank 0 numbers them from 1"""
        self._update = 0
        """Update of the copy that is held"""
        self._thread: threading.Thread | None = None
        self._superseded = threading.Event()
        """Set when a newer snapshot is about to replace the copy, which ends the thread that writes it"""

    def save(self, snapshot: Snapshot) -> None:
        """Copy the rows, and wait for orders in a thread. Called once rank 0 has finished the previous checkpoint."""
        self._superseded.set()  # ends the thread of the previous snapshot, whose memory is used again
        if self._thread is not None:
            self._thread.join()
        self._update = snapshot.update
        rows = self._host_copy.take(snapshot.tensors)
        if rows is None:
            raise TrainingError(
                f"no host memory for a copy of this rank's rows ({self._host_copy.problem}), so the checkpoint of "
                f"update {snapshot.update} cannot be written. Use fewer processes per machine, or a machine with more "
                "memory."
            )
        self._superseded.clear()
        arguments = rows, snapshot.update
        self._thread = threading.Thread(target=self._follow_orders, args=arguments, name="saver", daemon=True)
        self._thread.start()

    def finish_after_failure(self) -> None:
        """Give rank 0 time to finish the checkpoint, for which it may need this rank's rows."""
        deadline = time.monotonic() + SECONDS_AFTER_A_FAILURE
        checkpoint = self._root / folder_name(self._update)
        while self._thread is not None and not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _follow_orders(self, rows: dict[str, dict[str, Tensor]], update: int) -> None:
        """Write `rows` at each order of rank 0, in the thread, until a newer snapshot replaces them."""
        try:
            while not self._superseded.wait(SECONDS_BETWEEN_LOOKS):
                key = f"{self._orders_done + 1}/order"
                if not self._store.check([key]):
                    continue
                order = json.loads(self._store.get(key))
                if order["update"] != update:
                    # Rank 0 already orders the next snapshot, which this rank has not copied yet. The order stays in
                    # the store until the thread of that snapshot looks.
                    continue
                self._orders_done += 1
                answer = self._write(Path(order["folder"]), rows)
                self._store.set(f"{self._orders_done}/{self._rank}", json.dumps(answer))
        except RuntimeError:  # the store is gone, and the run with it
            log.debug("No more orders from rank 0.", exc_info=True)

    def _write(self, folder: Path, rows: dict[str, dict[str, Tensor]]) -> tuple[int, str, str] | None:
        """Write `rows` into `folder`. Returns None, or what failed: number, message and path of the error.

        The number is 0 if it is not an error of the system. The caller sends all three to rank 0 as JSON, for which
        an exception would not do.
        """
        try:
            if not folder.is_dir():
                problem = "this rank cannot see the folder; checkpoints need a file system that all machines share"
                raise OSError(errno.ENOENT, problem, folder)
            write_tensors(folder, rows)
            for name in rows:
                with (folder / name).open("rb+") as file:
                    os.fsync(file.fileno())  # another machine cannot sync what this one still buffers
        except OSError as error:
            error_number = error.errno or errno.EIO  # the general one, if the error has none
            return error_number, error.strerror or str(error), str(error.filename or folder)
        except Exception as error:
            return 0, f"{type(error).__name__}: {error}", ""
        return None
