"""From a config to a run that is ready for its first update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from datasets import (
    EpochOrder,
    ImageDataset,
    Repeated,
    Sized,
    TrainLoader,
    ValLoader,
    auto_workers,
    identity_of,
    open_dataset,
    tell_unmatched,
)
from engine.amp.precision import Precision
from engine.amp.prepare_model import prepare_model
from engine.checkpoint.folder import Checkpoint
from engine.checkpoint.state import check_samples, restore
from engine.distill.targets import distil, teacher_of
from engine.distill.teacher import check_fits
from engine.inputs.mixup import batch_change
from engine.inputs.normalize import Inputs, per_channel
from engine.inputs.token_drop import shortcuts_of, token_drop_of
from engine.measure.bottleneck import Setting
from engine.measure.meters import TrainMeters
from engine.measure.progress import Best, Position
from engine.measure.stage_times import DATA, stages_of
from engine.optim.build import build_optimizer, scaled_rates
from engine.optim.ema import Ema
from engine.optim.layer_rates import tell_parameters
from engine.optim.schedule import Schedule, build_scheduler
from engine.parallel.fsdp import Sharding
from engine.speed.tuning import Tuning, tune
from engine.update import Parts
from models import build_model, frozen_weights, load_pretrained
from utils.config import Config
from utils.config.keys import values_to_keep
from utils.config.kinds import AUTO
from utils.cpus import cores
from utils.distributed.world import ALONE, World, on_every_rank
from utils.log import log
from utils.seeding import seed_all


@dataclass
class Ready:
    """All that a validation needs."""

    model: nn.Module
    inputs: nn.Module
    precision: Precision
    val_set: ImageDataset
    val_loader: ValLoader
    tuning: Tuning
    choices: dict[str, Any]
    """Made by measurement or by what the machine has: told in run.json, saved, and made again alike on resuming."""


@dataclass
class ReadyToTrain(Ready):
    train_set: ImageDataset
    train_loader: TrainLoader
    parts: Parts
    position: Position
    best: Best


def build_for_evaluation(
    config: Config, world: World, device: torch.device, checkpoint: Checkpoint | None = None
) -> Ready:
    data, kept = config.DATA, checkpoint.meta.get("choices", {}) if checkpoint else {}
    (model, inputs, precision), tuning = tuned_model(config, device, world, kept, afresh=checkpoint is None)
    val_set = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, device)
    val_batch = data.BATCH_SIZE_EVAL or data.BATCH_SIZE
    val_loader = ValLoader(val_set, val_batch, world.rank, world.size, _workers(config, world), device)
    return Ready(model, inputs, precision, val_set, val_loader, tuning, tuning.choices())


def model_in_precision(
    config: Config, device: torch.device, kept: dict[str, Any] | None = None
) -> tuple[nn.Module, nn.Module, Precision]:
    """The model as it will compute, what prepares its inputs, and the precision of both. `kept`: choices of its run."""
    return tuned_model(config, device, ALONE, kept or {})[0]


def tuned_model(
    config: Config, device: torch.device, world: World, kept: dict[str, Any], afresh: bool = True
) -> tuple[tuple[nn.Module, nn.Module, Precision], Tuning]:
    """A collective call, since ranks take rank 0's choices. `afresh`: no checkpoint's weights will take the place."""
    model, precision = on_every_rank(world, lambda: (_model(config, device, afresh), Precision(config.AMP, device)))
    inputs = Inputs(config.DATA).to(device)
    on_every_rank(world, lambda: prepare_model(model, config.AMP, precision))
    return (model, inputs, precision), tune(config, model, inputs, precision, world, kept)


def build_for_training(
    config: Config,
    world: World,
    device: torch.device,
    checkpoint: Checkpoint | None,
    sharding: Sharding | None = None,
) -> ReadyToTrain:
    ready = build_for_evaluation(config, world, device, checkpoint)
    log.info(tell_parameters(ready.model))
    train_set, loader = training_data(config, world, device)
    tell_unmatched(config.DATA, [part.single_images() for part in (train_set, ready.val_set)])
    train, updates = config.TRAIN, loader.order.updates
    parts = update_parts(config, world, device, (ready.model, ready.inputs, ready.precision), updates, sharding)
    loader.on_arrival(partial(parts.stages.lap, DATA))
    if teacher := teacher_of(parts.change):
        check_fits(teacher, train_set.classes, checkpoint.meta.get("choices", {}) if checkpoint else {})
        ready.choices.update(teacher.as_noted())
    position, best = Position(epoch=train.LAST_EPOCH + 1, update=train.LAST_EPOCH * updates), Best()
    if checkpoint is not None:
        average = bool(config.MODEL.RESUME_EMA) and config.MODEL.RESUME != AUTO
        position, best = restore(parts, checkpoint, global_batch(config, world), updates, average)
        check_samples(checkpoint, position, identity_of(train_set, loader.order))
    elif train.LAST_EPOCH:
        parts.schedule.restore(position.update)
    parts.start_computing()
    return ReadyToTrain(
        **vars(ready), train_set=train_set, train_loader=loader, parts=parts, position=position, best=best
    )


def training_data(config: Config, world: World, device: torch.device) -> tuple[ImageDataset, TrainLoader]:
    """The training part, its images changed as TRAIN says, and its batches."""
    data = config.DATA
    train_set = open_dataset(data, True, config.MODEL.NUM_CLASSES, config.SEED, device).augment(config.TRAIN)
    order = EpochOrder(
        len(train_set),
        data.BATCH_SIZE,
        config.TRAIN.ACCUM_ITER,
        world.rank,
        world.size,
        config.SEED,
        data.DROP_LAST,
        data.REPEATED_AUGMENT,
        train_set.shuffled,
    )
    if data.REPEATED_AUGMENT > 1:
        train_set = Repeated(train_set, data.REPEATED_AUGMENT)
    if config.TRAIN.SIZE_SCHEDULE:
        train_set = Sized(train_set, config.TRAIN, data.IMAGE_SIZE)
    return train_set, TrainLoader(train_set, order, config.SEED, _workers(config, world), device)


def global_batch(config: Config, world: World) -> int:
    return config.DATA.BATCH_SIZE * world.size * config.TRAIN.ACCUM_ITER


def _model(config: Config, device: torch.device, afresh: bool) -> nn.Module:
    """The same weights on every rank: they follow from the seed."""
    seed_all(config.SEED, "init")
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config))
    if config.MODEL.PRETRAINED and afresh:
        wanted = config.MODEL.RESUME_EMA, config.MODEL.NEW_CLASSIFIER, config.EVAL
        log.info(load_pretrained(model, config.MODEL.PRETRAINED, config.MODEL.NAME, *wanted))
    return model.to(device)


def _workers(config: Config, world: World) -> int:
    given = config.DATA.NUM_WORKERS
    return auto_workers(world.local_size) if given is None else given


def update_parts(
    config: Config,
    world: World,
    device: torch.device,
    in_precision: tuple[nn.Module, nn.Module, Precision],
    per_epoch: int,
    sharding: Sharding | None = None,
) -> Parts:
    """What an update touches, around a model, what prepares its inputs, and the precision of both."""
    train, (model, inputs, precision) = config.TRAIN, in_precision
    stages = stages_of(config.REPORT_STAGES, device)
    change, criterion = distil(config, model, precision, stages, batch_change(train, config.MODEL.NUM_CLASSES, device))
    ema = _average(config, device, model)
    if sharding is not None:
        _deal_out(model, ema, precision, sharding)
    rates = scaled_rates(train, global_batch(config, world))
    optimizer = build_optimizer(model, train, rates[0], device)
    schedule = Schedule(
        build_scheduler(optimizer, train, rates, per_epoch),
        optimizer,
        train.NUM_EPOCHS * per_epoch,
        on_device=device if precision.hides_skips(optimizer) else None,
    )
    return Parts(
        model=model,
        forward=model,
        inputs=inputs,
        criterion=criterion,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        meters=TrainMeters(device, world),
        ema=ema,
        grad_clip=train.GRAD_CLIP,
        seed=config.SEED,
        world=world,
        change=change,
        sharding=sharding,
        stages=stages,
        token_drop=token_drop_of(train),
    )


def _average(config: Config, device: torch.device, model: nn.Module) -> Ema | None:
    train = config.TRAIN
    home = torch.device("cpu") if train.MODEL_EMA_FORCE_CPU else device
    return Ema(model, train.MODEL_EMA_DECAY, train.MODEL_EMA_WARMUP, home) if train.MODEL_EMA else None


def _deal_out(model: nn.Module, ema: Ema | None, precision: Precision, sharding: Sharding) -> None:
    sharding.deal(model, precision)
    if ema is not None:
        sharding.deal(ema.module, precision, computing=False)
        ema.follow(model)


def setting_of(ready: ReadyToTrain) -> Setting:
    """What a verdict's advice depends on."""
    device, amp = ready.precision.device, ready.precision.level != "O0"
    workers = None if ready.train_set.in_memory else ready.train_loader.workers
    samples = ready.train_set.single_images()
    # Arrays that are not read one by one are pixels, too.
    stored, remote = ("pixels", False) if samples is None else (samples.stored, samples.remote)
    compiled = ready.choices.get("compile", "none") != "none"
    here = max(1, cores() // ready.parts.world.local_size)
    return Setting(device.type, amp, compiled, workers, here, stored, remote)


def checkpoint_meta(
    config: Config, ready: ReadyToTrain, processes: int, hash_of: Callable[[Config], str]
) -> dict[str, Any]:
    """What a checkpoint tells whoever uses the weights: all settings, classes, and how the inputs were prepared."""
    data = config.DATA
    return {
        "config_hash": hash_of(config),
        "batch": {"per_process": data.BATCH_SIZE, "accumulated": config.TRAIN.ACCUM_ITER, "processes": processes},
        "choices": ready.choices,
        "samples": identity_of(ready.train_set, ready.train_loader.order),
        "settings": values_to_keep(config),
        "model": config.MODEL.NAME,
        "classes": ready.train_set.classes,
        "num_classes": config.MODEL.NUM_CLASSES,
        **({"frozen": frozen} if (frozen := frozen_weights(ready.model)) else {}),
        "input": {
            "image_size": data.IMAGE_SIZE,
            "channels": data.IMAGE_CHANNELS,
            "crop_pct": data.CROP_PCT,
            "interpolation": data.INTERPOLATION,
            "mean": per_channel(data.IMAGENET_MEAN, data.IMAGE_CHANNELS),
            "std": per_channel(data.IMAGENET_STD, data.IMAGE_CHANNELS),
        },
    }
