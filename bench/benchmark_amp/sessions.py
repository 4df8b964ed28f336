"""Live sessions: a training or a loop that is built once in a process of its own, and measured turn by turn.

In a process of its own, the peak memory is that of one contender, and no setting of torch is left over from another.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from engine.machine.device import synchronize
from engine.machine.memory import peak_memory_gb
from engine.update import train_update
from tools.common.sessions import OUT_OF_MEMORY, opened, own_process, reason
from utils.config import Config
from utils.errors import TrainingError, UserError
from utils.log import start_log

Metrics = dict[str, Any]
"""Metrics of one turn of one contender, as plain values; {'failed': reason} if it could not be measured."""
MOST_WARMUP = 10
KILLED = "its process was killed, probably by the out-of-memory killer"


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


def attempt(work: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Run `work` in a measuring process. What torch cannot run, or what does not fit in memory, is a result too."""
    start_log(to_terminal=False)
    try:
        return work(*arguments)
    except (MemoryError, RuntimeError, UserError, TrainingError) as error:
        return {"failed": reason(error)}


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


class TrainingSession(Session):
    """A run's own training, without validation, reports and checkpoints, in turns of `updates`."""

    def __init__(self, config: Config, updates: int, compiler: Mapping[str, Any] | None = None) -> None:
        """`compiler`: settings of torch's compiler, those of torch._inductor.config."""
        self._updates, self._opened = updates, contextlib.ExitStack()
        if compiler:
            import torch._inductor.config as inductor

            self._opened.enter_context(inductor.patch(dict(compiler)))
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
