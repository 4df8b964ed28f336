"""-dry_run: a few real updates that nobody keeps, and what a run would take of memory, time and disk.

Everything is built as for a run, and nothing is written. Updates are made as they stand in the code: compiling is told
of and not done.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from datasets import Batch, Window
from engine.checkpoint.state import state_of, tensors_of
from engine.compile.choice import NONE
from engine.compile.gain import SECONDS_TO_COMPILE
from engine.distill.targets import teacher_of
from engine.fit.dry_run_report import Costs, Memory, Speed, told
from engine.fit.out_of_memory import describe
from engine.machine.device import wait_for
from engine.machine.memory import LiveMemory, is_out_of_memory, peak_memory_gb, total_memory
from engine.measure.bottleneck import load_faster
from engine.optim.ema import on_its_device
from engine.parallel.fsdp import own_part
from engine.setup import ReadyToTrain, global_batch, setting_of
from utils.config import Config
from utils.distributed.world import World, all_gather, broadcast, on_every_rank
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.resumed_run import target_folder

SECONDS_OF_UPDATES, SECONDS_OF_LOADING, SECONDS_OF_VALIDATION = 8.0, 4.0, 3.0
MOST_UPDATES, MOST_BATCHES = 20, 200
UNLIMITED = 2**62


def try_out(config: Config, ready: ReadyToTrain, world: World, updates_left: int) -> None:
    """Make the updates and tell what they show. A collective call."""
    try:
        windows = _windows(ready)
        window, batch = on_every_rank(world, lambda: _first(windows))
        memory, updates = _updates(ready, world, window, batch)
        _tell_first(config, ready, batch)
        faster = load_faster(setting_of(ready))
        speed = Speed(updates, *_loading(ready, world, windows), faster, _validation(ready, world))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = describe(error, config, ready.parts, ready.position.update + 1)
        raise (UserError if world.size == 1 else TrainingError)(text) from None
    whole = total_memory(ready.precision.device)
    saved = tensors_of(ready.parts), state_of(ready.parts, ready.position, ready.best, 0, {})
    place = _nearest_folder(Path(target_folder(config) or config.SAVE))
    costs = Costs(memory, whole, speed, bytes_in(saved), place, updates_left, ready.train_loader.order.updates)
    for line in told(config, costs, world, ready.precision.device):
        log.info("  %s", line)
    if (how := ready.choices["compile"]) != NONE:
        log.info(
            "  compile    %s: not done here. In a run, about %.0f s at first, and shorter updates.",
            how,
            SECONDS_TO_COMPILE,
        )
    log.info("Dry run: updates, validation and data work; nothing was kept of them, nothing written.")


def _windows(ready: ReadyToTrain) -> Iterator[Window]:
    """Those that would come, epoch after epoch."""
    begin, step = ready.position.epoch, ready.position.step
    if 0 < step == ready.train_loader.order.updates - 1:  # an epoch's last one may be short: no measure for the others
        begin, step = begin + 1, 0
    for epoch in itertools.count(begin):
        ready.parts.start_epoch(epoch)
        yield from ready.train_loader.epoch(epoch, step if epoch == begin else 0)


def _first(windows: Iterator[Window]) -> tuple[Window, Batch]:
    try:
        window = next(windows)
        _, batch = next(iter(window))
    except TrainingError as error:
        raise UserError(str(error)) from None
    return window, batch


def _updates(ready: ReadyToTrain, world: World, window: Window, batch: Batch) -> tuple[Memory, list[float]]:
    """Updates with that batch again and again: what they take of memory, and seconds of each after the first two."""
    from engine.update import train_update

    def again(number: int) -> float:
        began = time.perf_counter()
        train_update(ready.parts, Window(window.shares, itertools.repeat(batch)), ready.position.update + number)
        wait_for(ready.precision.device)
        return time.perf_counter() - began

    again(1)  # sets things up, the optimiser's state among them
    memory = _memory_of(ready, lambda: again(2))
    seconds, end = [again(3)], time.perf_counter() + SECONDS_OF_UPDATES
    while broadcast(len(seconds) < MOST_UPDATES and time.perf_counter() + seconds[-1] < end, world):
        seconds.append(again(3 + len(seconds)))
    return memory, seconds


def _memory_of(ready: ReadyToTrain, update: Callable[[], object]) -> Memory:
    parts, device = ready.parts, ready.precision.device
    average = [] if parts.ema is None else list(parts.ema.module.state_dict().values())
    copies = [] if parts.half_copy is None else list(parts.half_copy.model.parameters())
    teacher = teacher_of(parts.change)
    taught = {} if teacher is None else dict(teacher.model.state_dict())
    own = parts.model.state_dict().values()
    standing = [*own, *copies, *average, *taught.values(), *tensors_in(parts.optimizer.state)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        update()
        peak = torch.cuda.max_memory_allocated(device)
    elif parts.sharding is None:
        with LiveMemory(device, UNLIMITED) as live:
            for tensor in standing:
                tensor.detach()  # seen by it, and so counted
            update()
        peak = live.take_peak()
    else:
        update()
        peak = round(1e9 * peak_memory_gb(device))
    moved = [p for p in parts.model.parameters() if p.requires_grad]
    return Memory(
        peak,
        weights=bytes_in([dict(parts.model.state_dict()), copies]),
        gradients=bytes_in(moved),
        optimiser=bytes_in(parts.optimizer.state),
        average=bytes_in([t for t in average if t.device.type == device.type]),
        teacher=bytes_in(taught),
    )


def _tell_first(config: Config, ready: ReadyToTrain, batch: Batch) -> None:
    parts = ready.parts
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    loss = reading.epoch.loss
    log.info(
        "First batch: %s, loss %.4f on average over these updates of %d images, gradient norm %.4f at last",
        tuple(batch.images.shape),
        loss,
        global_batch(config, parts.world),
        reading.grad_norm,
    )
    if not math.isfinite(loss) or reading.first_bad >= 0:
        log.warning(
            "The loss or its gradient is not a number in these updates; docs/troubleshooting.md has what to try."
        )


def _loading(ready: ReadyToTrain, world: World, windows: Iterator[Window]) -> tuple[float, bool]:
    """Seconds in which the batches of an update come where nobody computes, on the slowest rank; whether many came."""
    ahead = 0
    while ahead < 2 * ready.train_loader.workers:  # what had been loaded already
        window = next(windows)
        window.finish()
        ahead += len(window)
    began, count = time.perf_counter(), 0
    while count < MOST_BATCHES and (count == 0 or time.perf_counter() - began < SECONDS_OF_LOADING):
        next(windows).finish()
        count += 1
    return max(all_gather([(time.perf_counter() - began) / count], world)), ready.train_set.in_memory


@torch.no_grad()
def _validation(ready: ReadyToTrain, world: World) -> float:
    """Seconds of a validation, from its first batches; of the model and, where there is one, of its average."""
    parts, passed, count = ready.parts, 0.0, 0
    models = [parts.model, *([] if parts.ema is None else [on_its_device(parts.ema.module, ready.precision.device)])]
    for batch in ready.val_loader:
        began = time.perf_counter()
        for model in models:
            model.eval()
            with ready.precision.autocast(training=False):
                model(ready.inputs(batch.images))
        wait_for(ready.precision.device)
        passed, count = passed + time.perf_counter() - began, count + 1
        if broadcast(passed > SECONDS_OF_VALIDATION, world):
            break
    return passed / max(count, 1) * len(ready.val_loader)


def tensors_in(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield own_part(tree.detach())
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)


def bytes_in(tree: object) -> int:
    """Of this rank's part of all tensors in `tree`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def _nearest_folder(path: Path) -> Path:
    """The folder, or the one above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())
