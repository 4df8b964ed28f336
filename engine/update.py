"""One update. There is no other place that performs one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from datasets import Batch, Window
from engine.amp.fp32_modules import force_fp32, forced
from engine.amp.half_copy import HalfCopy
from engine.amp.precision import Precision
from engine.amp.skip_watch import MicroBatches, OverflowWatch, SkipRecord
from engine.inputs.mixup import BatchChange, unchanged
from engine.inputs.token_drop import TokenDrop
from engine.measure.meters import TrainMeters
from engine.measure.stage_times import BACKWARD, COPY, FORWARD, OPTIMISER, OTHER, Stages
from engine.optim.clip import Gradients
from engine.optim.ema import Ema
from engine.optim.schedule import Schedule
from engine.parallel.fsdp import Sharding, meet_now
from utils.distributed.world import World
from utils.seeding import seed_all


class Computed(NamedTuple):
    """What comes of a micro-batch. Only the loss leads back to the weights."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    """One label an image, as `Seen` has it."""


class CompiledCall(Protocol):
    """Compiled code that computes a micro-batch."""

    when_done: Callable[[], None]
    """Called each time after compiling, which took long."""

    def start(self) -> None:
        """Compile what computes now; again when something else does."""

    def __call__(self, batch: Batch) -> Computed: ...


@dataclass
class Parts:
    """What an update touches. `forward` is the model as it is called: itself, wrapped for many devices, or a copy."""

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
    change: BatchChange = unchanged
    half_copy: HalfCopy | None = None
    sharding: Sharding | None = None
    watch: OverflowWatch | None = None
    compiled: CompiledCall | None = None
    stages: Stages = field(default_factory=Stages)
    token_drop: TokenDrop | None = None
    moved_to_fp32: list[str] = field(default_factory=list)
    """Modules that AMP.AUTO_FP32 moved, beside those the settings name."""
    skips: SkipRecord = field(default_factory=SkipRecord)

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.model)

    def start_computing(self) -> None:
        """Once the weights are in place, and again when modules were forced to fp32: copy them if copies compute."""
        if self.sharding is not None:  # computes in half precision, where asked to, by itself; and nothing is replayed
            return
        if self.precision.computes_in_copy:
            keeps_norms = self.precision.level == "O2"
            self.half_copy = HalfCopy(self.model, self.precision.choice.dtype, keeps_norms, forced(self.model))
            self.forward = self.half_copy.model
        if self.precision.scaler.is_enabled():
            computing = self.half_copy.model if self.half_copy else self.model
            self.watch = OverflowWatch(
                computing,
                self.inputs,
                self.criterion,
                self.precision.autocast,
                self.seed,
                self.precision.device,
                self.skips,
                change=self.change,
            )
        if self.compiled is not None:
            self.compiled.start()

    def start_epoch(self, epoch: int) -> None:
        """What changes from one epoch to the next in the model itself."""
        if self.token_drop is not None:
            self.token_drop.set(epoch, self.model, self.forward)

    def compute(self, batch: Batch) -> Computed:
        """A micro-batch's way forward: by what was compiled of it, or as it is written."""
        return self.as_written(batch) if self.compiled is None else self.compiled(batch)

    def as_written(self, batch: Batch) -> Computed:
        with self.precision.autocast():
            images, targets, labels = self.change(self.inputs(batch.images), batch.labels)
            logits = self.forward(images)
            return Computed(self.criterion(logits.float(), targets), logits.detach(), labels)

    def force_fp32(self, modules: list[str]) -> None:
        """Let these modules compute in fp32 from now on."""
        self.moved_to_fp32 += force_fp32(self.model, modules, self.precision.device.type)
        if self.ema is not None:
            force_fp32(self.ema.module, modules, self.precision.device.type)
        self.skips = SkipRecord(blamed=self.skips.blamed)  # what overflows next is as interesting as the first was
        self.start_computing()


def train_update(parts: Parts, window: Window, update: int) -> None:
    """Move the weights once, by the micro-batches of `window`. `update` counts from 1 through the run."""
    precision, optimizer, half_copy, watch = parts.precision, parts.optimizer, parts.half_copy, parts.watch
    lap = parts.stages.lap
    parts.stages.begin()
    kept = accumulate(parts, window, update)
    if half_copy is not None:
        half_copy.sum_gradients(parts.world)
    if watch is not None:
        watch.keep(update, kept, precision.scale_tensor())
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
        watch.after(update, moved)


def accumulate(parts: Parts, window: Window, update: int) -> MicroBatches | None:
    """The gradients of all micro-batches of `window`. Gives them back where the watch keeps them."""
    precision, half_copy, lap = parts.precision, parts.half_copy, parts.stages.lap
    kept: MicroBatches | None = []
    for nth, (share, batch) in enumerate(window, start=1):
        lap(COPY)
        # Erasing, mixing, dropout and stochastic depth depend on where a micro-batch stands in the run, not on who
        # computes it.
        seed_all(parts.seed, "micro", update, share.number)
        with _gradients_meet(parts.forward, last=nth == len(window)):
            loss, logits, labels = parts.compute(batch)
            lap(FORWARD)
            precision.backward(loss * share.weight)
        if half_copy is not None:
            half_copy.collect_gradients()
        lap(BACKWARD)
        if parts.watch is not None:
            kept = parts.watch.collect(kept, share, batch)
        parts.meters.add(loss.detach(), logits, labels, share.weight)
        lap(OTHER)
    return kept


def _gradients_meet(forward: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Ranks exchange gradients once an update, in the last micro-batch's backward pass."""
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    meet_now(forward, last)
    return nullcontext()
