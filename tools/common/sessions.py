"""Live sessions: a training or a loop that is built once in a process of its own, and measured turn by turn.

In a process of its own, the peak memory is that of one contender, and no setting of torch is left over from another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from datasets import Window
from engine.amp.op_lists import OpLists
from engine.machine.device import Run, pick_device, set_up_device, synchronize
from engine.machine.memory import is_out_of_memory, peak_memory_gb
from engine.memory.global_batch import with_global_batch
from engine.setup import ReadyToTrain, build_for_training
from engine.update import train_update
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError, first_line
from utils.log import start_log
from utils.program import die_with_parent

Metrics = dict[str, Any]
"""Metrics of one turn of one contender, as plain values; {'failed': reason} if it could not be measured."""
PRELOADED = ["torch", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler", "pydantic"]
"""Imported once by the fork server, for all measuring processes."""
MOST_WARMUP = 10
KILLED = "its process was killed, probably by the out-of-memory killer"
OUT_OF_MEMORY = "out of memory"


class Session:
    """What a measuring process keeps between turns: past its warm-up, so that compiling is behind it."""

    started: Metrics = {}  # noqa: RUF012 - replaced, never changed
    """What building it and warming up has shown."""

    def turn(self) -> Metrics:
        raise NotImplementedError


class Worker:
    """A process with a session, which `build` makes there.

    If the device has no memory for it `beside` the other workers, each of them ends its process before the next one's
    turn. Without `keep`, the process ends after each turn.
    """

    def __init__(self, build: Callable[[], Session], beside: list[Worker], keep: bool = True) -> None:
        """`beside`: all workers of the table; this one adds itself."""
        self._build, self._beside, self._keep = build, beside, keep
        self._pool: ProcessPoolExecutor | None = None
        beside.append(self)

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    def turn(self) -> Metrics:
        metrics = self._try()
        others = [other for other in self._beside if other is not self and other.is_running]
        if metrics.get("failed") in (OUT_OF_MEMORY, KILLED) and others:
            for worker in [self, *others]:
                worker.close()
            metrics = self._try()
        if not self._keep:
            self.close()
        return metrics

    def _try(self) -> Metrics:
        started = {} if self.is_running else self.start()
        return started if "failed" in started else self._ask(_turn)

    def start(self) -> Metrics:
        """Build the session in a new process; return what that has shown."""
        self._pool = own_process()
        return self._ask(_start, self._build)

    def _ask(self, work: Callable[..., Metrics], *arguments: Any) -> Metrics:
        assert self._pool is not None
        try:
            return self._pool.submit(attempt, work, *arguments).result()
        except BrokenProcessPool:
            return {"failed": KILLED}

    def close(self) -> None:
        """End the process, and with it what the session started, such as loading processes."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def own_process() -> ProcessPoolExecutor:
    """A pool of one fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    start_method = multiprocessing.get_start_method()
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin_process, initargs=(start_method,))


def _begin_process(start_method: str) -> None:
    """Let the parent end this process, also after Ctrl-C, and never outlive it.

    `start_method`: the one with which a run starts its loading processes. With that of this pool, each would import
    torch.
    """
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence_torchao()
    die_with_parent()


def silence_torchao() -> None:
    """Hide a warning that importing torchao triggers in torch; users cannot do anything about it."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def attempt(work: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Run `work` in a measuring process. What torch cannot run, or what does not fit in memory, is a result too."""
    start_log(to_terminal=False)
    try:
        return work(*arguments)
    except (MemoryError, RuntimeError, UserError, TrainingError) as error:
        return {"failed": reason(error)}


def reason(error: BaseException) -> str:
    """Why a measurement failed, in one line."""
    return OUT_OF_MEMORY if is_out_of_memory(error) else first_line(error)


_session = Session()
"""Of this process, if it is a worker's."""


def _start(build: Callable[[], Session]) -> Metrics:
    global _session
    _session = build()
    return _session.started


def _turn() -> Metrics:
    return _session.turn()


def warmup_updates(updates: int) -> int:
    """Number of updates before the measured ones."""
    return max(1, min(MOST_WARMUP, updates // 5))


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak memory from here on. On a CPU it is the peak of the process and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def opened(config: Config, compiled: bool = True) -> Iterator[tuple[ReadyToTrain, Iterator[Window]]]:
    """Build everything that a run builds before its first update; close it afterwards.

    With it come the windows of its updates, epoch after epoch, without end. `compiled`: compile as TRAIN.COMPILE says.
    False: stay eager. `auto` compiles nothing: it might compile one precision and not another.
    """
    train = config.TRAIN
    if train.COMPILE == "auto" or not compiled:
        config = config.changed(TRAIN={"COMPILE": "none"})
    if train.GLOBAL_BATCH is not None:
        config = with_global_batch(config, train.GLOBAL_BATCH, ALONE)
    device = pick_device(config.DEVICE, ALONE)
    threads = set_up_device(config, device, ALONE)
    with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
        run = Run(config, ALONE, device, threads)
        ready = build_for_training(run, None, dry=True)  # of updates, not of a pass for features before them
        try:
            ready.parts.assemble()
            yield ready, _windows(ready)
        finally:
            ready.train_loader.close()


def _windows(ready: ReadyToTrain) -> Iterator[Window]:
    per_epoch = ready.train_loader.order.updates
    for done, window in enumerate(ready.train_loader.epochs(itertools.count(1))):
        if done % per_epoch == 0:
            ready.parts.enter(done // per_epoch + 1)
        yield window


class TrainingSession(Session):
    """A run's own training, without validation, reports and checkpoints, in turns of `updates`."""

    def __init__(self, config: Config, updates: int) -> None:
        self._updates, self._opened = updates, contextlib.ExitStack()
        self.ready, windows = self._opened.enter_context(opened(config))
        self._device, self._windows = self.ready.precision.device, enumerate(windows, 1)
        self._train(warmup_updates(updates))
        reset_peak_memory(self._device)

    def _train(self, updates: int) -> int:
        """Train so many updates and return the number of images."""
        images = 0
        for number, window in itertools.islice(self._windows, updates):
            train_update(self.ready.parts, window, number)
            images += sum(len(share.indices) for share in window.shares)
        synchronize(self._device)
        return images

    def turn(self) -> Metrics:
        loader = self.ready.train_loader
        loader.take_wait()
        began = time.perf_counter()
        images = self._train(self._updates)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "iterations_per_second": self._updates / seconds,
            "images_per_second": images / seconds,
            "data_wait_percent": 100 * min(loader.take_wait() / seconds, 1.0),
            "peak_memory_gb": peak_memory_gb(self._device),
            "precision": self.ready.precision.name,
            "choices": self.ready.choices,
        }
