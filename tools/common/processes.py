"""A training to measure, built of the engine's parts, in one or several processes of its own.

With one process per measurement, the peak memory is its own, and no setting of torch is left over from another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from datasets import Window
from engine.amp.op_lists import OpLists
from engine.compile.compiling import Compiling
from engine.machine.context import Run
from engine.machine.device import pick_device, set_up_device
from engine.machine.environment import join_run
from engine.machine.memory import is_out_of_memory
from engine.setup import ReadyToTrain, build_for_training, sharding_of, training_data
from utils.config import Config
from utils.distributed.group import leave
from utils.distributed.world import ALONE, World, on_every_rank
from utils.parent import die_with_parent

PRELOADED = ["torch", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler", "pydantic"]
"""Imported once by the fork server, for all measuring processes."""
MOST_WARMUP = 10
KILLED = "its process was killed, probably by the out-of-memory killer"
OUT_OF_MEMORY = "out of memory"


@dataclass
class Training:
    """A training before its first update."""

    ready: ReadyToTrain
    device: torch.device

    def take_samples_of(self, config: Config) -> None:
        """Replace the data: samples in the order and with the augmentation of other settings."""
        self.ready.train_loader.close()
        self.ready.train_loader = training_data(config, ALONE, self.device)[1]

    def windows(self) -> Iterator[Window]:
        """The windows of updates, epoch after epoch, without end."""
        for epoch in itertools.count(1):
            yield from self.ready.train_loader.epoch(epoch)


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak memory from here on. On a CPU it is the peak of the process and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def opened(config: Config, world: World = ALONE, compiled: bool = True) -> Iterator[Training]:
    """Build everything that a run builds before its first update; close it afterwards.

    `compiled`: compile as TRAIN.COMPILE says. False: stay eager, and only record what a run would compile.
    """
    device = pick_device(config.DEVICE, world)
    threads = set_up_device(config, device, world)
    training: Training | None = None
    try:
        join_run(config, world, device, threads)
        with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
            sharding = sharding_of(config, world, device)
            run = Run(config, world, device, threads)
            ready = on_every_rank(world, lambda: build_for_training(run, None, sharding))
            training = Training(ready, device)
            if not compiled:
                ready.parts.leave_out(Compiling)
            ready.parts.assemble()
            yield training
    finally:
        if training is not None:
            training.ready.train_loader.close()
        leave(world)


def warmup_updates(updates: int) -> int:
    """Number of updates before the measured ones."""
    return max(1, min(MOST_WARMUP, updates // 5))


def reason(error: BaseException) -> str:
    """Why a measurement failed, in one line."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return str(error).strip().partition("\n")[0] or type(error).__name__


def own_processes(count: int = 1) -> ProcessPoolExecutor:
    """A pool of fresh processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    start_method = multiprocessing.get_start_method()
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin_process, initargs=(start_method,))


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
