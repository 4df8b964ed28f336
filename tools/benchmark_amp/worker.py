"""A process that builds something once and keeps it between turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tools.benchmark_amp.results import Metrics
from tools.common.processes import KILLED, own_processes, reason
from utils.errors import TrainingError, UserError
from utils.log import start_log


class Session:
    """What a worker process keeps: a training, ready for its next turn."""

    def close(self) -> None:
        """End what the session started, such as loading processes."""


class Worker:
    """A process with a session, which `build` makes there. Answers are metrics, {'failed': reason} among them."""

    def __init__(self, build: Callable[[], Session]) -> None:
        self._build = build
        self._pool: ProcessPoolExecutor | None = None

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    def start(self) -> Metrics:
        """Build the session in a new process."""
        self._pool = own_processes()
        return self._ask(_start, self._build)

    def call(self, method: str) -> Metrics:
        """Call a method of the session."""
        return self._ask(_call, method)

    def _ask(self, work: Callable[..., Metrics], *arguments: Any) -> Metrics:
        assert self._pool is not None
        try:
            return self._pool.submit(attempt, work, *arguments).result()
        except BrokenProcessPool:
            return {"failed": KILLED}

    def close(self) -> None:
        if self._pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                self._pool.submit(_close)
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
    return {}


def _call(method: str) -> Metrics:
    return getattr(_session, method)()


def _close() -> None:
    global _session
    _session.close()
    _session = Session()
