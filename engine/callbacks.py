"""The callbacks of a training, in the one order in which they are built, attached and called.

A module is imported only where its callback is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from engine.compile.choice import Compiling
from engine.inputs.batches import BatchTransform
from engine.measure.throughput import Stages
from models import count_parameters, unfreeze
from utils.config import Config
from utils.config.model import ModelConfig
from utils.distributed.world import World
from utils.log import log
from vitamp.metrics import AVERAGE, WeightSet


@dataclass
class CallbackContext:
    """What callbacks are built from, and what they add or replace."""

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
    """Weights beside the trained ones, which callbacks add; see `TrainState.others`."""


def callbacks(context: CallbackContext) -> Iterator[Callback]:
    config, train, precision = context.config, context.config.TRAIN, context.precision
    if train.DISTILLATION_TYPE is not None:  # changes what the model returns, so before it is copied
        from engine.distill import Distillation, check_teacher_matches

        taught = Distillation(config, context.model, precision, context.stages, context.change, context.criterion)
        check_teacher_matches(taught.teacher, context.classes, context.resumed)
        context.change, context.criterion = taught.change, taught.criterion
        yield taught
    if config.MODEL.UNFREEZE_EPOCH is not None:
        yield Unfreezing(config.MODEL, context.sharded)
    if train.TOKEN_DROP:
        from engine.inputs.batches import TokenDrop

        yield TokenDrop(train)
    if train.SIZE_SCHEDULE:
        from engine.inputs.batches import GrowingImages

        yield GrowingImages(train, config.DATA.IMAGE_SIZE)
    if context.world.size > 1:  # changes the modules that the rest holds on to
        from engine.parallel.ddp import SharedBatchNorm

        yield SharedBatchNorm(precision, config.DIST, context.world)
    if precision.computes_in_copy and not context.sharded:
        from engine.amp.low_precision import HalfCopy

        yield HalfCopy(precision, context.world)
    if precision.scaler.is_enabled() and not context.sharded:  # it replays the copy, or the model without DDP
        from engine.amp.overflow import OverflowWatch

        yield OverflowWatch(config.SEED, precision)
    yield Compiling(config.DATA, precision, context.world, context.sharded)  # what is inside DDP
    if (
        context.world.size > 1 and not context.sharded and not precision.computes_in_copy
    ):  # the copy sums gradients itself
        from engine.parallel.ddp import Ddp

        yield Ddp(precision.device)
    if train.MODEL_EMA:  # copies the model after all that changes it
        from engine.optim.ema import Ema

        ema = Ema(context.model, train, precision.device)
        context.others[AVERAGE] = ema.module
        yield ema


class Unfreezing(Callback):
    """MODEL.UNFREEZE_EPOCH: frozen weights are trained from the start of an epoch on.

    The optimiser has them from the first update. Without a gradient it leaves a weight as it is, weight decay included,
    so nothing happens to them before, and their moments begin with their first gradient. All that depends on which
    weights are trained is attached anew, as a run that is resumed at this epoch attaches it.
    """

    def __init__(self, model: ModelConfig, sharded: bool) -> None:
        self._settings, self._sharded = model, sharded

    def attach(self, to: Computing) -> None:
        self._model, self._optimizer = to.model, to.optimizer

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        names = [] if self._settings.frozen_in(epoch) else unfreeze(self._model)
        if not names:
            return False
        log.info(_words(self._model, self._optimizer, names, epoch))
        if self._sharded:
            from engine.parallel.fsdp import read_trained_weights

            read_trained_weights(self._model)
        return True


def _words(model: nn.Module, optimizer: Optimizer, names: list[str], epoch: int) -> str:
    thawed = {id(model.get_parameter(name)) for name in names}
    groups = [group for group in optimizer.param_groups if thawed & set(map(id, group["params"]))]
    ends = (f"{end(float(group['lr']) for group in groups):.3e}" for end in (min, max))
    number = sum(model.get_parameter(name).numel() for name in names)
    return (
        f"MODEL.UNFREEZE_EPOCH: from epoch {epoch} on, {len(names)} frozen tensors ({number:,} parameters) are "
        f"trained too, at learning rate {' to '.join(dict.fromkeys(ends))}; {count_parameters(model)[1]:,} "
        "parameters are trained in all."
    )
