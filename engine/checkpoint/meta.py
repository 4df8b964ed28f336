"""meta.json: what the weights of a checkpoint are, and how far their run had come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import identity_of
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from engine.setup import ReadyToTrain
from engine.task.base import Metrics
from models.build import timm_call
from models.parts import frozen_weights
from utils.config import config_hash
from utils.config.keys import values_to_keep
from utils.text import redacted_values
from vitamp.checkpoints import LORA
from vitamp.metrics import WeightSet
from vitamp.registry import own_named


def checkpoint_meta(run: Run, ready: ReadyToTrain) -> dict[str, Any]:
    """Description of the weights for a checkpoint's meta.json: all settings, classes, input preprocessing."""
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
            "asked": run.asked_accumulation or config.TRAIN.ACCUM_ITER,
        },
        "choices": ready.choices,
        "samples": identity_of(ready.train_set, ready.train_loader.order),
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


def progress(
    position: Position, finished_epoch: int | None, metrics: Mapping[WeightSet, Metrics], best: Best
) -> dict[str, Any]:
    """Position and metrics of a checkpoint, for its meta.json. `metrics`: of a validation after this very update."""
    thresholds = {which.name: list(means.thresholds) for which, means in metrics.items() if means.thresholds}
    return {
        "epoch": finished_epoch or position.epoch,
        "epoch_finished": finished_epoch is not None,
        "update": position.update,
        "metrics": {
            f"{which.prefix}{name}": value for which, means in metrics.items() for name, value in means.fields().items()
        },
        "best": best.record(),
        **({"thresholds": thresholds} if thresholds else {}),
    }
