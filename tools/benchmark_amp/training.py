"""A contender's turns: some updates of a training in a process of its own, or of several that train together."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from datasets import Window
from engine.machine.device import describe
from engine.machine.memory import is_out_of_memory, peak_memory_gb
from engine.update import train_update
from tools.benchmark_amp.frame import Figures
from tools.common.processes import NO_ROOM, Training, opened, own_processes, warmup_updates
from utils.config import Config
from utils.distributed.world import ALONE, BY_HAND, World
from utils.errors import TrainingError, UserError
from utils.log import start_log

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Job:
    config: Config
    updates: int
    """Of a turn, after some to warm up."""
    exchange: bool = True
    """Whether processes exchange gradients; without it, the update's other work alone is left."""

    @property
    def warmup(self) -> int:
        return warmup_updates(self.updates)


def one_turn(job: Job, processes: int = 1) -> Figures:
    """In processes that end with it."""
    try:
        with own_processes(processes) as pool:
            meeting = ("127.0.0.1", _free_port())
            worlds = [World(rank, processes, rank, processes, BY_HAND, meeting) for rank in range(processes)]
            answers = [pool.submit(_turn_alone, job, world if processes > 1 else ALONE) for world in worlds]
            return answers[0].result()
    except BrokenProcessPool:
        return {"failed": NO_ROOM}


class Seat:
    """A training in a process that stays, so that turns follow each other without building and warming up anew.

    Where the device has no room for those `beside` it, too, each leaves for the next.
    """

    def __init__(self, job: Job, beside: list[Seat]) -> None:
        self._job, self._beside = job, beside
        self._pool: ProcessPoolExecutor | None = None
        beside.append(self)

    def turn(self) -> Figures:
        figures = self._try()
        others = [seat for seat in self._beside if seat is not self and seat.taken]
        if figures.get("failed") not in (OUT_OF_MEMORY, NO_ROOM) or not others:
            return figures
        for seat in [self, *others]:
            seat.close()
        return self._try()

    @property
    def taken(self) -> bool:
        return self._pool is not None

    def _try(self) -> Figures:
        try:
            if self._pool is None:
                self._pool = own_processes()
                return self._pool.submit(_sit_down, self._job).result()
            return self._pool.submit(_next_turn).result()
        except BrokenProcessPool:
            return {"failed": NO_ROOM}

    def close(self) -> None:
        if self._pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                self._pool.submit(_stand_up)
            self._pool.shutdown()
            self._pool = None


class _Course:
    """Updates one after another, the first ones to warm up: past compiling, and past whatever else comes once."""

    def __init__(self, job: Job, training: Training) -> None:
        self._job, self._training = job, training
        self._windows: Iterator[Window] = training.windows()
        self._update = 0
        for _ in range(job.warmup):
            self._step()
        training.wait_for_device()
        training.forget_peak()

    def _step(self) -> int:
        """One update; how many images of this process it took."""
        parts, window = self._training.ready.parts, next(self._windows)
        self._update += 1
        with contextlib.nullcontext() if self._job.exchange else _no_exchange(parts.forward):
            train_update(parts, window, self._update)
        return sum(len(share.indices) for share in window.shares)

    def turn(self) -> Figures:
        loader, images = self._training.ready.train_loader, 0
        loader.take_wait()
        began = time.perf_counter()
        for _ in range(self._job.updates):
            images += self._step()
        self._training.wait_for_device()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "iterations_per_second": self._job.updates / seconds,
            "images_per_second": images / seconds,
            "data_wait_percent": 100 * min(loader.take_wait() / seconds, 1.0),
            "peak_memory_gb": peak_memory_gb(self._training.device),
            "precision": self._training.ready.precision.name,
            "choices": self._training.ready.choices,
        }


def _no_exchange(forward: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    if not isinstance(forward, DistributedDataParallel):
        raise UserError("these settings have gradients exchanged by other means than DDP, which cannot be left out")
    return forward.no_sync()


def _turn_alone(job: Job, world: World) -> Figures:
    """In a process of its own: from its beginning to its figures."""

    def whole() -> Figures:
        with opened(job.config, world) as training:
            return _Course(job, training).turn()

    return _or_why_not(whole)


_course: _Course | None = None
"""In the process of a Seat, what its next turn continues."""
_standing = contextlib.ExitStack()
"""What ends its training: its loading processes, for one."""


def _sit_down(job: Job) -> Figures:
    def first() -> Figures:
        global _course
        _course = _Course(job, _standing.enter_context(opened(job.config)))
        return _course.turn()

    return _or_why_not(first)


def _next_turn() -> Figures:
    assert _course is not None
    return _or_why_not(_course.turn)


def _stand_up() -> None:
    global _course
    _course = None
    _standing.close()


def _or_why_not(work: Callable[[], Figures]) -> Figures:
    """What torch cannot run, or what does not fit in memory, is an answer too."""
    start_log(to_terminal=False)
    try:
        return work()
    except (MemoryError, RuntimeError, UserError, TrainingError) as error:
        if is_out_of_memory(error):
            return {"failed": OUT_OF_MEMORY}
        return {"failed": str(error).strip().partition("\n")[0] or type(error).__name__}


def device_in_words(config: Config, device: torch.device) -> str:
    from engine.machine.device import prepare

    return describe(device, ALONE, prepare(config, device, ALONE))


def gpu_of(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}"


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]
