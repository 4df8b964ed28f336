"""`train_update` performs one update, for every precision and number of processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from datasets import Batch, Window
from engine.ability import A, Ability, Figure
from engine.amp.fp32_modules import force_fp32
from engine.amp.precision import Precision
from engine.inputs.mixup import BatchTransform, no_transform
from engine.measure.meters import TrainMeters
from engine.measure.stage_times import BACKWARD, COPY, FORWARD, OPTIMISER, OTHER, Stages
from engine.optim.clip import Gradients
from engine.optim.schedule import Schedule
from utils.distributed.world import World
from utils.record.weight_sets import PLAIN, WeightSet
from utils.seeding import seed_all

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding


class ForwardResult(NamedTuple):
    """Loss, logits and labels of a micro-batch; only the loss has a graph."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    """One label per image, as in `TransformedBatch`."""


@dataclass
class Parts:
    """Everything that an update uses. Its abilities (engine/order.py) hold on to it from `assemble` on."""

    model: nn.Module
    forward: nn.Module
    """The module that is called: the model, DDP around it, or a copy."""
    inputs: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    meters: TrainMeters
    grad_clip: float | None
    seed: int
    world: World
    change: BatchTransform = no_transform
    abilities: tuple[Ability, ...] = ()
    others: dict[WeightSet, nn.Module] = field(default_factory=dict)
    """Weights beside the trained ones: validated, saved, sharded and moved to fp32 with them."""
    sharding: Sharding | None = None
    stages: Stages = field(default_factory=Stages)
    moved_to_fp32: list[str] = field(default_factory=list)
    """Modules that AMP.AUTO_FP32 has moved to fp32, besides AMP.FP32_MODULES."""
    phase: str = ""
    """What is special in this epoch; see `Ability.phase`."""
    after_pause: Callable[[], None] = lambda: None
    """Called after compiling, whose time is no training time."""
    compute: Callable[[Batch], ForwardResult] = field(init=False)
    """Forward pass of a micro-batch, compiled or eager."""
    _assembled: bool = False

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.model)
        self.compute = self.eager

    @property
    def weights(self) -> dict[WeightSet, nn.Module]:
        """All that is validated and saved."""
        return {PLAIN: self.model, **self.others}

    def ability(self, kind: type[A]) -> A | None:
        """The ability of this kind, if the run has it."""
        return next((one for one in self.abilities if isinstance(one, kind)), None)

    def leave_out(self, kind: type[Ability]) -> None:
        """Do without an ability, in a trial."""
        self.abilities = tuple(one for one in self.abilities if not isinstance(one, kind))

    def assemble(self) -> None:
        """Let the abilities hold on to what computes.

        A collective call: once the weights are loaded and every rank is ready, and again when others are trained or
        modules move to fp32.
        """
        self.forward, self.compute = self.model, self.eager
        for ability in self.abilities:
            ability.attach(self)
        self._assembled = True

    def enter(self, epoch: int) -> bool:
        """Prepare for an epoch. Returns whether other weights are trained from now on. A collective call."""
        changed = [ability.enter(epoch, self.model, self.forward) for ability in self.abilities]
        self.phase = ", ".join(filter(None, (ability.phase(epoch) for ability in self.abilities)))
        if any(changed):
            self.assemble()
        return any(changed)

    def figures(self) -> dict[str, Figure]:
        """What the abilities report of the last update. A collective call."""
        return {name: figure for ability in self.abilities for name, figure in ability.figures().items()}

    def eager(self, batch: Batch) -> ForwardResult:
        """Forward pass of a micro-batch without compiled code around it."""
        with self.precision.autocast():
            images, targets, labels = self.change(self.inputs(batch.images), batch.labels)
            logits = self.forward(images)
            return ForwardResult(self.criterion(logits.float(), targets), logits.detach(), labels)

    def force_fp32(self, modules: list[str]) -> None:
        """Make these modules compute in fp32 from the next update on."""
        device = self.precision.device.type
        self.moved_to_fp32 += force_fp32(self.model, modules, device)
        for other in self.others.values():
            force_fp32(other, modules, device)
        if self._assembled:
            self.assemble()


def train_update(parts: Parts, window: Window, update: int) -> None:
    """Train on the micro-batches of `window`, with one optimiser step. `update` counts from 1 through the run."""
    precision, optimizer, lap = parts.precision, parts.optimizer, parts.stages.lap
    parts.stages.begin()
    accumulate(parts, window, update)
    for ability in parts.abilities:
        ability.before_step(update)
    precision.unscale(optimizer)
    norm = parts.gradients.clip(parts.grad_clip)
    moved = precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    parts.schedule.advance(moved)
    for ability in parts.abilities:
        ability.after_update(update, moved)
    lap(OPTIMISER)
    parts.meters.close_update(update, norm, moved, precision.scaler.is_enabled())


def accumulate(parts: Parts, window: Window, update: int) -> None:
    """Compute the gradients of all micro-batches of `window`."""
    precision, lap = parts.precision, parts.stages.lap
    for nth, (share, batch) in enumerate(window, start=1):
        lap(COPY)
        # Erasing, mixing, dropout and stochastic depth depend on the position of a micro-batch in the run, not on the
        # rank that computes it.
        seed_all(parts.seed, "micro", update, share.number)
        with sync_gradients(parts, last=nth == len(window)):
            loss, logits, labels = parts.compute(batch)
            lap(FORWARD)
            precision.backward(loss * share.weight)
        for ability in parts.abilities:
            ability.after_backward(share, batch)
        lap(BACKWARD)
        parts.meters.add(loss.detach(), logits, labels, share.weight)
        lap(OTHER)


def sync_gradients(parts: Parts, last: bool) -> AbstractContextManager[None]:
    """DDP all-reduces gradients in the backward pass of the last micro-batch only; FSDP as DIST.FSDP_NO_SYNC says."""
    if isinstance(parts.forward, DistributedDataParallel) and not last:
        return parts.forward.no_sync()
    if parts.sharding is not None:
        parts.sharding.sync_gradients(parts.model, last)
    return nullcontext()
