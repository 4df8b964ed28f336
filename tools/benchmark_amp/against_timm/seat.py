"""A loop of the table `timm` in a process of its own, which stays: its first losses, and its turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from datasets import Batch
from engine.machine.device import pick_device, wait_for
from engine.machine.memory import is_out_of_memory, peak_memory_gb
from tools.benchmark_amp.against_timm.loops import loop_of
from tools.benchmark_amp.against_timm.start import OURS, Loop, Way
from tools.benchmark_amp.frame import Figures
from tools.common.processes import NO_ROOM, own_processes, warmup_updates
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError
from utils.log import start_log

Answer = TypeVar("Answer")
COMPARED = 5
"""Updates whose losses are compared."""
BATCHES = 16
"""Different ones; then the first comes again."""


@dataclass(frozen=True)
class Job:
    way: Way
    config: Config
    updates: int
    """Of a turn."""


class Seat:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._pool: ProcessPoolExecutor | None = None

    @property
    def ours(self) -> bool:
        return self._job.way.kind == OURS

    @property
    def compiled(self) -> bool:
        return self._job.way.compiled

    def build(self) -> str | None:
        """Why it cannot be, if so."""
        self._pool = own_processes()
        return self._ask(_sit_down, self._job)

    def losses(self) -> list[float] | str:
        """Of the first updates; or why there are none."""
        return self._ask(_first_losses)

    def turn(self) -> Figures:
        answer = self._ask(_turn)
        return {"failed": answer} if isinstance(answer, str) else answer

    def _ask(self, *work: Any) -> Any:
        assert self._pool is not None
        try:
            return self._pool.submit(_or_why_not, *work).result()
        except BrokenProcessPool:
            return NO_ROOM

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def first_losses(seats: dict[str, Seat]) -> dict[str, list[float] | str]:
    """Of each, or why it has none.

    What takes cores and not the device is done at once: building, but for ours, which may race on it, and compiling.
    """
    built = _at_once(Seat.build, {name: seat for name, seat in seats.items() if not seat.ours})
    built |= {name: seat.build() for name, seat in seats.items() if seat.ours}
    answers: dict[str, list[float] | str] = {name: why for name, why in built.items() if why is not None}
    ready = {name: seat for name, seat in seats.items() if name not in answers}
    answers |= {name: seat.losses() for name, seat in ready.items() if not seat.compiled}
    answers |= _at_once(Seat.losses, {name: seat for name, seat in ready.items() if seat.compiled})
    return {name: answers[name] for name in seats}


def _at_once(work: Callable[[Seat], Answer], seats: dict[str, Seat]) -> dict[str, Answer]:
    with ThreadPoolExecutor(max(1, len(seats))) as threads:
        return dict(zip(seats, threads.map(work, seats.values()), strict=True))


class _Course:
    def __init__(self, job: Job) -> None:
        self._device = pick_device(job.config.DEVICE, ALONE)
        self._loop: Loop = loop_of(job.way, job.config, self._device)
        self._batches = _batches(job.config, self._device)
        self._job, self._done = job, 0
        self.losses: list[float] = []

    def begin(self) -> None:
        self.losses = [self._loop.train_one(batch) for batch in self._next(COMPARED)]
        self._loop.train(self._next(max(0, warmup_updates(self._job.updates) - COMPARED)))
        wait_for(self._device)
        self._make_room()

    def _next(self, count: int) -> list[Batch]:
        coming = [self._batches[n % BATCHES] for n in range(self._done, self._done + count)]
        self._done += count
        return coming

    def _make_room(self) -> None:
        """The others are on the same device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def turn(self) -> Figures:
        updates, batches = self._job.updates, self._next(self._job.updates)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        wait_for(self._device)
        began, on_cpu = time.perf_counter(), time.process_time()
        self._loop.train(batches)
        wait_for(self._device)
        seconds, on_cpu = time.perf_counter() - began, time.process_time() - on_cpu
        figures = {
            "seconds": seconds,
            "images_per_second": updates * self._job.config.DATA.BATCH_SIZE / seconds,
            "cpu_seconds": on_cpu,
            "peak_memory_gb": peak_memory_gb(self._device),
            "precision": self._job.way.precision,
            "choices": getattr(self._loop, "choices", {}),
            "losses": self.losses,
        }
        self._make_room()
        return figures


def _batches(config: Config, device: torch.device) -> list[Batch]:
    """Random images and labels, the same in every process, made on the device."""
    data, generator = config.DATA, torch.Generator(device).manual_seed(config.SEED)
    size = (data.BATCH_SIZE, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    made = []
    for _ in range(BATCHES):
        images = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        labels = torch.randint(0, config.MODEL.NUM_CLASSES, size[:1], device=device, generator=generator)
        made.append(Batch(images, labels, torch.arange(data.BATCH_SIZE)))
    return made


_course: _Course | None = None
"""In the process of a seat, what its turns go on with."""


def _sit_down(job: Job) -> None:
    global _course
    _course = _Course(job)


def _first_losses() -> list[float]:
    assert _course is not None
    _course.begin()
    return _course.losses


def _turn() -> Figures:
    assert _course is not None
    return _course.turn()


def _or_why_not(work: Any, *given: Any) -> Any:
    """What torch cannot run, or what does not fit in memory, is an answer too: a text."""
    start_log(to_terminal=False)
    try:
        return work(*given)
    except (MemoryError, RuntimeError, UserError, TrainingError) as error:
        if is_out_of_memory(error):
            return "out of memory"
        return str(error).strip().partition("\n")[0] or type(error).__name__
