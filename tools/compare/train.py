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

from engine.measure.meters import clock
from tools.common.comparison.runs import fraction_done, is_finished, metrics_of
from tools.common.turns import Budget, progress_bar
from tools.compare.plan import Plan, Run
from utils.config import to_yaml
from utils.log import log
from utils.program import as_child
from vitamp.files import write_atomically

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


def train_all(plan: Plan, after_each: Callable[[Trained], object]) -> Trained:
    """Train all runs that are not finished, as far as the budget allows."""
    done, times, total = Trained(), dict[str, list[float]](), len(plan.runs)
    budget = Budget(60 * plan.budget_min) if plan.budget_min else None
    finished = [run for run in plan.runs if is_finished(run.folder)]
    for run in finished:
        times.setdefault(run.contender, []).append(metrics_of(run.folder)["seconds"])
    with terminating(), progress_bar(total, "runs") as bar:
        bar.initial = len(finished)  # which took none of the time that the bar divides by
        for nth, run in enumerate(plan.runs, start=1):
            if is_finished(run.folder):
                log.info("%d of %d: %s: already finished", nth, total, run.name)
            elif budget is not None and not budget.allows(_expected(times, run.contender)):
                done.left_out.append(run.name)
                continue
            else:
                began = time.monotonic()
                why = train_run(run, partial(_show, bar, nth, run.name), many=plan.many)
                if why is None and not is_finished(run.folder):
                    why = "exit code 0, but it did not finish"
                seconds = time.monotonic() - began
                if why is None:
                    times.setdefault(run.contender, []).append(seconds)
                    last, metric = plan.judged.of(metrics_of(run.folder)), plan.judged.metric
                    reached = "" if last is None else f"{metric.words} {metric.number(last)}, "
                    log.info("%d of %d: %s: %sin %s", nth, total, run.name, reached, clock(seconds))
                else:
                    done.failed[run.folder.name] = why
                    log.warning("%d of %d: %s failed: %s", nth, total, run.name, why)
            after_each(done)
    after_each(done)
    return done


def _expected(times: dict[str, list[float]], contender: str) -> float:
    """Mean duration of this contender, or of all if it has none yet."""
    known = times.get(contender) or [seconds for each in times.values() for seconds in each]
    return sum(known) / len(known) if known else 0.0


def train_run(run: Run, show: Callable[[float], None], *words: str, many: bool = False) -> str | None:
    """Train or resume one run, by main_multi_gpu.py if `many`. Returns the reason if it fails, else None.

    `show` gets the fraction that is done, a few times a second. `words`: more of the command line.
    """
    if not run.settings_file.exists():  # a later call compares its settings with it
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, f"# {run.name}; made by vitamp\n{to_yaml(run.config)}")
    script = "main_multi_gpu.py" if many else "main_single_gpu.py"
    command = [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto", *words]
    train = run.config.TRAIN
    with tempfile.TemporaryFile() as output:
        process = start(command, output)
        try:
            while True:
                try:
                    code = process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    show(fraction_done(run.folder, train.NUM_EPOCHS, train.MAX_UPDATES))
        except (KeyboardInterrupt, Terminated) as error:
            _forward(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        return f"exit code {code}: {_last_error(output)}" if code else None


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


def _show(bar: tqdm, nth: int, name: str, fraction: float) -> None:
    bar.n = nth - 1 + fraction
    bar.set_description_str(f"run {nth} of {bar.total}: {name}")


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
