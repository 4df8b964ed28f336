"""The runs of a comparison: settings, checked before training; and training, each in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tools.common.command_line import ToolLine, check_one_training
from tools.common.comparison import Judged, judged_by
from tools.common.contenders import validation_keys
from tools.common.run_metrics import is_finished, metrics_of
from tools.common.turns import Budget, alternating_order, progress_bar
from utils.cli import command_line
from utils.config import Config, Loaded, differences, load_config, to_yaml
from utils.config.keys import settings, values_by_key
from utils.config.kinds import AUTO, Fold, one_line
from utils.config.words import suggest
from utils.errors import EXIT_STOPPED, UserError, nearest
from utils.flags import BY_NAME
from utils.log import log
from utils.program import ROOT, as_child, started_as
from utils.record.history import History
from utils.record.run_folder import CONFIG
from utils.text import clock, counted, redacted
from vitamp.files import write_atomically
from vitamp.metrics import Metric

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode


EXAMPLE = "such as -vary DATA.SAMPLER=shuffle,balanced"
DEFAULT_MODES = "fp32,auto"
FOR_ONE = "judge one recipe with -folds 5, without -modes"
SET_BY_MODE = {
    **dict.fromkeys(("AMP.ENABLED", "AMP.DTYPE", "AMP.LEVEL"), "list the precisions to compare in -modes"),
    "AMP.TF32": "list tf32 in -modes",
}
"""Settings that each of -modes sets -> what to give instead."""
SET_PER_RUN = {
    "SEED": "give -seeds",
    "OUTPUT": "give -output DIR, the folder of all runs",
    "TRAIN.LAST_EPOCH": "leave it out, since every run starts at epoch 1",
}
"""Settings that compare.py sets for each run -> what to give instead."""
UNLESS_EPOCHS_AUTO = {"MAX_TIME": "interrupt with Ctrl-C instead; the same command resumes; or give -epochs auto, too"}
SET_PER_FOLD = {
    "DATA.FOLD": "leave out DATA.FOLD to validate on each fold, or leave out -folds to validate only on this one"
}
"""The same with -folds."""
NOT_VARIED = (
    SET_PER_RUN
    | UNLESS_EPOCHS_AUTO
    | {
        "DATA.FOLD": "give -folds",
        "SAVE": "every run has a folder of its own",
        **dict.fromkeys(("NGPUS", "DEVICE"), "it is the same for all runs"),
        "EVAL": "every run trains",
        "MODEL.RESUME": "every run starts anew",
    }
)
"""Settings that -vary refuses -> why, or what to give instead."""
BEST_BY = "SAVE_BEST_BY"
MAY_DIFFER = ("OUTPUT", "SAVE", "MODEL.RESUME")
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True)
class Value:
    """One value of what varies."""

    label: str
    """In the names of contenders: bf16, SAMPLER=balanced"""
    cfg: str | None = None
    """The recipe, if that varies."""
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings, with their source."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Settings as text, as KEY=VALUE gives them."""

    @property
    def keys(self) -> set[str]:
        return self.flags.keys() | self.words.keys()

    @classmethod
    def of_mode(cls, mode: Mode) -> Value:
        return cls(mode.name, flags={f"AMP.{key}": (given, "-modes") for key, given in mode.settings.items()})


Axes = dict[str, tuple[Value, ...]]
"""What varies (a setting, the name of a flag, or MODES) -> its values."""


@dataclass(frozen=True)
class Contender:
    """One value of each axis."""

    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ", ".join(value.label for value in self.values)

    @property
    def file_name(self) -> str:
        """The name without characters that a shell or the command line would take for something else."""
        return re.sub(r"[^A-Za-z0-9.+-]+", "-", self.name.replace("_", "-")).strip("-.")

    def load(self, line: ToolLine, more: Mapping[str, tuple[Any, str]] | None = None) -> Loaded:
        """Its settings. `more`: further ones, with their source."""
        cfg = line.run.cfg
        flags = dict[str, tuple[Any, str]]()
        words = dict(line.run.words)
        for value in self.values:
            cfg = value.cfg or cfg
            flags |= value.flags
            words |= value.words
        run = replace(line.run, cfg=cfg, words=words)
        return replace(line, run=run).load({**flags, **(more or {})})

    def run(self, line: ToolLine, out: Path, seed: int, fold: Fold | None, loaded: Loaded, metric: Metric) -> Run:
        """Its training, in a folder below `out`. `loaded`: its settings. `metric`: the one that decides."""
        own: dict[str, tuple[Any, str]] = {"SEED": (seed, "-seeds")}
        which = f"{seed}"
        if fold is not None:
            own["DATA.FOLD"] = (str(fold), "-folds")
            which = f"fold{fold.number}"
        if loaded.config.TRAIN.NUM_EPOCHS != AUTO:  # a recipe's limit would leave the run unfinished
            own["MAX_TIME"] = (None, "compare.py")
        run = Run(self.name, seed, loaded.config, out / f"{self.file_name}-{which}", fold)
        if metric.decides and loaded.is_default(BEST_BY):
            begun = run.settings_file.exists()  # then it keeps what chooses its best checkpoint
            best_by = load_config(str(run.settings_file)).config.SAVE_BEST_BY if begun else metric.name
            own[BEST_BY] = (best_by, "-metric")
        return replace(run, config=self.load(line, own).config)


def read_axes(texts: Sequence[str] | None) -> Axes:
    """Parse the -vary flags, such as KEY=a,[b,c]."""
    named: dict[str, list[str]] = {}
    for text in texts or ():
        name, _, rest = text.partition("=")
        name = name.strip().removeprefix("-")
        values = [value.strip() for value in _at_top_level(rest)]
        if len(values) < 2 or not all(values):
            raise UserError(f"-vary {text}: name a setting or flag and at least two values, {EXAMPLE}.")
        if len(set(values)) < len(values):
            raise UserError(f"-vary {text}: a value is listed twice; list each one once.")
        if name in named:
            raise UserError(f"-vary {name}: given twice; list all its values in one -vary.")
        named[name] = values
    tails = [name.rpartition(".")[2] for name in named]
    axes: Axes = {}
    for (name, values), tail in zip(named.items(), tails, strict=True):
        label = tail if tails.count(tail) == 1 else name
        axes[name] = tuple(_value(name, label, text) for text in values)
    return axes


def _at_top_level(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        if letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(name: str, label: str, text: str) -> Value:
    if name == "cfg":
        return Value(Path(text).stem, cfg=text)
    flag = BY_NAME.get(name)
    if flag is not None and flag.keys:
        try:
            given = [text] if flag.append else flag.kind(text)
        except ValueError as error:
            raise UserError(f"-vary {name}={text}: {error}.") from None
        value = Value(f"{label}={redacted(text)}", flags=command_line({name: given}, {}).flags)
    elif name in settings():
        value = Value(f"{label}={redacted(text)}", words={name: text})
    elif name.isupper():
        raise UserError(f"-vary {name}: unknown key.{suggest(name)}")
    else:
        known = ["cfg", *(flag.name for flag in BY_NAME.values() if flag.keys)]
        raise UserError(f"-vary {name}: neither a setting nor a flag that sets one.{nearest(name, known)}")
    for key, why in NOT_VARIED.items():
        if key in value.keys:
            raise UserError(f"-vary {name}: {key} cannot be varied; {why}.")
    return value


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
        """The first line of that file, with a hash of lists of images, whose lines may change under the same name."""
        from datasets.exclude import read_rows, text_of

        data = self.config.DATA  # of a table that is written again, scores and order may change by themselves
        rows = data.RELABEL and sorted((name, *row[1:]) for name, row in read_rows(data)[0].items())
        lists = hashlib.sha256(repr((text_of(data), rows)).encode()).hexdigest()
        return f"# {self.name}; made by vitamp, lists {lists}"


@dataclass(frozen=True)
class Plan:
    contenders: tuple[str, ...]
    """The first is the baseline. A cross-validation may have a single one."""
    judged: Judged
    folds: int | None
    """Number of folds; None without cross-validation."""
    runs: tuple[Run, ...]
    """In the order of training."""
    device: str
    """Name of the device."""
    many: bool
    """Whether -ngpus was given, so that main_multi_gpu.py trains the runs."""
    remarks: tuple[str, ...]
    varied: tuple[str, ...] = ()
    """What varies beside -modes."""
    budget_min: float | None = None
    """Minutes after which no run is started."""
    these_images: bool = False
    """Whether the verdict need not hold for other validation images."""

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))


def read_seeds(text: str) -> tuple[int, ...]:
    """Parse -seeds: `3` is 0, 1, 2; `0,1,5` is a list."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    seeds = tuple(numbers) if "," in text else tuple(range(sum(numbers)))
    if not seeds or len(numbers) < len(parts):
        raise UserError(f"-seeds {text}: give a number of seeds, such as 3, or a list, such as 0,1,5.")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"-seeds {text}: a seed is listed twice; list each one once.")
    return seeds


def read_modes(text: str, config: Config, device: torch.device) -> tuple[Mode, ...]:
    """Parse -modes. A level alone (`O2`) and `auto` are resolved as by -amp on this device."""
    from tools.common.precisions import modes_named

    named = modes_named(text, config, device)
    seen = dict[str, str]()
    for name, mode in named:
        if mode.name in seen:
            raise UserError(
                f"-modes {text}: {seen[mode.name]} and {name} are both {mode.name} on this device; list others, "
                f"such as -modes fp32,bf16, compare settings with -vary, or {FOR_ONE}."
            )
        seen[mode.name] = name
    return tuple(mode for _, mode in named)


def read_rounds(line: ToolLine) -> list[tuple[int, Fold | None]]:
    """The seeds; or each of the folds, with one seed."""
    asked = line.asked
    folds = line.asked.folds
    if folds is None:
        return [(seed, None) for seed in read_seeds(asked.seeds)]
    seeds = read_seeds(asked.seeds) if "seeds" in line.given else (0,)
    if len(seeds) != 1:
        raise UserError(
            f"-folds {folds} -seeds {asked.seeds}: with -folds, all runs have the same seed. Leave -seeds out for "
            "seed 0, or give one seed with a comma after it: -seeds 7,"
        )
    if asked.these_images:
        raise UserError("-these_images: with -folds every fold has other images; leave one of the two out.")
    return [(seeds[0], Fold(number, folds)) for number in range(1, folds + 1)]


def check_given(line: ToolLine, refused: Mapping[str, str]) -> None:
    """Refuse what must not be given for all runs: it would win over what varies or is set for each, or be lost."""
    for key, instead in refused.items():
        given_by = line.given_by(key)
        if given_by:
            raise UserError(f"{key} ({given_by}): cannot be given here; {instead}.")


def load_all(contenders: Sequence[Contender], line: ToolLine) -> dict[str, Loaded]:
    """The settings of contenders by their names. No two may have the same folder, or the same settings."""
    names: dict[str, str] = {}
    for contender in contenders:
        other = names.get(contender.file_name)
        if other:
            raise UserError(f"-vary: {other} and {contender.name} would have the same folder; give one another name.")
        names[contender.file_name] = contender.name
    loaded = {contender.name: contender.load(line) for contender in contenders}
    for (one, first), (other, second) in itertools.combinations(loaded.items(), 2):
        if not differences(first.config, second.config):
            raise UserError(f"{one} and {other} have the same settings here; list one of them.")
    return loaded


def make_plan(line: ToolLine, out: Path) -> Plan:
    """Plan the runs. Every error that can be found before training is found here."""
    asked = line.asked
    axes = read_axes(asked.vary)
    rounds = read_rounds(line)
    base, modes_text = _load_baseline(line, axes)

    from engine.machine.device import pick_device
    from tools.common.sessions import own_process
    from utils.distributed.world import ALONE

    device = pick_device(base.config.DEVICE, ALONE)
    # A process that queries a GPU keeps a CUDA context on it until it ends, and in exclusive mode the whole GPU.
    many = base.config.NGPUS != -1 or bool(line.given_by("NGPUS"))
    if device.type == "cuda":
        with own_process() as process:
            of_device = process.submit(_query, modes_text, base.config, device, many).result()
    else:
        of_device = _query(modes_text, base.config, device, many)
    remarks = list(of_device.remarks)
    changed = set(axes)
    for values in axes.values():
        changed |= values[0].keys
    if not changed.isdisjoint(validation_keys(base.config) + ["DATA.PART", "cfg"]):
        remarks.append("what varies may change what is validated on: then the metrics cannot be compared")
    varied = tuple(axes)
    if of_device.modes:
        axes = {"modes": tuple(map(Value.of_mode, of_device.modes)), **axes}
    elif not axes:
        recipe = Path(line.run.cfg or base.config.MODEL.NAME).absolute()
        axes = {"cfg": (Value(recipe.parent.name if recipe.name == CONFIG else recipe.stem),)}
    contenders = tuple(map(Contender, itertools.product(*axes.values())))
    loaded = load_all(contenders, line)
    judged = judged_by(asked.metric, asked.weights, [one.config for one in loaded.values()])

    runs = []
    for (seed, fold), contender in alternating_order(contenders, rounds):
        runs.append(contender.run(line, out, seed, fold, loaded[contender.name], judged.metric))
    check_runs(runs)
    best_by = ", ".join(dict.fromkeys(run.config.SAVE_BEST_BY for run in runs))
    if asked.metric or best_by != judged.metric.name:
        verdict = f"the verdict is of {judged.words} after the last epoch"
        remarks.append(f"{BEST_BY} {best_by}: chooses the best checkpoint of each run; {verdict}")
    of_settings = dict[str, None]()
    for one in loaded.values():
        of_settings |= dict.fromkeys(one.notes + one.warnings)
    return Plan(
        contenders=tuple(loaded),
        judged=judged,
        folds=asked.folds,
        runs=tuple(runs),
        device=of_device.name,
        many=many,
        remarks=tuple(of_settings) + tuple(remarks),
        varied=varied,
        budget_min=asked.budget_min,
        these_images=asked.these_images,
    )


def _load_baseline(line: ToolLine, axes: Axes) -> tuple[Loaded, str | None]:
    """The settings of the first values, and the modes to compare. Refuses what does not go with what varies."""
    asked = line.asked
    if "cfg" in axes and line.run.cfg is not None:
        raise UserError(f"-cfg {line.run.cfg}: cannot be given here; list it in -vary cfg=...")
    modes_text = asked.modes or (None if axes or asked.folds else DEFAULT_MODES)
    if modes_text and len([word for word in modes_text.split(",") if word.strip()]) < 2:
        such = "such as fp32,bf16; the first is the baseline"
        raise UserError(f"-modes {modes_text}: list at least two, {such}. Or {FOR_ONE}.")
    refused = dict(SET_PER_RUN)
    if asked.folds:
        refused |= SET_PER_FOLD
    if modes_text:
        refused |= SET_BY_MODE
    for name, values in axes.items():
        for value in values:
            refused |= dict.fromkeys(value.keys, f"it varies ({name})")
    check_given(line, refused)
    base = Contender(tuple(values[0] for values in axes.values())).load(line)  # imports torch, unless it refuses
    if base.config.TRAIN.NUM_EPOCHS != AUTO:
        check_given(line, UNLESS_EPOCHS_AUTO)
    check_one_training(base, "compare.py")
    return base, modes_text


class OfDevice(NamedTuple):
    """What only the device itself tells."""

    modes: tuple[Mode, ...]
    remarks: list[str]
    name: str


def _query(modes_text: str | None, config: Config, device: torch.device, many: bool) -> OfDevice:
    """The modes, remarks on them and on the number of runs' processes, and the device's name."""
    from engine.machine.device import describe_device, visible_devices
    from tools.common.precisions import emulated

    modes = () if modes_text is None else read_modes(modes_text, config, device)
    remarks = list[str]()
    for mode in modes:
        why = emulated(mode, device)
        if why:
            remarks.append(f"{mode.name}: {why}")
    if many:
        processes = counted(visible_devices(config), "process")
        remarks.append(f"each run: {processes}, started by {started_as('main_multi_gpu.py')} (-ngpus)")
    return OfDevice(modes, remarks, describe_device(device))


def check_runs(runs: Sequence[Run], again: bool = False) -> None:
    """Refuse settings that training would refuse, and folders with other runs. `again`: delete these runs."""
    from engine.preflight import check

    for run in runs:
        if (run.seed, run.fold) == (runs[0].seed, runs[0].fold):
            check(run.config)
        if run.settings_file.exists() and again:
            shutil.rmtree(run.folder, ignore_errors=True)
            run.settings_file.unlink()
        if run.settings_file.exists():
            before = load_config(str(run.settings_file)).config
            changed = [text for text in differences(before, run.config) if text.partition(":")[0] not in MAY_DIFFER]
            title = run.settings_file.read_text(encoding="utf-8").partition("\n")[0]
            if ", lists " in title and title.split()[-1] != run.title.split()[-1]:  # earlier versions noted none
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
    advice: str = "repeat the command to go on"
    """What to do about them."""
    budget: Budget | None = None


def train_all(plan: Plan, after_each: Callable[[Trained], object], budget: Budget | None = None) -> Trained:
    """Train all runs that are not finished, as far as the budget allows: that of an earlier plan, or a new one."""
    budget = budget or (Budget(60 * plan.budget_min) if plan.budget_min else None)
    done = Trained(budget=budget)
    times = dict[str, list[float]]()
    total = len(plan.runs)
    finished = [run for run in plan.runs if is_finished(run.folder)]
    for run in finished:
        times.setdefault(run.contender, []).append(metrics_of(run.folder)["seconds"])
    with terminating(), progress_bar(total, "runs") as bar:
        bar.initial = len(finished)  # they come first, and take none of the time that the bar divides by
        for nth, run in enumerate(sorted(plan.runs, key=lambda run: run not in finished), start=1):
            bar.set_description_str(run.name)
            bar.update(nth - 1 - bar.n)
            # How long it may take: the mean of this contender's runs, or of all if it has none yet, less what is done
            known = times.get(run.contender) or list(itertools.chain.from_iterable(times.values()))
            left = max(0.0, sum(known) / max(len(known), 1) - History.of_run(run.folder).seconds)
            if is_finished(run.folder):
                log.info("%d of %d: %s: already finished", nth, total, run.name)
            elif budget is not None and not budget.allows(left):
                done.left_out.append(run.name)
                if plan.budget_min and left > 60 * plan.budget_min:
                    done.advice = f"{run.name} takes about {clock(left)} more: give a larger -budget_min"
                continue
            else:
                began = time.monotonic()
                why = _train_to_end(run, plan.many)
                if why is None:
                    metrics = metrics_of(run.folder)
                    times.setdefault(run.contender, []).append(metrics["seconds"])
                    last = plan.judged.of(metrics)
                    metric = plan.judged.metric
                    reached = "" if last is None else f"{metric.words} {metric.number(last)}, "
                    log.info("%d of %d: %s: %sin %s", nth, total, run.name, reached, clock(time.monotonic() - began))
                else:
                    done.failed[run.folder.name] = why
                    log.warning("%d of %d: %s failed: %s", nth, total, run.name, why)
            after_each(done)
    after_each(done)
    return done


def _train_to_end(run: Run, many: bool) -> str | None:
    """Train one run until it has finished. Returns the reason if it has not, else None."""
    why = train_run(run, many=many)
    if why is None and run.config.TRAIN.NUM_EPOCHS == AUTO and not is_finished(run.folder):
        log.warning("%s was slower than it had planned; beyond MAX_TIME, it trains what is left", run.name)
        why = train_run(run, many=many)
    return why if why or is_finished(run.folder) else "exit code 0, but it did not finish"


def train_run(run: Run, *words: str, many: bool = False) -> str | None:
    """Train or resume one run, by main_multi_gpu.py if `many`. Returns the reason if it fails, else None.

    `words`: more of the command line.
    """
    if not run.settings_file.exists():  # a later call compares its settings with it
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, redacted(f"{run.title}\n{to_yaml(run.config)}"))
    script = "main_multi_gpu.py" if many else "main_single_gpu.py"
    command = [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]
    command += words
    # No file has the password of a URL, so each start gets the URL as a user gives it.
    texts = [f"{key}={one_line(value)}" for key, value in values_by_key(run.config).items()]
    command += [text for text in texts if redacted(text) != text]
    with tempfile.TemporaryFile() as output:
        process = start(command, output)
        try:
            code = process.wait()
        except KeyboardInterrupt as error:
            _forward(process, signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            raise
        if not code:
            return None
        # The last error that the run printed, or else its last line
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
        last = (errors or lines or ["no output"])[-1]
        return f"exit code {code}: {last}"


def _forward(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal, on which the run saves and exits. A second Ctrl-C makes it exit at once."""
    process.send_signal(number)
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
