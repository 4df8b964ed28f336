"""Train the runs of a comparison one after another, each in a process of its own that can be resumed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from tqdm import tqdm

from engine.measure.progress import clock
from tools.compare.metrics import COMPARED, LAST, fraction_done, is_finished, metrics_of
from tools.compare.plan import Plan, Run, command_of, write_settings
from utils.log import log
from utils.parent import as_child

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.5


class Terminated(Exception):
    """SIGTERM was received; the run in progress saves and exits."""


def start(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own, so that Ctrl-C reaches this process, which forwards it once."""
    script, *words = command
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *words],
        env=as_child(),
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


@dataclass
class Durations:
    """Durations of finished runs by mode, to estimate the time left."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, mode: str, seconds: float) -> None:
        self.seconds.setdefault(mode, []).append(seconds)

    def expected(self, mode: str) -> float | None:
        """Mean duration of this mode, or of all modes if it has none yet."""
        known = self.seconds.get(mode) or [seconds for each in self.seconds.values() for seconds in each]
        return sum(known) / len(known) if known else None

    def left(self, ahead: list[Run], mode: str, fraction: float, passed: float) -> float | None:
        """Seconds left for the present run, whose `fraction` took `passed` seconds, and for those ahead."""
        whole = self.expected(mode) or (passed / fraction if fraction > 0 else None)
        if whole is None:
            return None
        return max(0.0, whole - passed) + sum(self.expected(run.mode) or whole for run in ahead)


def train_all(plan: Plan, after_each: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """Train all runs that are not finished. Returns the folders of failed runs with the reason."""
    failed: dict[str, str] = {}
    times, total = Durations(), len(plan.runs)
    for run in plan.runs:
        if is_finished(run.folder):
            times.add(run.mode, metrics_of(run.folder)["seconds"])
    with _bar(total) as bar, _term_as_exception():
        for nth, run in enumerate(plan.runs, start=1):
            ahead = [other for other in plan.runs[nth:] if not is_finished(other.folder)]
            if is_finished(run.folder):
                log.info("%d of %d: %s: already finished", nth, total, run.name)
            else:
                began = time.monotonic()
                why = _train(run, plan, partial(_show, bar, nth, run, ahead, times))
                seconds = time.monotonic() - began
                if why is None:
                    times.add(run.mode, seconds)
                else:
                    failed[run.folder.name] = why
                _log_run(nth, total, run, why, seconds, times.left(ahead, run.mode, 1.0, seconds) if ahead else None)
            after_each(failed)
    return failed


def _train(run: Run, plan: Plan, show: Callable[[float, float], None]) -> str | None:
    """Train or resume one run. Returns the reason if it fails, else None."""
    write_settings(run)
    began, train = time.monotonic(), run.config.TRAIN
    with tempfile.TemporaryFile() as output:
        process = start(command_of(run, plan.many), output)
        try:
            while True:
                try:
                    code = process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    show(fraction_done(run.folder, train.NUM_EPOCHS, train.MAX_UPDATES), time.monotonic() - began)
        except (KeyboardInterrupt, Terminated) as error:
            _forward(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        if code == 0 and is_finished(run.folder):
            return None
        return f"exit code {code}: {_last_error(output)}"


def _forward(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal, on which the run saves and exits. A second Ctrl-C makes it exit at once."""
    process.send_signal(number)
    while True:
        try:
            process.wait()
            return
        except (KeyboardInterrupt, Terminated):
            process.send_signal(signal.SIGINT)


def _last_error(output: IO[bytes]) -> str:
    """The last error that the run printed, or else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]


def _log_run(nth: int, total: int, run: Run, why: str | None, seconds: float, left: float | None) -> None:
    rest = f"; about {clock(left)} left" if left else ""
    if why is not None:
        log.warning("%d of %d: %s failed: %s%s", nth, total, run.name, why, rest)
        return
    last = metrics_of(run.folder)[LAST]
    accuracy = "" if last is None else f"{COMPARED.words} {COMPARED.number(last)}, "
    log.info("%d of %d: %s: %sin %s%s", nth, total, run.name, accuracy, clock(seconds), rest)


def _bar(total: int) -> tqdm:
    form = "{percentage:3.0f}%|{bar}| {desc}"
    return tqdm(total=total, bar_format=form, dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=False)


def _show(bar: tqdm, nth: int, run: Run, ahead: list[Run], times: Durations, fraction: float, passed: float) -> None:
    bar.n = nth - 1 + fraction
    left = times.left(ahead, run.mode, fraction, passed)
    rest = "" if left is None else f", about {clock(left)} left"
    bar.set_description_str(f"run {nth} of {bar.total}: {run.name}, {100 * fraction:.0f} %{rest}")


@contextlib.contextmanager
def _term_as_exception() -> Iterator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
