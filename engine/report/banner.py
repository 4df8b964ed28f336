"""The banner that a run logs before it begins: versions, device, precision, model, data, settings of training."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from datasets import BalancedOrder, comes_unsplit
from datasets.registry import source_named
from engine.machine.device import Run, describe_devices, global_batch, libraries
from engine.optim.build import describe_learning_rate, describe_optimizer, scaled_learning_rates
from engine.optim.schedule import describe_schedule
from engine.setup import Ready, ReadyToTrain, weights_of_classes
from engine.task.losses import loss_named
from models.build import describe as describe_model
from models.parts import frozen_weights
from utils.cli import version_text
from utils.config import Config
from utils.distributed.world import World
from utils.log import IN_LINE
from utils.text import counted
from vitamp.metrics import TOP1, metric_named
from vitamp.sizes import in_pixels


def banner(run: Run, ready: Ready, folder: Path | None) -> str:
    """Write the banner, one row per topic, with the versions above. `folder` None: a dry run."""
    config = run.config
    world = run.world
    data = run.config.DATA
    mean = ", ".join(f"{value:g}" for value in data.IMAGENET_MEAN)
    std = ", ".join(f"{value:g}" for value in data.IMAGENET_STD)
    inputs = f"mean {mean}; std {std}"
    source = source_named(data.DATASET)
    # Data sets that are one array of whole images crop and resize none.
    is_array_of_whole_images = source is not None and source.arrays == "whole"
    if not is_array_of_whole_images:
        crop = [f"CROP_PCT {data.CROP_PCT:g}"]
        if isinstance(ready, ReadyToTrain):
            crop.insert(0, f"crop {data.CROP}")
        if data.CROP_MODE != "center":
            crop.append(f"CROP_MODE {data.CROP_MODE}")
        crop.append(data.INTERPOLATION)
        inputs += f"; {', '.join(crop)}"
    rows = [
        ("device", describe_devices(run.device, world, run.threads)),
        ("precision", ready.precision.line()),
        ("computing", ready.computing),
        ("model", describe_model(ready.model)),
        ("data", _describe_data(config, ready)),
        ("inputs", inputs),
    ]
    rows += ready.task.rows(ready.val_set).items()
    if isinstance(ready, ReadyToTrain):
        rows += _training_rows(config, ready, world)
        # Rows of the same name, such as those of two callbacks, are joined.
        by_name = dict[str, list[str]]()
        for name, words in rows:
            by_name.setdefault(name, []).append(words)
        rows = [(name, "; ".join(texts)) for name, texts in by_name.items()]
    rows.append(("output", f"{folder}" if folder else "nothing is written (-dry_run)"))
    first_rows = []
    if config.TAG:
        first_rows.append(("tag", config.TAG))
    first_rows.append(("arguments", shlex.join(sys.argv[1:]) or "none"))
    if world.size == 1:  # for several processes, the table of processes has them
        first_rows.append(("libraries", ", ".join(f"{name} {version}" for name, version in libraries().items())))
    lines = [", ".join(version_text().splitlines())]
    lines += [f"  {name:<10} {text.translate(IN_LINE)}" for name, text in first_rows + rows]
    return "\n".join(lines)


def _training_rows(config: Config, ready: ReadyToTrain, world: World) -> Iterator[tuple[str, str]]:
    """Yield the rows that only a training has: their names and texts."""
    parts = ready.parts
    images = global_batch(config, world)
    if parts.sharding is not None:
        yield "strategy", parts.sharding.words()
    classes = _describe_classes(config, ready)
    if classes:
        yield "classes", classes
    base_rate, _, _ = scaled_learning_rates(config.TRAIN, images)
    fine_tuning = describe_fine_tuning(config, ready.model, parts.optimizer, base_rate)
    if fine_tuning:
        yield "trained", fine_tuning
    if any("use_muon" in group for group in parts.optimizer.param_groups):
        from engine.optim.muon import describe_muon

        yield "optimiser", describe_muon(parts.optimizer)
    on_devices = f"{config.DATA.BATCH_SIZE} per device x {counted(world.size, 'device')}"
    batch = f"{on_devices} x {config.TRAIN.ACCUM_ITER} accumulated = {images}"
    yield "batch", f"{batch}; {ready.train_loader.order.words()}"
    yield "training", _describe_training(config, ready, world)
    yield "compile", f"{ready.choices['compile']} ({ready.choices['compile_why']})"
    for callback in parts.callbacks:
        yield from callback.rows().items()


def _describe_data(config: Config, ready: Ready) -> str:
    """Describe the images, their number, and how they are split."""
    classes = ready.task.words()
    size = f"{in_pixels(config.DATA.IMAGE_SIZE)} x {config.DATA.IMAGE_CHANNELS}"
    if not isinstance(ready, ReadyToTrain):
        from engine.evaluation.data import title_of

        text = f"{title_of(config.DATA)}: {len(ready.val_set):,} images of {size}, {classes}"
    else:
        text = (
            f"{config.DATA.DATASET}: {len(ready.train_set):,} training and {len(ready.val_set):,} validation images "
            f"of {size}, {classes}"
        )
    groups = f", groups by DATA.GROUP {config.DATA.GROUP}" if config.DATA.GROUP is not None else ""
    if config.DATA.FOLD is not None:
        return f"{text}; validation on fold {config.DATA.FOLD}{groups}"
    # The digits come unsplit, so that they can be divided into folds, but their split without folds is fixed.
    has_fixed_split = config.DATA.DATASET == "digits"
    if config.DATA.PART == "all" or has_fixed_split or not comes_unsplit(config.DATA):
        return f"{text}{groups}"
    excluded = ", then without those in DATA.EXCLUDE" if config.DATA.EXCLUDE is not None else ""
    return f"{text}; split at random by DATA.VAL_FRACTION {config.DATA.VAL_FRACTION:g}{groups}{excluded}"


def _describe_classes(config: Config, ready: ReadyToTrain) -> str:
    """Describe what is done about classes of different frequency; '' if nothing is."""
    words = []
    if config.DATA.SAMPLER == "balanced":
        order = ready.train_loader.order
        balanced = BalancedOrder(ready.train_set.sample_labels(), config.DATA.REPEATED_AUGMENT)
        uses_whole_epochs = order.used == order.samples  # no images are left out at the end of an epoch
        words.append(balanced.words(whole=uses_whole_epochs))
    weights = weights_of_classes(config, ready.train_set)
    if weights is not None:
        positives = "on positives only, " if loss_named(config.TRAIN.LOSS).weighs == "positives" else ""
        weights_range = f"class weights {config.TRAIN.CLASS_WEIGHTS}: {weights.min():.3g} to {weights.max():.3g}"
        words.append(f"{weights_range}, {positives}in the training loss only")
    if words:
        deciding_metric = metric_named(config.SAVE_BEST_BY)
        advice = ""
        if deciding_metric is TOP1:  # in which frequent classes weigh more
            advice = " (SAVE_BEST_BY=balanced_acc weighs classes alike there, but may lower top-1)"
        words.append(f"best checkpoint by {deciding_metric.words}{advice}")
    return "; ".join(words)


def describe_fine_tuning(config: Config, model: nn.Module, optimizer: Optimizer, base_rate: float) -> str:
    """Describe frozen weights, adapters and learning rates by layer; '' if the run has none of these.

    `base_rate`: the learning rate after warm-up, which each layer multiplies by a factor of its own.
    """
    train = config.TRAIN
    frozen = frozen_weights(model)
    parts = []
    if config.MODEL.LORA.RANK is not None:
        from models.lora import describe_lora

        parts.append(describe_lora(model, config.MODEL.LORA))
    elif frozen:
        patterns = f" ({', '.join(config.MODEL.FREEZE)})" if config.MODEL.FREEZE else ""
        parts.append(f"{len(frozen)} of {len(list(model.parameters()))} tensors frozen{patterns}")
    scales = [group["lr_scale"] for group in optimizer.param_groups if "lr_scale" in group]
    if scales and train.LAYER_DECAY is not None:
        lowest = f"{base_rate * min(scales):.3g}"
        highest = f"{base_rate * max(scales):.3g}"
        rates = f"learning rate {highest}" if lowest == highest else f"learning rates from {lowest} to {highest}"
        parts.append(f"{rates} (layer decay {train.LAYER_DECAY:g})")
    return "; ".join(parts)


def _describe_training(config: Config, ready: ReadyToTrain, world: World) -> str:
    """Describe the length of training, optimiser, learning rate and its schedule, weight decay, loss and clipping."""
    train = config.TRAIN
    images_per_update = global_batch(config, world)
    per_epoch = ready.train_loader.order.updates
    total = train.NUM_EPOCHS * per_epoch
    limit = train.MAX_UPDATES
    length = f"{counted(train.NUM_EPOCHS, 'epoch')} of {counted(per_epoch, 'update')} = {counted(total, 'update')}"
    if limit is not None and limit < total:
        length += f", ending after {limit:,} (TRAIN.MAX_UPDATES)"
    warmup = min(train.WARMUP_EPOCHS, train.NUM_EPOCHS)
    _base_rate, _start_rate, end_rate = scaled_learning_rates(train, images_per_update)
    text = (
        f"{length}, {describe_optimizer(ready.parts.optimizer, train.OPTIMIZER.NAME)}, "
        f"learning rate {describe_learning_rate(train, images_per_update)} after "
        f"{counted(warmup, 'epoch')} of warm-up, then {describe_schedule(train, end_rate)}"
    )
    text += f"; weight decay {train.WEIGHT_DECAY:g}"
    loss = "" if config.MODEL.MAE_PRETRAIN else loss_named(train.LOSS).words(train)
    if loss:
        text += f"; {loss}"
    if train.GRAD_CLIP is not None:
        text += f"; gradient norm at most {train.GRAD_CLIP:g}"
    return text
