"""What a checkpoint's meta.json says: of the training so far, and of the run's data, settings and model."""

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
from utils.text import redacted_values
from vitamp.checkpoints import LORA
from vitamp.metrics import WeightSet
from vitamp.registry import own_named


def progress_meta(
    position: Position, finished_epoch: int | None, metrics: dict[WeightSet, Metrics], best: Best
) -> dict[str, Any]:
    """Fields of the training so far. `finished_epoch`: the one that has just ended. `metrics`: of these weights."""
    thresholds = {which.name: list(means.thresholds) for which, means in metrics.items() if means.thresholds}
    ended = finished_epoch or (0 if position.step else position.epoch - 1)  # 0 also before the first epoch
    values: dict[str, Any] = {}
    for which, means in metrics.items():
        for name, value in means.fields().items():
            values[f"{which.prefix}{name}"] = value
    fields: dict[str, Any] = {
        "epoch": ended or position.epoch,
        "epoch_finished": ended > 0,
        "update": position.update,
        "metrics": values,
        "best": best.record(),
    }
    if thresholds:
        fields["thresholds"] = thresholds
    return fields


def weights_meta(run: Run, ready: ReadyToTrain) -> dict[str, Any]:
    """Fields that are the same in all checkpoints of a start: all settings, classes, input preprocessing."""
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
    fields["timm"] = None  # call of timm.create_model that builds this model, if timm alone can
    if not (model.MAE_PRETRAIN or (config.USE and own_named("model", model.NAME.strip()) is not None)):
        name, arguments = timm_call(model, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
        fields["timm"] = {"name": name, "arguments": arguments}
    return fields
