"""`train_update` performs one update, for every precision and number of processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from datasets import Batch, Window
from engine.amp.fp32_modules import force_fp32
from engine.amp.half_copy import HalfCopy, half_copy_of
from engine.amp.overflow_replay import Replay
from engine.amp.precision import Precision
from engine.amp.skip_watch import MicroBatches, OverflowWatch, SkipRecord
from engine.inputs.mixup import BatchTransform, no_transform
from engine.inputs.token_drop import TokenDrop
from engine.measure.meters import TrainMeters
from engine.measure.stage_times import BACKWARD, COPY, FORWARD, OPTIMISER, OTHER, Stages
from engine.optim.clip import Gradients
from engine.optim.ema import Ema
from engine.optim.schedule import Schedule
from engine.parallel.fsdp import Sharding
from utils.distributed.world import World
from utils.seeding import seed_all


class ForwardResult(NamedTuple):
    """Loss, logits and labels of a micro-batch; only the loss has a graph."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    """One label per image, as in `TransformedBatch`."""


class CompiledCall(Protocol):
    """Compiled forward pass of a micro-batch."""

    after_compiling: Callable[[], None]
    """Called after each compilation, whose time is no training time."""

    def start(self) -> None:
        """Compile the modules that compute now; called again when they change."""

    def __call__(self, batch: Batch) -> ForwardResult: ...


@dataclass
class Parts:
    """Everything that an update uses. `forward` is the module that is called: the model, DDP around it, or a copy."""

    model: nn.Module
    forward: nn.Module
    inputs: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    meters: TrainMeters
    ema: Ema | None
    grad_clip: float | None
    seed: int
    world: World
    change: BatchTransform = no_transform
    half_copy: HalfCopy | None = None
    sharding: Sharding | None = None
    watch: OverflowWatch | None = None
    compiled: CompiledCall | None = None
    stages: Stages = field(default_factory=Stages)
    token_drop: TokenDrop | None = None
    moved_to_fp32: list[str] = field(default_factory=list)
    """Modules that AMP.AUTO_FP32 has moved to fp32, besides AMP.FP32_MODULES."""
    skips: SkipRecord = field(default_factory=SkipRecord)

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.model)

    def set_up_forward(self) -> None:
        """Make the half-precision copy and the overflow watch, where the precision needs them.

        Call it once the weights are loaded, and again when modules were forced to fp32.
        """
        if self.sharding is not None:  # FSDP casts to half precision by itself, and its updates are not replayed
            return
        if self.precision.computes_in_copy:
            self.half_copy = half_copy_of(self.model, self.precision)
            self.forward = self.half_copy.model
        if self.precision.scaler.is_enabled():
            model = self.half_copy.model if self.half_copy else self.model
            replay = Replay(model, self.inputs, self.criterion, self.precision.autocast, self.change)
            self.watch = OverflowWatch(replay, self.seed, self.precision.device, self.skips)
        if self.compiled is not None:
            self.compiled.start()

    def start_epoch(self, epoch: int) -> None:
        """Apply the changes to the model that depend on the epoch."""
        if self.token_drop is not None:
            self.token_drop.set(epoch, self.model, self.forward)

    def compute(self, batch: Batch) -> ForwardResult:
        """Forward pass of a micro-batch, compiled or eager."""
        return self.eager(batch) if self.compiled is None else self.compiled(batch)

    def eager(self, batch: Batch) -> ForwardResult:
        """Forward pass of a micro-batch without compiled code around it."""
        with self.precision.autocast():
            images, targets, labels = self.change(self.inputs(batch.images), batch.labels)
            logits = self.forward(images)
            return ForwardResult(self.criterion(logits.float(), targets), logits.detach(), labels)

    def force_fp32(self, modules: list[str]) -> None:
        """Make these modules compute in fp32 from the next update on."""
        self.moved_to_fp32 += force_fp32(self.model, modules, self.precision.device.type)
        if self.ema is not None:
            force_fp32(self.ema.module, modules, self.precision.device.type)
        self.skips = SkipRecord(blamed=self.skips.blamed)  # the next overflows are replayed like the first ones
        self.set_up_forward()


def train_update(parts: Parts, window: Window, update: int) -> None:
    """Train on the micro-batches of `window`, with one optimiser step. `update` counts from 1 through the run."""
    precision, optimizer, half_copy, watch = parts.precision, parts.optimizer, parts.half_copy, parts.watch
    lap = parts.stages.lap
    parts.stages.begin()
    micro_batches = accumulate(parts, window, update)
    if half_copy is not None:
        half_copy.sum_gradients(parts.world)
    if watch is not None:
        watch.remember(update, micro_batches, precision.scale_tensor())
    precision.unscale(optimizer)
    norm = parts.gradients.clip(parts.grad_clip)
    moved = precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    if half_copy is not None:
        half_copy.refresh()
    parts.schedule.advance(moved)
    if parts.ema is not None:
        parts.ema.update(moved)
    lap(OPTIMISER)
    parts.meters.close_update(update, norm, moved, precision.scaler.is_enabled())
    if watch is not None:
        watch.record(update, moved)


def accumulate(parts: Parts, window: Window, update: int) -> MicroBatches | None:
    """Compute the gradients of all micro-batches of `window`. Returns those that the overflow watch holds."""
    precision, half_copy, lap = parts.precision, parts.half_copy, parts.stages.lap
    micro_batches: MicroBatches | None = []
    for nth, (share, batch) in enumerate(window, start=1):
        lap(COPY)
        # Erasing, mixing, dropout and stochastic depth depend on the position of a micro-batch in the run, not on the
        # rank that computes it.
        seed_all(parts.seed, "micro", update, share.number)
        with sync_gradients(parts, last=nth == len(window)):
            loss, logits, labels = parts.compute(batch)
            lap(FORWARD)
            precision.backward(loss * share.weight)
        if half_copy is not None:
            half_copy.collect_gradients()
        lap(BACKWARD)
        if parts.watch is not None:
            micro_batches = parts.watch.collect(micro_batches, share, batch)
        parts.meters.add(loss.detach(), logits, labels, share.weight)
        lap(OTHER)
    return micro_batches


def sync_gradients(parts: Parts, last: bool) -> AbstractContextManager[None]:
    """DDP all-reduces gradients in the backward pass of the last micro-batch only; FSDP as DIST.FSDP_NO_SYNC says."""
    if isinstance(parts.forward, DistributedDataParallel) and not last:
        return parts.forward.no_sync()
    if parts.sharding is not None:
        parts.sharding.sync_gradients(parts.model, last)
    return nullcontext()
