"""What a checkpoint saves: the weights, the training state, and the saver of this rank."""

# torch's own optimisers are built on torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.optimizer_state import trained_weights
from engine.checkpoint.saver import RankSaver, Saver, Snapshot
from engine.checkpoint.shard_files import into_shards
from engine.measure.progress import Best, Position
from engine.parallel.shards import is_sharded, local_shards
from engine.update import Parts
from models import base_weights
from utils.config import Config
from utils.distributed.world import World, sum_over_ranks
from utils.record.run_folder import CHECKPOINTS


def tensors_of(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Weights to save, by the file that they are written to. A run's frozen weights are saved once, beside them."""
    base = base_weights(parts.model)
    return {
        which.file: {name: tensor for name, tensor in module.state_dict().items() if name not in base}
        for which, module in parts.weights.items()
    }


def state_of(parts: Parts, position: Position, best: Best, global_batch: int, meters: dict[str, Any]) -> dict[str, Any]:
    """Training state, of plain Python types and tensors only, so that it can be read safely from any source.

    Training goes on to change its tensors: copy or write them before it does.
    """
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "optimizer_name": type(parts.optimizer).__name__,
        "trained": trained_weights(parts.model, parts.optimizer),
        "fp32_modules": list(parts.moved_to_fp32),
        "moved": parts.schedule.moved,
        "scaler": _plain(parts.precision.scaler.state_dict()),
        "position": asdict(position),
        "best": asdict(best),
        "meters": meters,
        "global_batch": global_batch,
        **{key: value for ability in parts.abilities for key, value in ability.state().items()},
    }


def snapshot_of(
    parts: Parts, position: Position, best: Best, global_batch: int, meters: dict[str, Any], meta: dict[str, Any]
) -> Snapshot:
    """All that this rank saves. Training goes on to change its tensors."""
    tensors, state = tensors_of(parts), state_of(parts, position, best, global_batch, meters)
    if parts.sharding is not None:
        tensors, state = into_shards(tensors, state, parts.sharding)
    return Snapshot(tensors, state, meta, best.update if best.figure is not None else None)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all weights are finite. Waits for the device once."""
    floats = [t for t in local_shards(tensors).values() if t.is_floating_point() and t.numel()]
    # The Euclidean norm takes a tenth of the time of the maximum norm, but may overflow where that one does not.
    return _all_finite(floats, 2.0) or _all_finite(floats, float("inf"))


def finite_everywhere(parts: Parts) -> bool:
    """Whether all weights that a checkpoint would hold are finite. A collective call: the ranks agree.

    Of unsharded tensors, rank 0's are saved. The others' may differ: batch norm's statistics of their own images do.
    """
    tensors = parts.model.state_dict()
    saved = {name: tensor for name, tensor in tensors.items() if parts.world.first or is_sharded(tensor)}
    bad = torch.tensor(int(not finite(saved)), device=parts.precision.device)
    return not bool(sum_over_ranks(bad, parts.world))


def _all_finite(tensors: list[Tensor], order: float) -> bool:
    norms = torch._foreach_norm(tensors, order) if tensors else [torch.zeros(())]
    return bool(torch.isfinite(torch.stack([n.float() for n in norms])).all())


def saver_of(folder: Path, config: Config, parts: Parts, world: World) -> RankSaver:
    """Build this rank's saver."""
    root, pinned, sharding = folder / CHECKPOINTS, parts.precision.device.type == "cuda", parts.sharding
    if sharding is None:
        return Saver(root, config, pinned) if world.first else RankSaver()
    if not sharding.writes:
        return RankSaver()
    from engine.checkpoint.sharded_saver import ShardedSaver, ShardWriter, connect_to_store

    if world.first:
        return ShardedSaver(root, config, pinned, connect_to_store(), sharding.count)
    return ShardWriter(root, world.rank, connect_to_store(), pinned)
