"""Training the runs of a comparison, one after another, each in a process of its own that can be gone on with."""

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
from tools.compare.figures import figures_of, is_finished, share_done
from tools.compare.plan import Plan, Run, command_of, write_settings
from utils.log import log

ROOT = Path(__file__).resolve().parents[2]
SECONDS_BETWEEN_LOOKS = 0.5


class Ended(Exception):
    """SIGTERM: the run that is being trained has saved, and left."""


def start(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C at the terminal comes to us, and we hand it on once."""
    script, *words = command
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *words], stdout=output, stderr=output, start_new_session=True
    )


@dataclass
class Clock:
    """How long runs took, by mode, and so how long the rest will take."""

    took: dict[str, list[float]] = field(default_factory=dict)

    def add(self, mode: str, seconds: float) -> None:
        self.took.setdefault(mode, []).append(seconds)

    def of(self, mode: str) -> float | None:
        """A run of this mode; by runs of others where there was none yet."""
        known = self.took.get(mode) or [seconds for each in self.took.values() for seconds in each]
        return sum(known) / len(known) if known else None

    def left(self, ahead: list[Run], mode: str, share: float, passed: float) -> float | None:
        """Seconds: for the present run, of whose work `share` took `passed`, and for those ahead of it."""
        whole = self.of(mode) or (passed / share if share > 0 else None)
        if whole is None:
            return None
        return max(0.0, whole - passed) + sum(self.of(run.mode) or whole for run in ahead)


def train_all(plan: Plan, after_each: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """Train what is not trained yet. Gives back the folders of runs that failed, each with its reason."""
    failed: dict[str, str] = {}
    times, total = Clock(), len(plan.runs)
    for run in plan.runs:
        if is_finished(run.folder):
            times.add(run.mode, figures_of(run.folder)["seconds"])
    with _bar(total) as bar, _term_as_exception():
        for nth, run in enumerate(plan.runs, start=1):
            ahead = [other for other in plan.runs[nth:] if not is_finished(other.folder)]
            if is_finished(run.folder):
                log.info("%d of %d: %s: trained before", nth, total, run.name)
            else:
                began = time.monotonic()
                why = _train(run, plan, partial(_show, bar, nth, run, ahead, times))
                seconds = time.monotonic() - began
                if why is None:
                    times.add(run.mode, seconds)
                else:
                    failed[run.folder.name] = why
                _tell(nth, total, run, why, seconds, times.left(ahead, run.mode, 1.0, seconds) if ahead else None)
            after_each(failed)
    return failed


def _train(run: Run, plan: Plan, look: Callable[[float, float], None]) -> str | None:
    """None where it went well, else why it did not."""
    write_settings(run)
    began, train = time.monotonic(), run.config.TRAIN
    with tempfile.TemporaryFile() as output:
        process = start(command_of(run, plan.many), output)
        try:
            while True:
                try:
                    code = process.wait(SECONDS_BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    look(share_done(run.folder, train.NUM_EPOCHS, train.MAX_UPDATES), time.monotonic() - began)
        except (KeyboardInterrupt, Ended) as error:
            _hand_on(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        if code == 0 and is_finished(run.folder):
            return None
        return f"exit code {code}: {_last_words(output)}"


def _hand_on(process: subprocess.Popen[bytes], number: int) -> None:
    """The run saves, and leaves; a second Ctrl-C leaves at once."""
    process.send_signal(number)
    while True:
        try:
            process.wait()
            return
        except (KeyboardInterrupt, Ended):
            process.send_signal(signal.SIGINT)


def _last_words(output: IO[bytes]) -> str:
    """The error as it was told, or what was said last."""
    output.seek(0)
    said = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in said if line.startswith("error: ")]
    return (errors or said or ["it said nothing"])[-1]


def _tell(nth: int, total: int, run: Run, why: str | None, seconds: float, left: float | None) -> None:
    rest = f"; about {clock(left)} left" if left else ""
    if why is not None:
        log.warning("%d of %d: %s failed: %s%s", nth, total, run.name, why, rest)
        return
    found = figures_of(run.folder)
    accuracy = "" if found["last_acc1"] is None else f"top-1 {found['last_acc1']:.2f} %, "
    log.info("%d of %d: %s: %sin %s%s", nth, total, run.name, accuracy, clock(seconds), rest)


def _bar(total: int) -> tqdm:
    form = "{percentage:3.0f}%|{bar}| {desc}"
    return tqdm(total=total, bar_format=form, dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=False)


def _show(bar: tqdm, nth: int, run: Run, ahead: list[Run], times: Clock, share: float, passed: float) -> None:
    bar.n = nth - 1 + share
    left = times.left(ahead, run.mode, share, passed)
    rest = "" if left is None else f", about {clock(left)} left"
    bar.set_description_str(f"run {nth} of {bar.total}: {run.name}, {100 * share:.0f} %{rest}")


@contextlib.contextmanager
def _term_as_exception() -> Iterator[None]:
    def heard(_number: int, _frame: FrameType | None) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
