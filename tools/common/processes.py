"""A training to measure, made of the engine's own parts, in a process of its own or in several.

A process a measurement: its peak memory is its own, and no switch of torch's is left over from another.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from datasets import Window
from engine.amp.op_lists import OpLists
from engine.compile.choice import choose_compiling
from engine.compile.compiled import compile_update
from engine.machine.device import pick_device, prepare, wait_for
from engine.machine.environment import enter
from engine.parallel.fsdp import sharding_of
from engine.setup import ReadyToTrain, build_for_training, training_data
from engine.wrapping import wrap
from utils.config import Config
from utils.distributed.group import leave
from utils.distributed.world import ALONE, World, on_every_rank

PR_SET_PDEATHSIG = 1
PRELOADED = ["torch", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler", "pydantic"]
"""Imported once for all measuring processes."""
MOST_WARMUP = 10
NO_ROOM = "its process was ended from outside, most likely for want of memory"


@dataclass
class Training:
    """Ready for its first update."""

    ready: ReadyToTrain
    device: torch.device

    def take_samples_of(self, config: Config) -> None:
        """Take samples, in the order and with the augmentation that these settings give them."""
        self.ready.train_loader.close()
        self.ready.train_loader = training_data(config, ALONE, self.device)[1]

    def windows(self) -> Iterator[Window]:
        """What updates are made of, epoch after epoch, without end."""
        return _endless(self.ready)

    def wait_for_device(self) -> None:
        wait_for(self.device)

    def forget_peak(self) -> None:
        """Let the peak of memory be that of what follows; a CPU's is the process's, and stays."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def _endless(ready: ReadyToTrain) -> Iterator[Window]:
    for epoch in itertools.count(1):
        yield from ready.train_loader.epoch(epoch)


@contextlib.contextmanager
def opened(config: Config, world: World = ALONE, compiled: bool = True) -> Iterator[Training]:
    """Everything that a run builds before its first update.

    `compiled`: as TRAIN.COMPILE says for a run as long as the settings make it; False: eager, and what the run would
    compile is only noted.
    """
    device = pick_device(config.DEVICE, world)
    threads = prepare(config, device, world)
    enter(config, world, device, threads)
    training: Training | None = None
    try:
        with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
            sharding = sharding_of(config, world, device)
            ready = on_every_rank(world, lambda: build_for_training(config, world, device, None, sharding))
            training = Training(ready, device)
            wrap(ready.parts, config)
            updates = config.TRAIN.NUM_EPOCHS * ready.train_loader.order.updates
            compiling = choose_compiling(config, ready.parts, world, updates, {})
            ready.choices |= compiling.as_noted()
            if compiled:
                compile_update(ready.parts, compiling, config)
            yield training
    finally:
        if training is not None:
            training.ready.train_loader.close()
        leave(world)


def warmup_updates(updates: int) -> int:
    """How many come before the first that is measured."""
    return max(1, min(MOST_WARMUP, updates // 5))


def own_processes(count: int = 1) -> ProcessPoolExecutor:
    """Processes that nothing else was done in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    usual = (multiprocessing.get_start_method(),)
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin_process, initargs=usual)


def _begin_process(start_method: str) -> None:
    """The process that measures ends this one, also after Ctrl-C; this one does not outlive it.

    `start_method`: how a run starts its loading processes. From here, they would each import torch.
    """
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quieten()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def quieten() -> None:
    """torchao's import makes torch warn of what only its authors can change."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
