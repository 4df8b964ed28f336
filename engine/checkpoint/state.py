"""Collects what a checkpoint saves, the weights and the training state (`state_of`), and picks each rank's saver."""

import os
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.saver import RankSaver, Saver, Snapshot, size_words
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from engine.parallel.shards import is_sharded, local_shard
from engine.update import TrainState
from models.parts import base_weights
from utils.config import Config
from utils.config.model import ModelConfig
from utils.distributed.world import World, on_rank_0, sum_over_ranks
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import os_errors_as_user_errors
from utils.text import redacted
from vitamp.checkpoints import BASE, CHECKPOINTS, LORA, Checkpoint, sha256_of
from vitamp.files import replacing

VERSION = "0.3"
"""Minor version of the program whose runs this one resumes. The weights of every version can be used."""


def trained_weights(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the trained weights, in the order in which the optimiser numbers them."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [names[id(weight)] for weight in weights]


def state_of(parts: TrainState, position: Position, best: Best, batch: int, meters: dict[str, Any]) -> dict[str, Any]:
    """Return the training state, of plain Python types and tensors only, so that it can be read safely from any source.

    `batch`: the global batch size. Later updates change the tensors in place: copy or write them before.
    """
    state = {
        "version": VERSION,
        # timm's Adafactor has a dtype among its settings, which is no plain type.
        "optimizer": tree_map_only(torch.dtype, str, parts.optimizer.state_dict()),
        "trained": trained_weights(parts.model, parts.optimizer),
        "fp32_modules": list(parts.moved_to_fp32),
        "moved": parts.schedule.stepped,  # the updates that moved the weights, which skipped ones did not
        "scaler": parts.precision.scaler.state_dict(),
        "position": asdict(position),
        "best": best.model_dump(),
        "meters": meters,
        "global_batch": batch,
    }
    for callback in parts.callbacks:
        state |= callback.state()
    return state


def _saved_weights(parts: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return the weights that each checkpoint saves: file name -> tensors by name."""
    base = base_weights(parts.model)  # with adapters, the frozen weights are saved once, beside the checkpoints
    saved = {}
    for which, module in parts.weights.items():
        saved[which.file] = {name: tensor for name, tensor in module.state_dict().items() if name not in base}
    return saved


def least_size(parts: TrainState) -> int:
    """Return the bytes that a checkpoint has at least: weights, and the optimiser's moments of each trained weight."""
    optimizer = parts.optimizer
    moments = 0
    if isinstance(optimizer, Adam | AdamW):
        moments = 2
    elif "betas" in optimizer.defaults or (isinstance(optimizer, SGD) and optimizer.defaults["momentum"]):
        moments = 1  # at least: some optimisers have two, some of them in half the bytes
    size = 0
    for group in optimizer.param_groups:
        size += moments * sum(weight.nbytes for weight in group["params"])
    for tensors_of_file in _saved_weights(parts).values():
        size += sum(tensor.nbytes for tensor in tensors_of_file.values())
    return size


def check_room(root: Path, parts: TrainState) -> None:
    """Raise UserError if the disk that `root`, the folder of checkpoints, is on has no room for a checkpoint."""
    disk = os.statvfs(root if root.exists() else root.parent)  # it may be a link to another disk
    # With FSDP, each machine may write to a disk of its own; and some file systems do not know their size.
    if parts.sharding is not None or not disk.f_blocks:
        return
    needed = least_size(parts)
    free = disk.f_bfree * disk.f_frsize
    # Files that a killed run left while saving count as free, since the first save removes them before it writes.
    for leftover in root.glob(".tmp-*/*"):
        free += leftover.stat().st_size
    if free < needed:
        raise UserError(
            f"{root}: its disk has {size_words(free)} free, and one checkpoint needs {size_words(needed)}. Make room, "
            "or choose another -output."
        )


def snapshot_of(
    parts: TrainState, position: Position, best: Best, global_batch: int, meters: dict[str, Any], meta: dict[str, Any]
) -> Snapshot:
    """Collect all that this rank saves. The tensors are not copied: later updates change them in place.

    `meters`: sums of the epoch so far. `meta`: the content of meta.json.
    """
    tensors = _saved_weights(parts)
    state = state_of(parts, position, best, global_batch, meters)
    if parts.sharding is not None:
        from engine.checkpoint.sharded_saver import into_shards

        tensors, state = into_shards(tensors, state, parts.sharding)
    best_update = best.update if best.figure is not None else None
    return Snapshot(tensors, state, meta, best_update)


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all values of the tensors (of sharded ones, this rank's) are finite. Waits for the device once."""
    shards = (local_shard(tensor.detach()) for tensor in tensors.values())
    floats = [shard for shard in shards if shard.is_floating_point() and shard.numel()]
    # A norm is finite only if all values are. The Euclidean norm takes a tenth of the time of the maximum norm, but may
    # overflow where that one does not: then the maximum norm decides.
    return any(bool(get_total_norm(floats, order).isfinite()) for order in (2.0, float("inf")))


def finite_everywhere(parts: TrainState) -> bool:
    """Whether the model's weights, as a checkpoint would hold them, are finite. A collective call: the ranks agree.

    Tensors that are not sharded are checked on rank 0 only, which saves them. Those of other ranks may differ, such
    as the statistics of their own images in batch norms. The EMA is not checked.
    """
    tensors = parts.model.state_dict()
    saved_here = {name: tensor for name, tensor in tensors.items() if parts.world.first or is_sharded(tensor)}
    has_bad_value = not finite(saved_here)
    ranks_with_bad_value = sum_over_ranks(torch.tensor(int(has_bad_value), device=parts.precision.device), parts.world)
    return not bool(ranks_with_bad_value)


def saver_of(folder: Path, config: Config, parts: TrainState, world: World) -> RankSaver:
    """Build this rank's saver: rank 0 writes checkpoints, with FSDP also the ranks that hold shards; others do not."""
    root = folder / CHECKPOINTS
    pinned = parts.precision.device.type == "cuda"
    sharding = parts.sharding
    if sharding is None:
        return Saver(root, config, pinned) if world.first else RankSaver()
    if not sharding.writes:  # HSDP: a rank of another machine writes the same rows
        return RankSaver()
    from engine.checkpoint.sharded_saver import ShardedSaver, ShardWriter, connect_to_store

    if world.first:  # writes its own rows and all that is not sharded, and orders the others to write
        return ShardedSaver(root, config, pinned, connect_to_store(), sharding.count)
    return ShardWriter(root, world.rank, connect_to_store(), pinned)


def keep_base(run: Run, folder: Path, model: nn.Module, resumed: Checkpoint | None) -> dict[str, Any] | None:
    """With adapters (MODEL.LORA), save the frozen weights once for all checkpoints of the run, unless they are there.

    Returns the entry of meta.json about them on rank 0; None on other ranks, and without adapters.
    """
    settings = run.config.MODEL
    if settings.LORA.RANK is None:
        return None
    return on_rank_0(run.world, lambda: _write_base(folder, model, settings, resumed))


def _write_base(folder: Path, model: nn.Module, settings: ModelConfig, resumed: Checkpoint | None) -> dict[str, Any]:
    """Write the frozen weights into the run's folder, unless the resumed run has left them there.

    Returns the entry of meta.json: size and hash of the file, the adapters' factor, and where the weights are from.
    """
    file = folder / CHECKPOINTS / BASE
    saved_entry = resumed.meta.get(LORA) if resumed else None
    # The hash is compared, because the file may be of another run or damaged.
    if saved_entry is not None and file.is_file() and sha256_of(file) == saved_entry["base"]["sha256"]:
        return saved_entry
    tensors = {name: weight.cpu().contiguous() for name, weight in base_weights(model).items()}
    with os_errors_as_user_errors(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished, raising_os_errors(file):
            safetensors.torch.save_file(tensors, unfinished, metadata={"format": "pt"})
        seal = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    log.info("The frozen weights are in %s, %s; checkpoints hold the trained ones.", file, size_words(seal["size"]))
    if saved_entry:
        source = saved_entry["source"]
    else:
        source = settings.PRETRAINED and redacted(settings.PRETRAINED)  # None without pretrained weights
    return {"base": seal, "factor": settings.LORA.factor, "source": source}
