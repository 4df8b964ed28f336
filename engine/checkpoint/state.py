"""What a checkpoint saves: the weights, the training state and what meta.json says of both."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from datasets import data_identity, identity_of
from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.saver import RankSaver, Saver, Snapshot, size_words
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from engine.parallel.shards import is_sharded, local_shard
from engine.setup import ReadyToTrain
from engine.task.base import Metrics
from engine.update import TrainState
from models.build import timm_call
from models.parts import base_weights, frozen_weights
from utils.config import Config, config_hash
from utils.config.keys import values_to_keep
from utils.config.model import ModelConfig
from utils.distributed.world import World, sum_over_ranks
from utils.log import log
from utils.record.run_folder import os_errors_as_user_errors
from utils.text import redacted, redacted_values
from vitamp.checkpoints import BASE, CHECKPOINTS, LORA, Checkpoint, sha256_of
from vitamp.files import replacing
from vitamp.metrics import WeightSet
from vitamp.registry import own_named

VERSION = "0.3"
"""Of the program's minor version whose runs this one resumes. The weights of every version can be used."""


def trained_weights(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the trained weights, in the order in which the optimiser numbers them."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def state_of(
    parts: TrainState, position: Position, best: Best, global_batch: int, meters: dict[str, Any]
) -> dict[str, Any]:
    """Training state, of plain Python types and tensors only, so that it can be read safely from any source.

    Training goes on to change its tensors: copy or write them before it does.
    """
    return {
        "version": VERSION,
        "optimizer": tree_map_only(torch.dtype, str, parts.optimizer.state_dict()),  # a setting of timm's Adafactor
        "trained": trained_weights(parts.model, parts.optimizer),
        "fp32_modules": list(parts.moved_to_fp32),
        "moved": parts.schedule.stepped,
        "scaler": parts.precision.scaler.state_dict(),
        "position": asdict(position),
        "best": best.model_dump(),
        "meters": meters,
        "global_batch": global_batch,
        **{key: value for callback in parts.callbacks for key, value in callback.state().items()},
    }


def snapshot_of(
    parts: TrainState, position: Position, best: Best, global_batch: int, meters: dict[str, Any], meta: dict[str, Any]
) -> Snapshot:
    """All that this rank saves. Training goes on to change its tensors."""
    base = base_weights(parts.model)  # a run's frozen weights are saved once, beside the checkpoints
    tensors = {
        which.file: {name: tensor for name, tensor in module.state_dict().items() if name not in base}
        for which, module in parts.weights.items()
    }
    state = state_of(parts, position, best, global_batch, meters)
    if parts.sharding is not None:
        from engine.checkpoint.sharded_saver import into_shards

        tensors, state = into_shards(tensors, state, parts.sharding)
    return Snapshot(tensors, state, meta, best.update if best.figure is not None else None)


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all weights are finite. Waits for the device once."""
    shards = (local_shard(tensor.detach()) for tensor in tensors.values())
    floats = [shard for shard in shards if shard.is_floating_point() and shard.numel()]
    # The Euclidean norm takes a tenth of the time of the maximum norm, but may overflow where that one does not.
    return any(bool(get_total_norm(floats, order).isfinite()) for order in (2.0, float("inf")))


def finite_everywhere(parts: TrainState) -> bool:
    """Whether the model's weights, as a checkpoint would hold them, are finite. A collective call: the ranks agree.

    The EMA is not checked. Of unsharded tensors, rank 0's are saved. The others' may differ: batch norm's statistics of
    their own images do.
    """
    tensors = parts.model.state_dict()
    saved = {name: tensor for name, tensor in tensors.items() if parts.world.first or is_sharded(tensor)}
    bad = torch.tensor(int(not finite(saved)), device=parts.precision.device)
    return not bool(sum_over_ranks(bad, parts.world))


def saver_of(folder: Path, config: Config, parts: TrainState, world: World) -> RankSaver:
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


def keep_base(folder: Path, model: nn.Module, settings: ModelConfig, resumed: Checkpoint | None) -> dict[str, Any]:
    """Write the frozen weights into the run's folder, unless they are there. Returns the entry for meta.json."""
    file, before = folder / CHECKPOINTS / BASE, resumed.meta.get(LORA) if resumed else None
    if before is not None and file.is_file() and sha256_of(file) == before["base"]["sha256"]:
        return before
    tensors = {name: weight.cpu().contiguous() for name, weight in base_weights(model).items()}
    with os_errors_as_user_errors(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished, raising_os_errors(file):
            safetensors.torch.save_file(tensors, unfinished, metadata={"format": "pt"})
        seal = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    log.info("The frozen weights are in %s, %s; checkpoints hold the trained ones.", file, size_words(seal["size"]))
    source = before["source"] if before else settings.PRETRAINED and redacted(settings.PRETRAINED)
    return {"base": seal, "factor": settings.LORA.factor, "source": source}


def progress_meta(
    position: Position, finished_epoch: int | None, metrics: dict[WeightSet, Metrics], best: Best
) -> dict[str, Any]:
    """Fields of the training so far. `finished_epoch`: the one that has just ended. `metrics`: of these weights."""
    thresholds = {which.name: list(means.thresholds) for which, means in metrics.items() if means.thresholds}
    ended = finished_epoch or (0 if position.step else position.epoch - 1)  # 0 also before the first epoch
    return {
        "epoch": ended or position.epoch,
        "epoch_finished": ended > 0,
        "update": position.update,
        "metrics": {
            f"{which.prefix}{name}": value for which, means in metrics.items() for name, value in means.fields().items()
        },
        "best": best.record(),
        **({"thresholds": thresholds} if thresholds else {}),
    }


def weights_meta(run: Run, ready: ReadyToTrain) -> dict[str, Any]:
    """Fields that are the same in all checkpoints of a start: all settings, classes, input preprocessing."""
    config, data = run.config, run.config.DATA
    own_code = {}
    if config.USE:
        from utils.own_code import FIELD, noted_files

        own_code = {FIELD: noted_files()}
    call = None  # of timm.create_model that builds this model, if timm alone can
    if not (config.MODEL.MAE_PRETRAIN or (config.USE and own_named("model", config.MODEL.NAME.strip()) is not None)):
        name, arguments = timm_call(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
        call = {"name": name, "arguments": arguments}
    return {
        "config_hash": config_hash(config),
        "batch": {
            "per_process": data.BATCH_SIZE,
            "accumulated": config.TRAIN.ACCUM_ITER,
            "processes": run.world.size,
            "asked": run.asked.get("TRAIN.ACCUM_ITER", config.TRAIN.ACCUM_ITER),
        },
        "choices": ready.choices,
        "samples": identity_of(ready.train_set, ready.train_loader.order),
        "val_data": data_identity(ready.val_set),
        "settings": redacted_values(values_to_keep(config)),
        **own_code,
        "model": config.MODEL.NAME,
        "classes": ready.train_set.classes,
        "num_classes": config.MODEL.NUM_CLASSES,
        **({"frozen": frozen} if (frozen := frozen_weights(ready.model)) else {}),
        **({LORA: ready.adapters} if ready.adapters else {}),
        "input": input_of(data),
        "timm": call,
    }
