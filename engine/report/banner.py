"""Banner that a run logs before it begins: versions, device, precision, model, data, settings of training."""

from __future__ import annotations

import os
from pathlib import Path

from datasets import comes_unsplit
from engine.machine.device import Run, arguments, describe_devices, global_batch, libraries
from engine.optim.build import (
    describe_learning_rate,
    describe_optimizer,
    scaled_learning_rates,
)
from engine.optim.schedule import describe_schedule
from engine.setup import Ready, ReadyToTrain, weights_of_classes
from engine.task.losses import loss_named
from models.build import describe as describe_model
from models.parts import count_parameters, frozen_weights
from utils.cli import version_text
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import World
from utils.text import counted


def banner(run: Run, ready: Ready, folder: Path | None) -> str:
    """One row per topic. `folder` None: a dry run."""
    config, world = run.config, run.world
    rows = [
        ("device", f"{describe_devices(run.device, world, run.threads)}{_other_threads(run)}"),
        ("precision", ready.precision.line()),
        ("computing", ready.computing),
        ("model", describe_model(ready.model)),
        ("data", _data(config, ready)),
        ("inputs", _inputs(config.DATA)),
        *ready.task.rows(ready.val_set).items(),
    ]
    if isinstance(ready, ReadyToTrain):
        if ready.parts.sharding is not None:
            rows.append(("strategy", ready.parts.sharding.words()))
        if words := _classes(config, ready):
            rows.append(("classes", words))
        rate = scaled_learning_rates(config.TRAIN, global_batch(config, world))[0]
        if config.TRAIN.LAYER_DECAY is not None or frozen_weights(ready.model):
            from engine.optim.others import describe_fine_tuning

            rows.append(("trained", describe_fine_tuning(config, ready.model, ready.parts.optimizer, rate)))
        if any("use_muon" in group for group in ready.parts.optimizer.param_groups):
            from engine.optim.muon import describe_muon

            rows.append(("optimiser", describe_muon(ready.parts.optimizer)))
        rows += [("batch", _batch(config, ready, world)), ("training", _training(config, ready, world))]
        rows.append(("compile", f"{ready.choices['compile']} ({ready.choices['compile_why']})"))
        rows = _joined([*rows, *(row for callback in ready.parts.callbacks for row in callback.rows().items())])
    rows.append(("output", f"{folder}" if folder else "nothing is written (-dry_run)"))
    if world.size == 1:
        rows.insert(0, ("libraries", ", ".join(f"{name} {what}" for name, what in libraries().items())))
    rows.insert(0, ("arguments", arguments()))
    if config.TAG:
        rows.insert(0, ("tag", config.TAG))
    head = ", ".join(version_text().splitlines())
    return "\n".join([head, *(f"  {name:<10} {text}" for name, text in rows)])


def _joined(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows of the same name as one."""
    return [(name, "; ".join(words for other, words in rows if other == name)) for name in dict(rows)]


def _data(config: Config, ready: Ready) -> str:
    classes = ready.task.words()
    size = f"{config.DATA.IMAGE_SIZE} x {config.DATA.IMAGE_SIZE} x {config.DATA.IMAGE_CHANNELS}"
    if not isinstance(ready, ReadyToTrain):
        from engine.evaluated_data import images_of_all, title_of

        text = f"{title_of(config.DATA)}: {images_of_all(config, config.DATA, len(ready.val_set))} of {size}, {classes}"
    else:
        text = (
            f"{config.DATA.DATASET}: {len(ready.train_set):,} training and {len(ready.val_set):,} validation images "
            f"of {size}, {classes}"
        )
    groups = f", groups by DATA.GROUP {config.DATA.GROUP}" if config.DATA.GROUP is not None else ""
    if config.DATA.FOLD is not None:
        return f"{text}; validation on fold {config.DATA.FOLD}{groups}"
    if config.DATA.PART == "all" or not comes_unsplit(config.DATA):
        return text
    if config.DATA.DATASET == "digits":  # which has folds, but one fixed split
        return text
    less = ", then without those in DATA.EXCLUDE" if config.DATA.EXCLUDE is not None else ""
    return f"{text}; split at random by DATA.VAL_FRACTION {config.DATA.VAL_FRACTION:g}{groups}{less}"


def _classes(config: Config, ready: ReadyToTrain) -> str:
    """How classes of different frequency are treated; '' if they are not."""
    words = []
    if config.DATA.SAMPLER == "balanced":
        from datasets.loading.order import balanced_order

        words.append(balanced_order(ready.train_set, config.DATA.DATASET).words())
    if (weights := weights_of_classes(config, ready.train_set)) is not None:
        from engine.task.class_weights import describe_class_weights

        words.append(describe_class_weights(config.TRAIN, weights))
    return "; ".join(words)


def _inputs(data: DataConfig) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (data.IMAGENET_MEAN, data.IMAGENET_STD))
    mode = "" if data.CROP_MODE == "center" else f", CROP_MODE {data.CROP_MODE}"
    return f"mean {mean}; std {std}; crop {data.CROP}, CROP_PCT {data.CROP_PCT:g}{mode}, {data.INTERPOLATION}"


def _batch(config: Config, ready: ReadyToTrain, world: World) -> str:
    return (
        f"{config.DATA.BATCH_SIZE} per device x {counted(world.size, 'device')} x "
        f"{config.TRAIN.ACCUM_ITER} accumulated = {global_batch(config, world)}; {ready.train_loader.order.words()}"
    )


def _other_threads(run: Run) -> str:
    """Says that OMP_NUM_THREADS is not followed: launchers set it to 1 for several ranks, whoever started them."""
    given, threads = os.environ.get("OMP_NUM_THREADS", ""), f"{run.threads}"
    by_launcher = run.world.size > 1 and given == "1"
    if run.config.THREADS is not None or by_launcher or given in ("", threads) or run.device.type != "cpu":
        return ""
    return f" (not OMP_NUM_THREADS={given}: set THREADS={given} for that)"


def _length(config: Config, ready: ReadyToTrain, of: str = "") -> str:
    """'200 epochs of 23 updates = 4,600 updates'"""
    train, each = config.TRAIN, ready.train_loader.order.updates
    total, limit = train.NUM_EPOCHS * each, train.MAX_UPDATES
    text = f"{counted(train.NUM_EPOCHS, 'epoch')} of {counted(each, 'update')} = {counted(total, 'update')}{of}"
    return text if limit is None or limit >= total else f"{text}, ending after {limit:,} (TRAIN.MAX_UPDATES)"


def _training(config: Config, ready: ReadyToTrain, world: World) -> str:
    train, images = config.TRAIN, global_batch(config, world)
    warmup = min(train.WARMUP_EPOCHS, train.NUM_EPOCHS)
    *_, end = scaled_learning_rates(train, images)
    text = (
        f"{_length(config, ready)}, {describe_optimizer(ready.parts.optimizer, train.OPTIMIZER.NAME)}, "
        f"learning rate {describe_learning_rate(train, images)} after "
        f"{counted(warmup, 'epoch')} of warm-up, then {describe_schedule(train, end)}"
    )
    text += f"; weight decay {train.WEIGHT_DECAY:g}"
    if loss := loss_named(train.LOSS).words(train):
        text += f"; {loss}"
    if train.GRAD_CLIP is not None:
        text += f"; gradient norm at most {train.GRAD_CLIP:g}"
    return text


def short_banner(run: Run, ready: ReadyToTrain, folder: Path) -> tuple[str, dict[str, str]]:
    """First line, and one short row per topic; log.txt has the banner with everything."""
    config, world = run.config, run.world
    train, images = config.TRAIN, global_batch(config, world)
    rate, _, end = scaled_learning_rates(train, images)
    warmup = counted(min(train.WARMUP_EPOCHS, train.NUM_EPOCHS), "epoch")
    length = _length(config, ready, f" of {counted(images, 'image')}")
    parameters, trainable = count_parameters(ready.model)
    some = "" if trainable == parameters else f", {trainable:,} trainable"
    rows = {
        "device": f"{describe_devices(run.device, world, run.threads)}{_other_threads(run)}; {ready.precision.line()}",
        "model": f"{config.MODEL.NAME}, {parameters:,} parameters{some}",
        "data": _data(config, ready),
        "training": f"{length}; "
        f"{train.OPTIMIZER.NAME}, learning rate {rate:.3g}, warm-up {warmup}, {describe_schedule(train, end)}",
        "output": f"{folder} (all settings and messages: log.txt)",
    }
    return ", ".join(version_text().splitlines()), rows
