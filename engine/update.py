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
from engine.amp.precision import Precision
from engine.callback import A, Callback, Figure
from engine.inputs.batches import BatchTransform, no_transform
from engine.measure.meters import TrainMeters
from engine.measure.throughput import BACKWARD, COPY, FORWARD, OPTIMISER, OTHER, Stages
from engine.optim.build import clip_gradients
from engine.optim.schedule import Schedule
from utils.distributed.world import World
from utils.seeding import seed_all
from vitamp.metrics import PLAIN, WeightSet

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding


class ForwardResult(NamedTuple):
    """Loss, logits and labels of a micro-batch; only the loss has a graph."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    """One label per image, as in `TransformedBatch`."""


@dataclass
class TrainState:
    """Everything that an update uses.

    From `assemble` on, the callbacks hold on to it, and may replace what computes (see `Computing`).
    """

    model: nn.Module
    forward: nn.Module
    inputs: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    meters: TrainMeters
    grad_clip: float | None
    seed: int
    world: World
    batch_transform: BatchTransform = no_transform
    callbacks: tuple[Callback, ...] = ()
    sharding: Sharding | None = None
    stages: Stages = field(default_factory=Stages)
    moved_to_fp32: list[str] = field(default_factory=list)
    """Modules that AMP.AUTO_FP32 has moved to fp32, besides AMP.FP32_MODULES."""
    after_pause: Callable[[], None] = lambda: None
    """Called after what is no training, such as compiling, so that it does not count in speeds."""
    compute: Callable[[Batch], ForwardResult] = field(init=False)
    """Forward pass of a micro-batch: `eager`, or compiled."""

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())
        self.compute = self.eager

    @property
    def others(self) -> dict[WeightSet, nn.Module]:
        """Sets of weights beside the trained ones, such as the EMA; see `Callback.weights`."""
        weights: dict[WeightSet, nn.Module] = {}
        for callback in self.callbacks:
            weights.update(callback.weights())
        return weights

    @property
    def weights(self) -> dict[WeightSet, nn.Module]:
        """All sets of weights, which are validated and saved: the trained ones first."""
        return {PLAIN: self.model, **self.others}

    def callback(self, kind: type[A]) -> A | None:
        """Return the callback of this class; None if the run does not have it."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def leave_out(self, kind: type[Callback]) -> None:
        """Remove the callback of this class, for a trial without it."""
        self.callbacks = tuple(callback for callback in self.callbacks if not isinstance(callback, kind))

    def assemble(self) -> None:
        """Let the callbacks attach to this state, in their order.

        Each may replace what computes: the module `forward`, such as by DDP, or the function `compute`, by compiled
        code. A collective call, made once the weights are loaded and every rank is ready, and again when modules move
        to fp32: then everything begins with the plain model once more.
        """
        self.forward = self.model
        self.compute = self.eager
        for callback in self.callbacks:
            callback.attach(self)

    def enter(self, epoch: int) -> None:
        """Let the callbacks prepare for an epoch."""
        for callback in self.callbacks:
            callback.enter(epoch, self.model, self.forward)

    def figures(self) -> dict[str, Figure]:
        """Return what the callbacks report of the last update, by name. A collective call."""
        figures: dict[str, Figure] = {}
        for callback in self.callbacks:
            figures.update(callback.figures())
        return figures

    def eager(self, batch: Batch) -> ForwardResult:
        """Compute loss and logits of a micro-batch, without compiled code around the model."""
        with self.precision.autocast():
            images, targets, labels = self.batch_transform(self.inputs(batch.images), batch.labels)
            logits = self.forward(images)
            return ForwardResult(self.criterion(logits.float(), targets), logits.detach(), labels)

    def force_fp32(self, modules: list[str]) -> None:
        """Let these modules compute in fp32 from the next `assemble` on."""
        from engine.amp.low_precision import force_fp32

        device = self.precision.device.type
        self.moved_to_fp32 += force_fp32(self.model, modules, device)
        for other in self.others.values():
            force_fp32(other, modules, device)


def train_update(parts: TrainState, window: Window, update: int) -> None:
    """Train on the micro-batches of `window`, with one optimiser step. `update` counts from 1 through the run."""
    precision = parts.precision
    optimizer = parts.optimizer
    mark = parts.stages.mark
    parts.stages.begin()
    accumulate(parts, window, update)
    for callback in parts.callbacks:
        callback.before_step(update)
    precision.scaler.unscale_(optimizer)  # once per update, before anything uses the gradients
    norm = clip_gradients(parts.parameters, parts.grad_clip)
    # The optimiser Kron draws random numbers, which must be the same on all ranks. So far, each rank is seeded by its
    # own micro-batches.
    seed_all(parts.seed, "step", update)
    stepped = precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    parts.schedule.advance(stepped)
    for callback in parts.callbacks:
        callback.after_update(update, stepped)
    mark(OPTIMISER)
    parts.meters.close_update(update, norm, stepped, precision.scaler.is_enabled())


def accumulate(parts: TrainState, window: Window, update: int) -> None:
    """Sum up the gradients of all micro-batches of `window`, each weighted by its part of the update."""
    precision = parts.precision
    mark = parts.stages.mark
    for nth, (share, batch) in enumerate(window, start=1):
        mark(COPY)
        # Erasing, mixing, dropout and stochastic depth depend on the position of a micro-batch in the run, not on the
        # rank that computes it.
        seed_all(parts.seed, "micro", update, share.number)
        with sync_gradients(parts, last=nth == len(window)):
            loss, logits, labels = parts.compute(batch)
            mark(FORWARD)
            precision.backward(loss * share.weight)
        for callback in parts.callbacks:
            callback.after_backward(share, batch)
        mark(BACKWARD)
        parts.meters.add(loss.detach(), logits, labels, share.weight, share.counts)
        mark(OTHER)


def sync_gradients(parts: TrainState, last: bool) -> AbstractContextManager[None]:
    """Return a context for the backward pass of a micro-batch in which ranks exchange gradients only if they must.

    `last`: this is the last micro-batch of the update. DDP all-reduces gradients in that one only. FSDP reduce-scatters
    in each; HSDP also all-reduces in the last one.
    """
    if isinstance(parts.forward, DistributedDataParallel) and not last:
        return parts.forward.no_sync()
    if parts.sharding is not None:
        parts.sharding.sync_gradients(parts.model, last)
    return nullcontext()
