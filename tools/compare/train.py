"""Train the runs of a comparison one after another, each in a process of its own that can be resumed."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
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
from tools.common.comparison.judged import Judged
from tools.common.comparison.metrics import fraction_done, is_finished, metrics_of
from tools.common.turns import Budget
from tools.compare.plan import Plan, Run, Stage, command_of, write_settings
from utils.log import log
from utils.parent import as_child
from utils.text import counted

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
class Trained:
    """What became of the runs that are not finished."""

    failed: dict[str, str] = field(default_factory=dict)
    """Folder -> reason."""
    left_out: list[str] = field(default_factory=list)
    """Names of runs that -budget_min left no time for."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Contenders that -halving dropped, with a sentence."""


@dataclass
class Durations:
    """Durations of finished runs by contender, to estimate the time left."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, contender: str, seconds: float) -> None:
        self.seconds.setdefault(contender, []).append(seconds)

    def expected(self, contender: str) -> float | None:
        """Mean duration of this contender, or of all if it has none yet."""
        known = self.seconds.get(contender) or [seconds for each in self.seconds.values() for seconds in each]
        return sum(known) / len(known) if known else None

    def left(self, ahead: list[Run], contender: str, fraction: float, passed: float) -> float | None:
        """Seconds left for the present run, whose `fraction` took `passed` seconds, and for those ahead."""
        whole = self.expected(contender) or (passed / fraction if fraction > 0 else None)
        if whole is None:
            return None
        return max(0.0, whole - passed) + sum(self.expected(run.contender) or whole for run in ahead)


def train_all(plan: Plan, after_each: Callable[[Trained], object]) -> Trained:
    """Train all runs that are not finished, as far as the budget allows.

    With -halving, in stages: the better half of the contenders goes on from its checkpoints.
    """
    done = Trained()
    budget = Budget(60 * plan.budget_min) if plan.budget_min else None
    with _term_as_exception():
        for stage in plan.stages:
            runs = [run for run in plan.runs if run.contender not in done.dropped]
            if len(plan.stages) > 1:
                log.info("%s: %s", stage.words, counted(len(runs), "run"))
            _train_stage(plan, runs, stage, budget, done, after_each)
            if done.left_out:
                break
            if stage != plan.last_stage:
                done.dropped |= _worse_half(plan.judged, runs, stage)
    after_each(done)
    return done


def _train_stage(
    plan: Plan,
    runs: list[Run],
    stage: Stage,
    budget: Budget | None,
    done: Trained,
    after_each: Callable[[Trained], object],
) -> None:
    times, total = Durations(), len(runs)
    for run in runs:
        if is_finished(run.folder, stage.updates):
            times.add(run.contender, metrics_of(run.folder)["seconds"])
    with _bar(total) as bar:
        for nth, run in enumerate(runs, start=1):
            ahead = [other for other in runs[nth:] if not is_finished(other.folder, stage.updates)]
            if run.folder.name in done.failed:
                continue
            if is_finished(run.folder, stage.updates):
                log.info("%d of %d: %s: already finished", nth, total, run.name)
            elif budget is not None and not budget.allows(times.expected(run.contender) or 0.0):
                done.left_out.append(run.name)
                continue
            else:
                began = time.monotonic()
                why = _train(run, plan, stage, partial(_show, bar, nth, run, ahead, times))
                seconds = time.monotonic() - began
                if why is None:
                    times.add(run.contender, seconds)
                else:
                    done.failed[run.folder.name] = why
                rest = times.left(ahead, run.contender, 1.0, seconds) if ahead else None
                _log_run(f"{nth} of {total}: {run.name}", run, plan.judged, why, seconds, rest)
            after_each(done)


def _worse_half(judged: Judged, runs: list[Run], stage: Stage) -> dict[str, str]:
    """The contenders that go no further, with the reason: all but the better half, and but two."""
    values: dict[str, list[float]] = {run.contender: [] for run in runs}
    for run in runs:
        if not is_finished(run.folder, stage.updates):  # it failed
            continue
        if (value := judged.of(metrics_of(run.folder, stage.updates))) is not None:
            values[run.contender].append(value)
    sign = -1 if judged.metric.higher else 1
    means = {name: statistics.fmean(found) if found else None for name, found in values.items()}
    order = sorted(means, key=lambda name: math.inf if (mean := means[name]) is None else sign * mean)
    dropped = {}
    for name in order[max(2, -(-len(order) // 2)) :]:
        mean = means[name]
        reached = "no run finished" if mean is None else f"{judged.metric.words} {judged.metric.number(mean)}"
        dropped[name] = f"{name}: dropped after {stage.words}, {reached}"
        log.info("%s", dropped[name])
    return dropped


def _train(run: Run, plan: Plan, stage: Stage, show: Callable[[float, float], None]) -> str | None:
    """Train or resume one run. Returns the reason if it fails, else None."""
    write_settings(run)
    began, train = time.monotonic(), run.config.TRAIN
    most = stage.updates or train.MAX_UPDATES
    with tempfile.TemporaryFile() as output:
        process = start(command_of(run, plan.many, stage), output)
        try:
            while True:
                try:
                    code = process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    show(fraction_done(run.folder, train.NUM_EPOCHS, most), time.monotonic() - began)
        except (KeyboardInterrupt, Terminated) as error:
            _forward(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        if code == 0 and is_finished(run.folder, stage.updates):
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


def _log_run(name: str, run: Run, judged: Judged, why: str | None, seconds: float, left: float | None) -> None:
    rest = f"; about {clock(left)} left" if left else ""
    if why is not None:
        log.warning("%s failed: %s%s", name, why, rest)
        return
    last = judged.of(metrics_of(run.folder))
    reached = "" if last is None else f"{judged.metric.words} {judged.metric.number(last)}, "
    log.info("%s: %sin %s%s", name, reached, clock(seconds), rest)


def _bar(total: int) -> tqdm:
    form = "{percentage:3.0f}%|{bar}| {desc}"
    return tqdm(total=total, bar_format=form, dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=False)


def _show(bar: tqdm, nth: int, run: Run, ahead: list[Run], times: Durations, fraction: float, passed: float) -> None:
    bar.n = nth - 1 + fraction
    left = times.left(ahead, run.contender, fraction, passed)
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
