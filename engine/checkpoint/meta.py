"""The content of a checkpoint's meta.json: how far training is, and the run's data, settings and model."""

from typing import Any

from datasets import data_identity, identity_of
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from engine.setup import ReadyToTrain
from engine.task.base import Metrics
from models.build import timm_call
from models.parts import frozen_weights
from utils.config import config_hash
from utils.config.keys import values_to_keep
from utils.record.history import plain
from utils.text import redacted_values
from vitamp.checkpoints import LORA
from vitamp.metrics import WeightSet
from vitamp.registry import own_named

MEASURED = ("metrics", "thresholds")
"""Entries of meta.json that a validation has measured"""


def progress_meta(position: Position, metrics: dict[WeightSet, Metrics], best: Best) -> dict[str, Any]:
    """Return the fields of meta.json that change from checkpoint to checkpoint.

    `metrics`: of each set of weights, from the validation at this position.
    """
    # The epoch that this checkpoint is the end of; 0 within an epoch and before the first one
    ended_epoch = position.epoch - 1 if position.step == 0 else 0
    values: dict[str, Any] = {}
    for which, metrics_of_set in metrics.items():
        for name, value in metrics_of_set.fields().items():
            values[f"{which.prefix}{name}"] = value
    fields: dict[str, Any] = {
        "epoch": ended_epoch if ended_epoch > 0 else position.epoch,
        "epoch_finished": ended_epoch > 0,
        "update": position.update,
        "metrics": plain(values),  # a user's metric may be NaN
        "best": best.record(),
    }
    thresholds = {which.name: list(measured.thresholds) for which, measured in metrics.items() if measured.thresholds}
    if thresholds:
        fields["thresholds"] = thresholds
    return fields


def weights_meta(run: Run, ready: ReadyToTrain) -> dict[str, Any]:
    """Return the fields of meta.json that stay the same until the run is restarted: settings, data, model, input."""
    config = run.config
    data = config.DATA
    model = config.MODEL
    fields: dict[str, Any] = {
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
        "val_images": len(ready.val_set),
        "settings": redacted_values(values_to_keep(config)),
    }
    if config.USE:
        from utils.own_code import FIELD, noted_files

        fields[FIELD] = noted_files()
    fields["model"] = model.NAME
    fields["classes"] = ready.train_set.classes
    fields["num_classes"] = model.NUM_CLASSES
    frozen = frozen_weights(ready.model)
    if frozen:
        fields["frozen"] = frozen
    if ready.adapters:
        fields[LORA] = ready.adapters
    fields["input"] = input_of(data)
    # The call of timm.create_model that builds this model; None if timm alone cannot build it.
    fields["timm"] = None
    is_own_model = config.USE and own_named("model", model.NAME.strip()) is not None
    if not model.MAE_PRETRAIN and not is_own_model:
        name, arguments = timm_call(model, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
        fields["timm"] = {"name": name, "arguments": arguments}
    return fields
