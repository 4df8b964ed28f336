"""Builds everything that a run needs before its first update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from datasets import (
    BalancedOrder,
    EpochOrder,
    ImageDataset,
    OrderByMachine,
    TrainLoader,
    ValLoader,
    auto_workers,
    identity_of,
    open_dataset,
    warn_of_splits,
)
from engine.amp.precision import PRECISION, Precision, amp_may_gain, choose
from engine.callback import Callback
from engine.inputs.batches import Inputs, no_transform, shortcuts_of
from engine.machine.device import Run, global_batch
from engine.measure.meters import Best, Position, TrainMeters, updates_left
from engine.measure.throughput import DATA, Setting, Stages
from engine.optim.build import build_optimizer, scaled_learning_rates
from engine.optim.schedule import DeviceSchedule, Schedule, build_scheduler
from engine.speed.tuning import speed_up
from engine.task import task_of
from engine.task.base import Task
from engine.task.losses import Criterion, WeightedCrossEntropy, class_weights, loss_named
from engine.update import TrainState
from models.build import build_model
from models.parts import is_convolutional
from utils.config import Config
from utils.distributed.world import ALONE, World, broadcast, check_machines, on_every_rank
from utils.log import DETAIL, log
from utils.seeding import seed_all
from vitamp.checkpoints import Checkpoint

if TYPE_CHECKING:
    from engine.evaluation.knn import Neighbours
    from engine.parallel.fsdp import Sharding

Choices = Mapping[str, Any]
"""What a run has chosen by measurement, or by what the machine has, as its checkpoints keep it"""
NO_CHOICES: Choices = MappingProxyType({})
BATCH_CHOICE = "batch_size"
"""Key under which a run's choices keep the batch size that `auto` found."""


@dataclass
class TunedModel:
    """A model in its precision, on its device."""

    model: nn.Module
    inputs: nn.Module
    """Normalises the images"""
    precision: Precision
    choices: dict[str, Any] = field(default_factory=dict)
    """Made by measurement, or by what the machine has; kept in run.json and checkpoints, and repeated on resuming."""
    computing: str = ""
    """How the layers compute, in words"""


@dataclass(kw_only=True)
class Ready(TunedModel):
    """All that validation needs."""

    task: Task
    val_set: ImageDataset
    val_loader: ValLoader
    neighbours: Neighbours | None
    """Measures k-NN accuracy at each validation, if TRAIN.KNN names images."""


@dataclass(kw_only=True)
class ReadyToTrain(Ready):
    """All that training needs."""

    train_set: ImageDataset
    train_loader: TrainLoader
    parts: TrainState
    position: Position
    best: Best
    resumed: bool
    measured: dict[str, Any] = field(default_factory=dict)
    """Entries of meta.json that say what the resumed checkpoint's validation measured, if it has one of these images"""
    adapters: dict[str, Any] | None = None
    """With MODEL.LORA, on rank 0: the entry of meta.json that names the file of frozen weights"""
    warnings: list[str] = field(default_factory=list)
    """Warnings of what differs from the resumed checkpoint, to be logged below the settings that changed"""


def choices_of(resumed: Checkpoint | None) -> Choices:
    """Return the choices of a resumed run; none for a new one."""
    return resumed.meta.get("choices", {}) if resumed else NO_CHOICES


def build_for_evaluation(run: Run, checkpoint: Checkpoint | None = None) -> Ready:
    """Build the model and the validation data. The weights of `checkpoint` are not loaded yet."""
    config = run.config
    world = run.world
    device = run.device
    data = config.DATA
    has_checkpoint = checkpoint is not None  # whose weights will replace those that the model is built with
    tuned = tuned_model(config, device, world, choices_of(checkpoint), replaced=has_checkpoint)
    tuned.choices = {PRECISION: tuned.precision.name} | tuned.choices  # the precision comes first among them
    if run.auto_batch_size:
        tuned.choices[BATCH_CHOICE] = data.BATCH_SIZE
    is_training = False
    val_set = open_dataset(data, is_training, config.MODEL.NUM_CLASSES, config.SEED, device, world)
    workers = auto_workers(world, data.NUM_WORKERS)
    val_loader = ValLoader(val_set, data.val_batch, world.rank, world.size, workers, device)
    neighbours = None
    if config.measures_knn:
        from engine.evaluation.knn import Neighbours

        neighbours = Neighbours(config, world, device, workers)
    # Ready has the fields of TunedModel, and more.
    return Ready(**vars(tuned), task=task_of(config), val_set=val_set, val_loader=val_loader, neighbours=neighbours)


def tuned_model(
    config: Config, device: torch.device, world: World = ALONE, choices: Choices = NO_CHOICES, replaced: bool = False
) -> TunedModel:
    """Build the model and choose how its layers compute. A collective call: all ranks take rank 0's choices.

    `choices`: those of the run that the model is from. `replaced`: the caller will replace the weights by those of a
    checkpoint, so no pretrained weights are loaded.
    """
    model = on_every_rank(world, lambda: _model(config, device, replaced))
    dtype_choice = broadcast(choose(config.AMP, device, model), world)  # the CPUs of several machines may differ
    precision = Precision(config.AMP, device, dtype_choice)
    inputs = Inputs(config.DATA).to(device)
    if precision.level == "O3" or precision.fp8 or (precision.level != "O0" and config.AMP.FP32_MODULES):
        from engine.amp.low_precision import prepare_model

        on_every_rank(world, lambda: prepare_model(model, config.AMP, precision))
    new_choices, computing_words = speed_up(config, model, inputs, precision, world, previous=choices)
    return TunedModel(model, inputs, precision, new_choices, computing_words)


def _model(config: Config, device: torch.device, replaced: bool) -> nn.Module:
    """Build the model with pretrained weights, or with initial ones from SEED, which are the same on every rank.

    `replaced`: the caller will replace the weights by those of a checkpoint, so no pretrained weights are loaded.
    """
    keeps_initial_weights = not replaced
    seed_all(config.SEED, "init")
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config))
    if keeps_initial_weights and config.MODEL.PRETRAINED:
        from models.weights.fit import load_pretrained

        message = load_pretrained(
            model,
            config.MODEL.PRETRAINED,
            config.MODEL.NAME,
            new_classifier=config.MODEL.NEW_CLASSIFIER,
            complete=config.EVAL,
        )
        log.info(message)
    elif keeps_initial_weights:
        log.info("The weights are freshly initialised, from SEED %d.", config.SEED, extra=DETAIL)
    # An evaluation has no adapters: they are merged into the weights that it loads.
    if config.MODEL.LORA.RANK is not None and not config.EVAL:
        from models.lora import add_adapters

        add_adapters(model, config.MODEL.LORA, config.SEED)
    return model.to(device)


def build_for_training(run: Run, checkpoint: Checkpoint | None, dry: bool = False) -> ReadyToTrain:
    """Build all that training needs, and restore `checkpoint` if there is one. A collective call.

    `dry`: for a dry run, compute no features of all images, and fit no probe to them.
    """
    config = run.config
    world = run.world
    device = run.device
    previous_choices = choices_of(checkpoint)  # of the run that is resumed
    sharding = None
    if config.DIST.STRATEGY == "fsdp":
        from engine.parallel.fsdp import build_sharding

        sharding = build_sharding(config, world, device)

    # The model and the validation data. A linear probe is fitted before anything changes how the model computes.
    ready = build_for_evaluation(run, checkpoint)
    if checkpoint or config.MODEL.PRETRAINED is not None or config.freezes_backbone:
        from engine.evaluation.start import settle_start

        ready.choices |= settle_start(run, ready, checkpoint, dry)
    if world.size > 1:
        from engine.parallel.ddp import synchronise_batch_norms

        synchronise_batch_norms(ready.model, config, device)

    # The training data
    train_set, loader = training_data(config, world, device)
    updates_per_epoch = loader.order.updates
    if world.first:
        splits = [train_set, ready.val_set]
        if ready.neighbours:
            splits += [ready.neighbours.bank, ready.neighbours.images]
        warn_of_splits(config.DATA, *(split.single_images() for split in splits))

    # The state of the training, and the position where it begins
    if checkpoint and sharding:
        # Before the weights are sharded: FSDP then decides in what dtype to gather them.
        from engine.checkpoint.restore import restore_fp32

        restore_fp32(ready.model, checkpoint, ready.precision)
    parts = build_train_state(config, world, ready, updates_per_epoch, sharding, train_set, previous_choices)
    position, best, warnings = _restore_or_begin(run, parts, checkpoint, train_set, loader.order)

    # With a frozen backbone, training may read features in place of images, once the weights are restored.
    if config.freezes_backbone:
        from engine.evaluation.features import see_features

        features = see_features(run, ready, parts, train_set, dry)
        if features is not None:
            train_set = features
            loader = TrainLoader(features, loader.order, config.SEED, workers=0, device=device)

    loader.on_arrival = partial(parts.stages.mark, DATA)
    updates_to_train = updates_left(config, position, updates_per_epoch)
    ready.choices |= _choose_compiling(run, parts, updates_to_train, previous_choices)
    for callback in parts.callbacks:
        ready.choices |= callback.noted()
    built: Any = {**vars(ready), "train_set": train_set, "train_loader": loader}
    resumed = checkpoint is not None
    return ReadyToTrain(**built, parts=parts, position=position, best=best, resumed=resumed, warnings=warnings)


def _restore_or_begin(
    run: Run, parts: TrainState, checkpoint: Checkpoint | None, train_set: ImageDataset, order: EpochOrder
) -> tuple[Position, Best, list[str]]:
    """Restore the checkpoint; without one, begin after TRAIN.LAST_EPOCH if that is set.

    Returns the position where training begins, the best validation so far, and warnings of data that have changed
    since the checkpoint.
    """
    config = run.config
    if checkpoint is not None:
        from engine.checkpoint.restore import check_and_restore, check_classes

        restored = check_and_restore(parts, checkpoint, identity_of(train_set, order), config, run.world)
        check_classes(checkpoint.folder, checkpoint.meta.get("classes"), train_set.classes, config)
        return restored
    last_epoch = config.TRAIN.LAST_EPOCH
    position = Position(epoch=last_epoch + 1, update=last_epoch * order.updates)
    if last_epoch:
        parts.schedule.restore(position.update)
    return position, Best(kind=config.SAVE_BEST_BY), []


def _choose_compiling(run: Run, parts: TrainState, updates: int, resumed: Choices) -> dict[str, str]:
    """Decide whether the training is compiled. Returns that and the reason, as entries of the run's choices.

    `updates`: those that are still to train. `resumed`: choices of the run that is resumed.
    """
    how = "none"
    reason = why_not_compiled(run.config, run.device, resumed)
    if reason is None:
        from engine.compile.choice import choose_compiling

        how, reason = choose_compiling(run.config, parts, run.world, updates, resumed, run.compiling)
    return {"compile": how, "compile_why": reason}


def training_data(config: Config, world: World, device: torch.device) -> tuple[ImageDataset, TrainLoader]:
    """Open the training split with its augmentation, and build the loader of its batches."""
    data = config.DATA
    is_training = True
    train_set = open_dataset(data, is_training, config.MODEL.NUM_CLASSES, config.SEED, device, world)
    train_set = train_set.augment(config.TRAIN)
    if data.SAMPLER == "by_machine":
        check_machines(world, "DATA.SAMPLER by_machine needs")
    # An epoch may have several copies of an image: repeated augmentation, or a balanced sampler.
    order, copies = training_order(config, world, train_set)
    if copies > 1:
        from datasets.variants import Repeated

        train_set = Repeated(train_set, copies)
    if config.TRAIN.SIZE_SCHEDULE:
        from datasets.variants import Sized

        train_set = Sized(train_set, config.TRAIN, data.IMAGE_SIZE)
    return train_set, TrainLoader(train_set, order, config.SEED, auto_workers(world, data.NUM_WORKERS), device)


def training_order(config: Config, world: World, train_set: ImageDataset) -> tuple[EpochOrder, int]:
    """Build the order of the samples in a run's epochs. Returns it, and the most copies of a sample in an epoch."""
    data = config.DATA

    # The function that draws the order of an epoch
    draw_order = train_set.shuffled
    copies = data.REPEATED_AUGMENT
    if data.SAMPLER == "balanced":
        draw_order = BalancedOrder(train_set.sample_labels(), data.REPEATED_AUGMENT)
        copies = draw_order.copies

    # The weight of each image in the loss, if its class decides that; None if all weigh alike
    sample_weights = None
    if loss_named(config.TRAIN.LOSS).weighs == "images":
        weight_of_class = weights_of_classes(config, train_set)
        sample_weights = None if weight_of_class is None else weight_of_class[train_set.sample_labels()]

    # Which rank loads which images: those of its machine's files, or any
    build_order = EpochOrder
    samples = train_set.single_images()
    if data.SAMPLER == "by_machine" and samples and world.machines > 1:
        build_order = partial(OrderByMachine, samples, world.machines)
    order = build_order(
        samples=len(train_set),
        batch_size=data.BATCH_SIZE,
        accum=config.TRAIN.ACCUM_ITER,
        rank=world.rank,
        world=world.size,
        seed=config.SEED,
        drop_last=data.DROP_LAST,
        copies=data.REPEATED_AUGMENT,
        shuffled=draw_order,
        sample_weights=sample_weights,
    )
    return order, copies


def weights_of_classes(config: Config, train_set: ImageDataset) -> np.ndarray | None:
    """Return the weight of each class in the loss (with bce, of its positive targets); None: all weigh alike."""
    if config.TRAIN.CLASS_WEIGHTS is None or loss_named(config.TRAIN.LOSS).weighs == "nothing":
        return None
    return class_weights(config.MODEL.NUM_CLASSES, train_set.sample_labels())


def build_train_state(
    config: Config,
    world: World,
    tuned: TunedModel,
    per_epoch: int,
    sharding: Sharding | None = None,
    train_set: ImageDataset | None = None,
    resumed: Choices = NO_CHOICES,
) -> TrainState:
    """Build the optimiser, the schedule and all else that an update needs.

    `per_epoch`: updates per epoch. `train_set`: for class weights and names; None in a trial, where all classes weigh
    alike. `resumed`: choices of the run that is resumed.
    """
    train = config.TRAIN
    model = tuned.model
    precision = tuned.precision
    task = task_of(config)
    device = precision.device

    # The loss, the clock of the stages, and mixing
    criterion = _criterion(config, task, train_set, device)
    batch_transform = no_transform
    stages = Stages()
    if config.REPORT_STAGES:
        from engine.measure.stages import EventStages, HostEvent

        on_gpu = device.type == "cuda"
        stages = EventStages(partial(torch.cuda.Event, enable_timing=True) if on_gpu else HostEvent)
    if train.RANDOM_ERASE_PROB or train.mixes:
        from engine.inputs.mixing import build_batch_transform

        batch_transform = build_batch_transform(train, task, device)

    # The callbacks, and FSDP of the model and of their further sets of weights, such as the EMA
    classes = None if train_set is None else train_set.classes
    run_callbacks = tuple(callbacks(config, tuned, world, sharding is not None, resumed, classes))
    if sharding is not None:
        sharding.shard(model, precision)
        for callback in run_callbacks:
            for weights in callback.weights().values():
                sharding.shard(weights, precision, computing=False)

    # The optimiser, which holds the sharded weights, and the schedule
    rates = scaled_learning_rates(train, global_batch(config, world))
    base_rate = rates[0]
    optimizer = build_optimizer(model, train, base_rate, device, amp=precision.level != "O0")
    scheduler = build_scheduler(optimizer, train, rates, per_epoch)
    updates = train.NUM_EPOCHS * per_epoch
    if precision.hides_skips(optimizer):  # only the device knows how many updates moved the weights
        schedule = DeviceSchedule(scheduler, optimizer, updates, device)
    else:
        schedule = Schedule(scheduler, optimizer, updates)
    return TrainState(
        model=model,
        forward=model,  # callbacks may replace it, such as by DDP
        inputs=tuned.inputs,
        criterion=criterion,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        meters=TrainMeters(device, world, task, weighted=isinstance(criterion, WeightedCrossEntropy)),
        grad_clip=train.GRAD_CLIP,
        seed=config.SEED,
        world=world,
        batch_transform=batch_transform,
        sharding=sharding,
        stages=stages,
        callbacks=run_callbacks,
    )


def _criterion(config: Config, task: Task, train_set: ImageDataset | None, device: torch.device) -> Criterion:
    """Build the loss on its device, with class weights if they are set. `train_set` None: all classes weigh alike."""
    weights = None if train_set is None else weights_of_classes(config, train_set)
    criterion = task.loss(config.TRAIN, None if weights is None else torch.tensor(weights, dtype=torch.float32))
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    if config.TRAIN.own_loss:
        # Autocast would compute the matrix products of the user's own loss in half precision.
        without_autocast = torch.autocast(device.type, enabled=False)
        criterion = without_autocast(criterion)  # used as a decorator
    return criterion


def callbacks(
    config: Config, tuned: TunedModel, world: World, sharded: bool, resumed: Choices, classes: list[str] | None
) -> Iterator[Callback]:
    """Build the callbacks of a run, in the one order in which they are built, attached and called.

    docs/architecture.md says why in this order. `sharded`: FSDP casts weights and sums gradients, so that neither a
    half-precision copy nor DDP is needed. `classes`: names of the data's classes.
    """
    train = config.TRAIN
    precision = tuned.precision
    if train.DISTILLATION_TYPE is not None:  # it changes what the model returns, so it comes before copies of the model
        from engine.distill.teacher import Distillation

        yield Distillation(config, tuned.model, precision, classes, resumed)
    if train.TOKEN_DROP:
        from engine.inputs.by_epoch import TokenDrop

        yield TokenDrop(train)
    if train.SIZE_SCHEDULE:
        from engine.inputs.by_epoch import ImageSizes

        yield ImageSizes(train, config.DATA.IMAGE_SIZE)
    if precision.computes_in_copy and not sharded:
        from engine.amp.low_precision import HalfCopy

        yield HalfCopy(precision, world)
    if precision.scaler.is_enabled():
        from engine.amp.overflow import KeptStatistics, OverflowWatch

        yield KeptStatistics()
        # The watch replays an update in one rank alone. Sharded weights and synchronised batch norms would wait there
        # for the other ranks.
        needs_other_ranks = sharded or (world.size > 1 and config.DIST.SYNC_BATCHNORM)
        if not needs_other_ranks:
            yield OverflowWatch(config.SEED, precision)
    if why_not_compiled(config, precision.device, resumed) is None:  # before DDP, which is around the compiled model
        from engine.compile.compiled import Compiling

        rewrites = config.wants("rewrite") is not False
        yield Compiling(config.DATA, precision, world, sharded, rewrites)
    if world.size > 1 and not sharded and not precision.computes_in_copy:  # the copy sums gradients itself
        from engine.parallel.ddp import Ddp

        yield Ddp(precision.device)
    if train.MODEL_EMA:  # last, since it copies the model after all that changes it
        from engine.optim.ema import Ema

        yield Ema(tuned.model, train, precision.device)


def why_not_compiled(config: Config, device: torch.device, resumed: Choices) -> str | None:
    """Say why nothing will be compiled; None if it may be.

    TRAIN.COMPILE auto only compiles on a GPU, or if the run that is resumed was compiled.
    """
    wanted = config.TRAIN.COMPILE
    if config.trains_on_features:
        return "features are kept, so no model is computed"
    if wanted == "none":
        return "as asked for"
    if wanted == "auto" and device.type != "cuda" and resumed.get("compile", "none") == "none":
        return f"auto: on {device.type} compiling takes longer than it saves"
    return None


def setting_of(ready: ReadyToTrain) -> Setting:
    """Collect the facts about the run that the advice on its bottleneck depends on."""
    device = ready.precision.device
    model = ready.model
    uses_amp = ready.precision.level != "O0"
    gains_by_amp = amp_may_gain(device, model)
    samples = ready.train_set.single_images()  # None: the images are one array of pixels
    # `auto` has weighed whether to compile. So compiling is advised only if the user has switched it off.
    is_compiling_off = ready.choices.get("compile") == "none" and ready.choices.get("compile_why") == "as asked for"
    has_several_labels = ready.train_set.sample_labels().ndim > 1
    faster = []
    if device.type == "cpu":
        if is_convolutional(model) and not (ready.choices["channels_last"] or ready.parts.sharding):
            faster.append("SPEED=+channels_last")
        if uses_amp and not gains_by_amp:
            faster.append("-amp off (fp32 is faster here)")
    return Setting(
        device=device.type,
        amp=uses_amp or not gains_by_amp,  # AMP is on, or would gain nothing: either way, it is not advised
        compiled=not is_compiling_off,
        workers=None if ready.train_set.in_memory else ready.train_loader.workers,
        cores=ready.parts.world.own_cores,
        stored="pixels" if samples is None else samples.stored,
        remote=samples is not None and samples.remote,
        threads=torch.get_num_threads(),
        several=has_several_labels,
        faster=tuple(faster),
    )
