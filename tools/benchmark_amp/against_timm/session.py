"""A loop of the table `timm` in a worker process: its first losses, and its turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from datasets import Batch
from engine.machine.device import pick_device, synchronize
from engine.machine.memory import peak_memory_gb
from tools.benchmark_amp.against_timm.loops import loop_of
from tools.benchmark_amp.against_timm.start import Loop
from tools.benchmark_amp.against_timm.ways import OURS, Way
from tools.benchmark_amp.results import Metrics
from tools.benchmark_amp.worker import Session, Worker
from tools.common.processes import reset_peak_memory, warmup_updates
from utils.config import Config
from utils.distributed.world import ALONE

COMPARED = 5
"""Number of updates whose losses are compared."""
BATCHES = 16
"""Number of different batches; then the first one is used again."""


@dataclass(frozen=True)
class Job:
    way: Way
    config: Config
    updates: int
    """Per turn."""


class LoopSession(Session):
    def __init__(self, job: Job) -> None:
        self._device = pick_device(job.config.DEVICE, ALONE)
        self._loop: Loop = loop_of(job.way, job.config, self._device)
        self._batches = random_batches(job.config, self._device)
        self._job, self._done = job, 0
        self._losses: list[float] = []

    def first_losses(self) -> Metrics:
        """Train the compared updates, then the rest of the warm-up."""
        self._losses = [self._loop.train_one(batch) for batch in self._next(COMPARED)]
        self._loop.train(self._next(max(0, warmup_updates(self._job.updates) - COMPARED)))
        synchronize(self._device)
        self._free_cache()
        return {"losses": self._losses}

    def _next(self, count: int) -> list[Batch]:
        batches = [self._batches[n % BATCHES] for n in range(self._done, self._done + count)]
        self._done += count
        return batches

    def _free_cache(self) -> None:
        """Leave memory to the other loops, which are on the same device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def turn(self) -> Metrics:
        updates, batches = self._job.updates, self._next(self._job.updates)
        reset_peak_memory(self._device)
        synchronize(self._device)
        began, on_cpu = time.perf_counter(), time.process_time()
        self._loop.train(batches)
        synchronize(self._device)
        seconds, on_cpu = time.perf_counter() - began, time.process_time() - on_cpu
        metrics = {
            "seconds": seconds,
            "images_per_second": updates * self._job.config.DATA.BATCH_SIZE / seconds,
            "cpu_seconds": on_cpu,
            "peak_memory_gb": peak_memory_gb(self._device),
            "precision": self._job.way.precision,
            "choices": getattr(self._loop, "choices", {}),
            "losses": self._losses,
        }
        self._free_cache()
        return metrics


def first_losses(workers: dict[str, Worker], ways: dict[str, Way]) -> dict[str, Metrics]:
    """Losses of every loop's first updates, or the reason why it has none.

    Work on the CPU runs concurrently: building, and compiling. Our loops are built one after another, because they
    time alternatives on the device.
    """
    built = concurrently(Worker.start, {name: worker for name, worker in workers.items() if ways[name].kind != OURS})
    built |= {name: worker.start() for name, worker in workers.items() if ways[name].kind == OURS}
    answers = {name: answer for name, answer in built.items() if "failed" in answer}
    ready = {name: worker for name, worker in workers.items() if name not in answers}
    answers |= {name: _losses(worker) for name, worker in ready.items() if not ways[name].compiled}
    answers |= concurrently(_losses, {name: worker for name, worker in ready.items() if ways[name].compiled})
    return {name: answers[name] for name in workers}


def _losses(worker: Worker) -> Metrics:
    return worker.call("first_losses")


def concurrently(work: Callable[[Worker], Metrics], workers: dict[str, Worker]) -> dict[str, Metrics]:
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        return dict(zip(workers, threads.map(work, workers.values()), strict=True))


def random_batches(config: Config, device: torch.device) -> list[Batch]:
    """Random images and labels on the device, equal in every process."""
    data, generator = config.DATA, torch.Generator(device).manual_seed(config.SEED)
    size = (data.BATCH_SIZE, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    batches = []
    for _ in range(BATCHES):
        images = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        labels = torch.randint(0, config.MODEL.NUM_CLASSES, size[:1], device=device, generator=generator)
        batches.append(Batch(images, labels, torch.arange(data.BATCH_SIZE)))
    return batches
