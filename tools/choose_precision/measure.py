"""Measure one precision on the user's data: loss curve, speed, memory, skipped updates. Runs in its own process."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datasets import TrainLoader, Window
from engine.amp.skip_watch import OverflowWatch
from engine.machine.device import synchronize
from engine.machine.memory import peak_memory_gb
from engine.measure.meters import NEVER
from engine.setup import ReadyToTrain
from engine.update import train_update
from tools.choose_precision.layers import Layer, examine_layers
from tools.common.processes import opened, reason, reset_peak_memory, warmup_updates
from utils.config import Config
from utils.log import log, start_log

WINDOWS = 20
"""Speed is the median over about this many windows of updates, so that a hiccup of the machine does not count."""


@dataclass(frozen=True)
class Job:
    name: str
    config: Config
    updates: int
    deadline: float
    """In time.monotonic(), which all processes of a machine share."""
    samples_seed: int | None = None
    """Seed of the samples and their augmentation; None for that of `config`."""
    layers: bool = False
    """Whether to examine every layer's gradients at the end."""


@dataclass
class Measured:
    losses: list[float] = field(default_factory=list)
    """One per update: the mean over its micro-batches."""
    images_per_second: float = 0.0
    data_wait_percent: float = 0.0
    peak_memory_gb: float = 0.0
    skipped: int = 0
    scale: float = 1.0
    learning_rate: float = 0.0
    """At the last update."""
    epochs: float = 0.0
    bad_update: int | None = None
    """First update with NaN or infinite gradients, in precisions that do not skip such updates."""
    compile: str = "none"
    """What a run would compile; the measured updates are eager."""
    seconds: float = 0.0
    out_of_time: bool = False
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    """Why nothing was measured."""


def measure(job: Job) -> Measured:
    """Train the job. A precision that torch cannot run, or that does not fit in memory, is a result too."""
    started = time.monotonic()
    start_log(to_terminal=False)
    notes = _Notes()
    log.addHandler(notes)
    result = Measured()
    try:
        _measure(job, result)
    except (MemoryError, RuntimeError) as error:
        result.failed = reason(error)
    result.notes += notes.texts
    result.seconds = time.monotonic() - started
    return result


class _Notes(logging.Handler):
    """Collects warnings for the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _measure(job: Job, result: Measured) -> None:
    config = job.config
    with opened(config, compiled=False) as training:  # eager modules can be hooked, with the same numerics
        ready, device = training.ready, training.device
        result.compile = ready.choices["compile"]
        if job.samples_seed is not None:
            training.take_samples_of(config.model_copy(update={"SEED": job.samples_seed}))
        windows = training.windows()
        _train(job, ready, windows, device, result)
        if job.layers and result.bad_update is None:
            result.layers = examine_layers(config, ready, next(iter(next(windows))), result.scale)


def _train(job: Job, ready: ReadyToTrain, windows: Iterator[Window], device: torch.device, result: Measured) -> None:
    parts, curve = ready.parts, _LossCurve(ready)
    timer = _Timer(job.updates, ready.train_loader, device)
    for update in range(1, job.updates + 1):
        window = next(windows)
        train_update(parts, window, update)
        curve.close_update(window)
        timer.count(update, sum(len(share.indices) for share in window.shares))
        if watch := parts.ability(OverflowWatch):
            result.notes += [blame.words() for blame in watch.take()]
        if time.monotonic() > job.deadline and update > timer.warmup and update < job.updates:
            result.out_of_time = True
            break
    timer.end()
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    result.losses = curve.values()
    result.epochs = len(result.losses) / ready.train_loader.order.updates
    result.images_per_second = timer.images_per_second()
    result.data_wait_percent = timer.data_wait_percent()
    result.peak_memory_gb = peak_memory_gb(device)
    result.skipped, result.scale, result.learning_rate = reading.skipped, reading.scale, reading.lr
    result.bad_update = None if reading.first_bad == NEVER else reading.first_bad


class _LossCurve:
    """Loss of every update, kept on the device until the end, because reading it earlier would slow training down."""

    def __init__(self, ready: ReadyToTrain) -> None:
        self._criterion = ready.parts.criterion
        self._micro_batches: list[Tensor] = []
        self._updates: list[Tensor] = []
        ready.parts.criterion = self._recorded

    def _recorded(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._criterion(logits, labels)
        self._micro_batches.append(loss.detach())
        return loss

    def close_update(self, window: Window) -> None:
        losses = zip(self._micro_batches, window.shares, strict=True)
        self._updates.append(torch.stack([loss * share.weight for loss, share in losses]).sum())
        self._micro_batches.clear()

    def values(self) -> list[float]:
        return torch.stack(self._updates).tolist()


class _Timer:
    """Speed over windows of updates, after a warm-up. The device is synchronised only at the end of a window."""

    def __init__(self, updates: int, loader: TrainLoader, device: torch.device) -> None:
        self.warmup = warmup_updates(updates)
        self._length = max(1, (updates - self.warmup) // WINDOWS)
        self._loader, self._device = loader, device
        self._images = self._updates = 0
        self._began = self._last = time.perf_counter()
        self._waited = 0.0
        self._speeds: list[float] = []

    def count(self, update: int, images: int) -> None:
        if update <= self.warmup:
            if update == self.warmup:
                self._start()
            return
        self._images += images
        self._updates += 1
        if self._updates == self._length:
            self._close()

    def _start(self) -> None:
        synchronize(self._device)
        reset_peak_memory(self._device)
        self._loader.take_wait()
        self._began = self._last = time.perf_counter()

    def _close(self) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        self._speeds.append(self._images / (now - self._last))
        self._last, self._images, self._updates = now, 0, 0

    def end(self) -> None:
        if self._updates and not self._speeds:  # the time ran out in the first window
            self._close()
        synchronize(self._device)
        self._waited = self._loader.take_wait() / max(time.perf_counter() - self._began, 1e-9)

    def images_per_second(self) -> float:
        return statistics.median(self._speeds)

    def data_wait_percent(self) -> float:
        return 100 * min(self._waited, 1.0)
