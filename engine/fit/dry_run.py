"""Dry run (-dry_run): a few real updates, and an estimate of the memory, time and disk space that a run would take.

Everything is built as for a run, and nothing is written. Updates run eager; compiling is reported but not done.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from datasets import Batch, Window
from engine.checkpoint.state import state_of, tensors_of
from engine.compile.choice import NONE
from engine.compile.compiling import Compiling
from engine.compile.gain import SECONDS_TO_COMPILE
from engine.evaluate import on_device
from engine.fit.dry_run_report import Costs, Memory, Speed, cost_lines
from engine.fit.out_of_memory import describe
from engine.machine.context import Run
from engine.machine.device import synchronize
from engine.machine.memory import LiveMemory, is_out_of_memory, peak_memory_gb, total_memory
from engine.measure.bottleneck import advise_faster_loading
from engine.parallel.shards import local_shard
from engine.setup import ReadyToTrain, setting_of
from models import base_weights
from utils.distributed.world import World, all_gather, broadcast, on_every_rank
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.record.resumed_run import target_folder
from utils.text import counted

SECONDS_OF_UPDATES, SECONDS_OF_LOADING, SECONDS_OF_VALIDATION = 8.0, 4.0, 3.0
MOST_UPDATES, MOST_BATCHES = 20, 200
UNLIMITED = 2**62


def try_out(run: Run, ready: ReadyToTrain, updates_left: int) -> None:
    """Make a few updates and report what a run would cost. A collective call."""
    config, world = run.config, run.world
    ready.parts.leave_out(Compiling)
    ready.parts.assemble()
    if ready.parts.enter(config.MODEL.UNFREEZE_EPOCH or ready.position.epoch):
        log.info(
            "The dry run trains the frozen weights too; epochs before MODEL.UNFREEZE_EPOCH need less memory and time."
        )
    try:
        windows = _windows(ready)
        window, batch = on_every_rank(world, lambda: _first(windows))
        memory, updates = _time_updates(ready, world, window, batch)
        _log_first_batch(ready, batch)
        faster = advise_faster_loading(setting_of(ready))
        speed = Speed(updates, *_time_loading(ready, world, windows), faster, _time_validation(ready, world))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = describe(error, run, ready.parts, ready.position.update + 1)
        raise (UserError if world.size == 1 else TrainingError)(text) from None
    whole = total_memory(ready.precision.device)
    saved = tensors_of(ready.parts), state_of(ready.parts, ready.position, ready.best, 0, {})
    place = _nearest_folder(Path(target_folder(config) or config.SAVE))
    base, per_epoch = bytes_in(base_weights(ready.model)), ready.train_loader.order.updates
    costs = Costs(memory, whole, speed, bytes_in(saved), place, updates_left, per_epoch, base)
    for line in cost_lines(config, costs, world, ready.precision.device):
        log.info("  %s", line)
    if (how := ready.choices["compile"]) != NONE:
        log.info(
            "  compile    %s: not done in a dry run. A run compiles for about %.0f s at first, on a CPU for minutes; "
            "its updates then take less time.",
            how,
            SECONDS_TO_COMPILE,
        )
    log.info("Dry run: updates, validation and data loading work. Nothing was kept or written.")


def _windows(ready: ReadyToTrain) -> Iterator[Window]:
    """Windows that the run would train on, epoch after epoch."""
    begin, step = ready.position.epoch, ready.position.step
    if 0 < step == ready.train_loader.order.updates - 1:  # the last window of an epoch may be short
        begin, step = begin + 1, 0
    for epoch in itertools.count(begin):
        ready.parts.enter(epoch)
        yield from ready.train_loader.epoch(epoch, step if epoch == begin else 0)


def _first(windows: Iterator[Window]) -> tuple[Window, Batch]:
    try:
        window = next(windows)
        _, batch = next(iter(window))
    except TrainingError as error:
        raise UserError(str(error)) from None
    return window, batch


def _time_updates(ready: ReadyToTrain, world: World, window: Window, batch: Batch) -> tuple[Memory, list[float]]:
    """Repeat updates with one batch. Returns their memory, and the seconds of each after the first two."""
    from engine.update import train_update

    def repeat(number: int) -> float:
        began = time.perf_counter()
        train_update(ready.parts, Window(window.shares, itertools.repeat(batch)), ready.position.update + number)
        synchronize(ready.precision.device)
        return time.perf_counter() - began

    repeat(1)  # sets things up, for example the optimiser's state
    memory = _measure_memory(ready, lambda: repeat(2))
    seconds, end = [repeat(3)], time.perf_counter() + SECONDS_OF_UPDATES
    while broadcast(len(seconds) < MOST_UPDATES and time.perf_counter() + seconds[-1] < end, world):
        seconds.append(repeat(3 + len(seconds)))
    return memory, seconds


def _measure_memory(ready: ReadyToTrain, update: Callable[[], object]) -> Memory:
    parts, device = ready.parts, ready.precision.device
    held = {"weights": list(parts.model.state_dict().values())}
    held |= {"gradients": [p for p in parts.model.parameters() if p.requires_grad]}
    held |= {"optimiser": tensors_in(parts.optimizer.state)}
    for ability in parts.abilities:
        for name, tensors in ability.holds().items():
            held[name] = [*held.get(name, []), *tensors]
    standing = [tensor for name, tensors in held.items() for tensor in tensors if name != "gradients"]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        update()
        peak = torch.cuda.max_memory_allocated(device)
    elif parts.sharding is None:
        with LiveMemory(device, UNLIMITED) as live:
            for tensor in standing:
                tensor.detach()  # makes LiveMemory count the tensor
            update()
        peak = live.take_peak()
    else:
        update()
        peak = round(1e9 * peak_memory_gb(device))
    here = {name: [t for t in tensors if t.device.type == device.type] for name, tensors in held.items()}
    return Memory(peak, {name: bytes_in(tensors) for name, tensors in here.items()})


def _log_first_batch(ready: ReadyToTrain, batch: Batch) -> None:
    parts = ready.parts
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    loss = reading.epoch.loss
    log.info(
        "First batch: %s, loss %.4f (mean over all updates tried on it, each with %s), last gradient norm %.4f",
        tuple(batch.images.shape),
        loss,
        counted(ready.train_loader.order.samples_of(0), "image"),
        reading.grad_norm,
    )
    if not math.isfinite(loss) or reading.first_bad >= 0:
        log.warning(
            "The loss or its gradient is NaN or infinite in these updates; see docs/troubleshooting.md for remedies."
        )


def _time_loading(ready: ReadyToTrain, world: World, windows: Iterator[Window]) -> tuple[float, bool]:
    """Seconds to load the batches of an update, on the slowest rank; and whether the data set is in memory."""
    ahead = 0
    while ahead < 2 * ready.train_loader.workers:  # skip what was loaded ahead
        window = next(windows)
        window.finish()
        ahead += len(window)
    began, count = time.perf_counter(), 0
    while count < MOST_BATCHES and (count == 0 or time.perf_counter() - began < SECONDS_OF_LOADING):
        next(windows).finish()
        count += 1
    return max(all_gather([(time.perf_counter() - began) / count], world)), ready.train_set.in_memory


@torch.no_grad()
def _time_validation(ready: ReadyToTrain, world: World) -> float:
    """Seconds that a validation of the model and its EMA takes, estimated from its first batches."""
    parts, passed, count = ready.parts, 0.0, 0
    models = [on_device(model, ready.precision.device) for model in parts.weights.values()]
    for batch in ready.val_loader:
        began = time.perf_counter()
        for model in models:
            model.eval()
            with ready.precision.autocast(training=False):
                model(ready.inputs(batch.images))
        synchronize(ready.precision.device)
        passed, count = passed + time.perf_counter() - began, count + 1
        if broadcast(passed > SECONDS_OF_VALIDATION, world):
            break
    return passed / max(count, 1) * len(ready.val_loader)


def tensors_in(tree: object) -> list[Tensor]:
    """This rank's part of each tensor in `tree`."""
    return [local_shard(leaf.detach()) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_in(tree: object) -> int:
    """Size of this rank's part of all tensors in `tree`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or else its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
