"""The abilities of a training, in the one order in which they are built, attached and called.

A room is imported only where its ability is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from engine.ability import Ability
from engine.amp.precision import Precision
from engine.compile.compiling import Compiling
from engine.inputs.mixup import BatchTransform
from engine.measure.stage_times import Stages
from utils.config import Config
from utils.distributed.world import World
from utils.record.weight_sets import AVERAGE, WeightSet


@dataclass
class Site:
    """What abilities are built from, and what they add or replace."""

    config: Config
    model: nn.Module
    precision: Precision
    world: World
    sharded: bool
    """Whether FSDP shards the model, casts its weights, and sums gradients, so that no copy and no DDP does."""
    stages: Stages
    change: BatchTransform
    criterion: nn.Module
    classes: list[str] | None = None
    """Of the data, if they are known."""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the run that is resumed."""
    others: dict[WeightSet, nn.Module] = field(default_factory=dict)
    """Weights beside the trained ones, which abilities add; see `Parts.others`."""


def abilities(site: Site) -> Iterator[Ability]:
    config, train, precision = site.config, site.config.TRAIN, site.precision
    if train.DISTILLATION_TYPE is not None:  # changes what the model returns, so before it is copied
        from engine.distill.targets import Distillation
        from engine.distill.teacher import check_teacher_matches

        taught = Distillation(config, site.model, precision, site.stages, site.change, site.criterion)
        check_teacher_matches(taught.teacher, site.classes, site.resumed)
        site.change, site.criterion = taught.change, taught.criterion
        yield taught
    if config.MODEL.UNFREEZE_EPOCH is not None:
        from engine.unfreeze import Unfreezing

        yield Unfreezing(config.MODEL, site.sharded)
    if train.TOKEN_DROP:
        from engine.inputs.token_drop import TokenDrop

        yield TokenDrop(train)
    if train.SIZE_SCHEDULE:
        from engine.inputs.growing import GrowingImages

        yield GrowingImages(train, config.DATA.IMAGE_SIZE)
    if site.world.size > 1:  # changes the modules that the rest holds on to
        from engine.parallel.sync_batch_norm import SharedBatchNorm

        yield SharedBatchNorm(precision, config.DIST, site.world)
    if precision.computes_in_copy and not site.sharded:
        from engine.amp.half_copy import HalfCopy

        yield HalfCopy(precision, site.world)
    if train.NOISE_SCALE:  # reads the gradients that the copy hands over
        from engine.measure.noise_scale import NoiseScale

        yield NoiseScale(train, precision, site.world)
    if precision.scaler.is_enabled() and not site.sharded:  # it replays the copy, or the model without DDP
        from engine.amp.skip_watch import OverflowWatch

        yield OverflowWatch(config.SEED, precision)
    yield Compiling(config.DATA, precision, site.world, site.sharded)  # what is inside DDP
    if site.world.size > 1 and not site.sharded and not precision.computes_in_copy:  # the copy sums gradients itself
        from engine.parallel.ddp import Ddp

        yield Ddp(precision.device)
    if train.MODEL_EMA:  # copies the model after all that changes it
        from engine.optim.ema import Ema

        ema = Ema(site.model, train, precision.device)
        site.others[AVERAGE] = ema.module
        yield ema
