"""The runs of a comparison: their settings, which are checked before training, and their training.

Each run trains in a process of its own, with a folder and a file of settings of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tools.common.comparison import Judged
from tools.common.run_metrics import is_finished, metrics_of
from tools.common.turns import Budget, progress_bar
from utils.config import Config, differences, load_config, to_yaml
from utils.config.keys import values_by_key
from utils.config.kinds import AUTO, Fold, one_line
from utils.errors import EXIT_STOPPED, UserError
from utils.log import log
from utils.program import ROOT, as_child
from utils.record.history import History
from utils.text import clock, redacted
from vitamp.files import write_atomically

MAY_DIFFER = ("OUTPUT", "SAVE", "MODEL.RESUME")
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True)
class Run:
    """One training: a contender with a seed and perhaps a fold, its settings and its folder."""

    contender: str
    seed: int
    config: Config
    folder: Path
    fold: Fold | None = None

    @property
    def name(self) -> str:
        return f"{self.contender}, " + (f"seed {self.seed}" if self.fold is None else f"fold {self.fold}")

    @property
    def settings_file(self) -> Path:
        """The file given to the run by -cfg."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def title(self) -> str:
        """First line of the settings file, which ends with a hash of the lists of DATA.EXCLUDE and DATA.RELABEL.

        The hash shows that the content of a list has changed, although the settings name the same file.
        """
        from datasets.exclude import read_rows, text_of

        data = self.config.DATA
        rows: Any = data.RELABEL
        if data.RELABEL:
            # The scores and the order of the rows do not count. They change when a search writes the table again.
            row_of, _ = read_rows(data)
            rows = sorted((name, row.given, row.proposed, row.decision) for name, row in row_of.items())
        digest = hashlib.sha256(repr((text_of(data), rows)).encode()).hexdigest()
        return f"# {self.name}; made by vitamp, lists {digest}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, and how they are judged."""

    contenders: tuple[str, ...]
    """Names. The first is the baseline. A cross-validation may have a single one."""
    judged: Judged
    """The metric and the weights that decide."""
    folds: int | None
    """Number of folds; None without cross-validation."""
    runs: tuple[Run, ...]
    """In the order of training."""
    device: str
    """Name of the device."""
    several_processes: bool
    """Whether -ngpus was given, so that main_multi_gpu.py trains the runs."""
    remarks: tuple[str, ...]
    """Lines for the log, before training."""
    varied: tuple[str, ...] = ()
    """What varies beside -modes."""
    budget_min: float | None = None
    """Minutes after which no run is started."""
    these_images: bool = False
    """Whether the verdict need not hold for other validation images."""

    @property
    def seeds(self) -> list[int]:
        """The different seeds of the runs, in their order."""
        return list(dict.fromkeys(run.seed for run in self.runs))


def check_runs(runs: Sequence[Run], again: bool = False) -> None:
    """Raise UserError for settings that training would refuse, and for folders that have other runs.

    With `again`, folders of earlier runs are first deleted, so that the runs are trained anew.
    """
    from engine.preflight import check

    for run in runs:
        # Seed and fold make no difference to this check, so one run of each contender is enough.
        if (run.seed, run.fold) == (runs[0].seed, runs[0].fold):
            check(run.config)
        if run.settings_file.exists() and again:
            shutil.rmtree(run.folder, ignore_errors=True)
            run.settings_file.unlink()
        if run.settings_file.exists():
            earlier = load_config(str(run.settings_file)).config
            changed = [text for text in differences(earlier, run.config) if text.partition(":")[0] not in MAY_DIFFER]
            # The last word of the title is a hash of the lists of images, unless an earlier version wrote it.
            title, _, _ = run.settings_file.read_text(encoding="utf-8").partition("\n")
            has_hash = ", lists " in title
            if has_hash and title.split()[-1] != run.title.split()[-1]:
                changed.append("DATA.EXCLUDE or DATA.RELABEL: other lines")
            if changed:
                raise UserError(
                    f"{run.folder}: was trained with other settings: {'; '.join(changed)}. "
                    "Give the same settings to resume it, or choose another -output."
                )
        elif run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"{run.folder}: already exists and was not made by this tool; choose another -output.")


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; the run in progress saves and exits."""

    exit_code = EXIT_STOPPED


def start(command: list[str], output: IO[bytes], gpu: str | None = None) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own, so that Ctrl-C reaches this process, which forwards it once.

    `gpu`: the only one that it sees, as a value of CUDA_VISIBLE_DEVICES; None leaves the variable as it is.
    """
    script, *words = command
    environment = as_child()
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *words],
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


@dataclass
class Trained:
    """Outcome of training the runs of a plan: those that have not finished, and why."""

    failed: dict[str, str] = field(default_factory=dict)
    """Folder of a failed run -> reason."""
    left_out: list[str] = field(default_factory=list)
    """Names of runs that -budget_min left no time for."""
    advice: str = "repeat the command to go on"
    """What to do about them."""
    budget: Budget | None = None
    """The time limit, which a later plan may share; None without one."""


def train_all(plan: Plan, after_each: Callable[[Trained], object], budget: Budget | None = None) -> Trained:
    """Train all runs of a plan that are not finished, as long as the time limit allows.

    `after_each` is called after each run that has finished or failed, and at the end. `budget` is the time limit of an
    earlier plan, which this one shares; without it, `plan.budget_min` sets a new one.
    """
    if budget is None and plan.budget_min:
        budget = Budget(60 * plan.budget_min)
    done = Trained(budget=budget)
    durations = dict[str, list[float]]()  # contender -> seconds of its finished runs
    total = len(plan.runs)
    finished = [run for run in plan.runs if is_finished(run.folder)]
    for run in finished:
        durations.setdefault(run.contender, []).append(metrics_of(run.folder)["seconds"])
    with terminating(), progress_bar(total, "runs") as bar:
        # Finished runs come first, and take none of the time that the bar divides by.
        bar.initial = len(finished)
        finished_first = sorted(plan.runs, key=lambda run: run not in finished)
        for number, run in enumerate(finished_first, start=1):
            bar.set_description_str(run.name)
            bar.update(number - 1 - bar.n)  # to number - 1: by 0, or from `initial` on by 1
            seconds_left = _seconds_left(run, durations)
            if is_finished(run.folder):
                log.info("%d of %d: %s: already finished", number, total, run.name)
            elif budget is not None and not budget.allows(seconds_left):
                done.left_out.append(run.name)
                takes_more_than_budget = plan.budget_min and seconds_left > 60 * plan.budget_min
                if takes_more_than_budget:  # repeating the command would not help
                    done.advice = f"{run.name} takes about {clock(seconds_left)} more: give a larger -budget_min"
                continue
            else:
                began = time.monotonic()
                failure = _train_to_end(run, plan.several_processes)
                if failure is None:
                    metrics = metrics_of(run.folder)
                    durations.setdefault(run.contender, []).append(metrics["seconds"])
                    last_value = plan.judged.last_value(metrics)
                    metric = plan.judged.metric
                    reached = "" if last_value is None else f"{metric.words} {metric.number(last_value)}, "
                    duration = clock(time.monotonic() - began)
                    log.info("%d of %d: %s: %sin %s", number, total, run.name, reached, duration)
                else:
                    done.failed[run.folder.name] = failure
                    log.warning("%d of %d: %s failed: %s", number, total, run.name, failure)
            after_each(done)
    after_each(done)
    return done


def _seconds_left(run: Run, durations: Mapping[str, list[float]]) -> float:
    """Estimate how long a run will take, less the time it has trained already.

    `durations`: seconds of the finished runs of each contender. The estimate is the mean of those of this contender; if
    it has none, the mean of all; if there are none at all, 0.
    """
    seconds = durations.get(run.contender) or list(itertools.chain.from_iterable(durations.values()))
    mean = sum(seconds) / max(len(seconds), 1)
    seconds_trained = History.of_run(run.folder).seconds
    return max(0.0, mean - seconds_trained)


def _train_to_end(run: Run, several_processes: bool) -> str | None:
    """Train one run until it has finished. Returns the reason if it has not, else None.

    With TRAIN.NUM_EPOCHS auto, a run plans its epochs by MAX_TIME. If it is slower than planned, the time ends before
    its last epoch; then it is resumed, and trains what is left beyond MAX_TIME.
    """
    failure = train_run(run, several_processes=several_processes)
    if failure is None and run.config.TRAIN.NUM_EPOCHS == AUTO and not is_finished(run.folder):
        log.warning("%s was slower than it had planned; beyond MAX_TIME, it trains what is left", run.name)
        failure = train_run(run, several_processes=several_processes)
    if failure is None and not is_finished(run.folder):
        return "exit code 0, but it did not finish"
    return failure


def train_run(run: Run, *arguments: str, several_processes: bool = False) -> str | None:
    """Train or resume one run. Returns the reason if it fails, else None.

    `arguments` are added to its command line. `several_processes`: whether main_multi_gpu.py trains it.
    """
    (failure,) = train_together([run], *arguments, several_processes=several_processes)
    return failure


def train_together(
    runs: Sequence[Run],
    *arguments: str,
    several_processes: bool = False,
    gpus: Sequence[str | None] = (None,),
) -> list[str | None]:
    """Train or resume runs at the same time. Returns for each the reason if it fails, else None.

    As for `train_run`. `gpus`: for each run the only one that it sees, as for `start`.
    """
    script = "main_multi_gpu.py" if several_processes else "main_single_gpu.py"
    processes = list[subprocess.Popen[bytes]]()
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in runs]
        try:
            for run, output, gpu in zip(runs, outputs, gpus, strict=True):
                processes.append(start([script, *_arguments_of(run), *arguments], output, gpu))
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt as error:
            _forward_signal(processes, signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            raise
        return [_why_failed(code, output) for code, output in zip(codes, outputs, strict=True)]


def _arguments_of(run: Run) -> list[str]:
    """Write the settings file of a run, unless it is there, and return the arguments that train or resume it."""
    if not run.settings_file.exists():  # `check_runs` of a later command compares its settings with this file
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, redacted(f"{run.title}\n{to_yaml(run.config)}"))
    arguments = ["-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]
    # The file has no passwords, which URLs may contain. So settings with a password are arguments of each start.
    texts = [f"{key}={one_line(value)}" for key, value in values_by_key(run.config).items()]
    return arguments + [text for text in texts if redacted(text) != text]


def _why_failed(code: int, output: IO[bytes]) -> str | None:
    """Return the last error that a run printed, or else its last line; None with exit code 0."""
    if not code:
        return None
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reasons = errors or lines or ["no output"]
    return f"exit code {code}: {reasons[-1]}"


def _forward_signal(processes: Sequence[subprocess.Popen[bytes]], signal_number: int) -> None:
    """Send a signal to runs, which then save and exit, and wait for that. A second Ctrl-C makes them exit at once."""
    for process in processes:
        process.send_signal(signal_number)
    while True:
        try:
            for process in processes:
                process.wait()
            return
        except KeyboardInterrupt:
            for process in processes:
                process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM inside the context. It is a KeyboardInterrupt, as Ctrl-C raises.

    `train_together`, which waits for the runs in progress, catches it and forwards the signal to them.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
