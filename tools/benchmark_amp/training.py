"""Turns of a contender: updates of a training in a process of its own, or in several that train together."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from datasets import Window
from engine.machine.device import synchronize
from engine.machine.memory import peak_memory_gb
from engine.update import train_update
from tools.benchmark_amp.results import Metrics
from tools.benchmark_amp.worker import Session, Worker, attempt
from tools.common.processes import KILLED, OUT_OF_MEMORY, opened, own_processes, reset_peak_memory, warmup_updates
from utils.config import Config
from utils.distributed.world import ALONE, BY_HAND, World
from utils.errors import UserError


@dataclass(frozen=True)
class Job:
    """A training to measure."""

    config: Config
    updates: int
    """Per turn; updates to warm up come before."""
    exchange: bool = True
    """Whether processes all-reduce gradients; without it, only the other work of an update is measured."""


def one_turn(job: Job, processes: int = 1) -> Metrics:
    """Train one turn in new processes and return the metrics of the first."""
    try:
        with own_processes(processes) as pool:
            address = ("127.0.0.1", free_port())
            worlds = [World(rank, processes, rank, processes, BY_HAND, address) for rank in range(processes)]
            answers = [pool.submit(attempt, _turn, job, world if processes > 1 else ALONE) for world in worlds]
            return answers[0].result()
    except BrokenProcessPool:
        return {"failed": KILLED}


def _turn(job: Job, world: World) -> Metrics:
    with contextlib.closing(TrainingSession(job, world)) as session:
        return session.turn()


class AlternatingTraining:
    """A training that keeps its process between turns, so that it is built and warmed up once.

    If the device has no memory for it beside the others, each of them ends its process before the next one's turn.
    """

    def __init__(self, job: Job, beside: list[AlternatingTraining]) -> None:
        """`beside`: all trainings of the table; this one adds itself."""
        self._worker = Worker(partial(TrainingSession, job))
        self._beside = beside
        beside.append(self)

    @property
    def is_running(self) -> bool:
        return self._worker.is_running

    def turn(self) -> Metrics:
        metrics = self._try()
        others = [other for other in self._beside if other is not self and other.is_running]
        if metrics.get("failed") not in (OUT_OF_MEMORY, KILLED) or not others:
            return metrics
        for training in [self, *others]:
            training.close()
        return self._try()

    def _try(self) -> Metrics:
        failed = {} if self.is_running else self._worker.start()
        return failed or self._worker.call("turn")

    def close(self) -> None:
        self._worker.close()


class TrainingSession(Session):
    """A training past its warm-up: compiling and other one-time costs are behind it."""

    def __init__(self, job: Job, world: World = ALONE) -> None:
        self._job = job
        with contextlib.ExitStack() as stack:
            self.training = stack.enter_context(opened(job.config, world))
            self._windows: Iterator[Window] = self.training.windows()
            self._update = 0
            for _ in range(warmup_updates(job.updates)):
                self._step()
            synchronize(self.training.device)
            reset_peak_memory(self.training.device)
            self._end = stack.pop_all()

    def close(self) -> None:
        self._end.close()

    def _step(self) -> int:
        """Train one update and return the number of images of this process."""
        parts, window = self.training.ready.parts, next(self._windows)
        self._update += 1
        with contextlib.nullcontext() if self._job.exchange else _no_exchange(parts.forward):
            train_update(parts, window, self._update)
        return sum(len(share.indices) for share in window.shares)

    def turn(self) -> Metrics:
        loader, images = self.training.ready.train_loader, 0
        loader.take_wait()
        began = time.perf_counter()
        for _ in range(self._job.updates):
            images += self._step()
        synchronize(self.training.device)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "iterations_per_second": self._job.updates / seconds,
            "images_per_second": images / seconds,
            "data_wait_percent": 100 * min(loader.take_wait() / seconds, 1.0),
            "peak_memory_gb": peak_memory_gb(self.training.device),
            "precision": self.training.ready.precision.name,
            "choices": self.training.ready.choices,
        }


def _no_exchange(forward: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    if not isinstance(forward, DistributedDataParallel):
        raise UserError(
            "with these settings, gradients are not synchronised by DDP, so the all-reduce cannot be left out"
        )
    return forward.no_sync()


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]
