"""The runs of a comparison: a plan, whose settings are all checked before training, and their training.

Each run trains in a process of its own, with a folder and a file of settings of its own.
"""

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
TO_JUDGE_ONE_RECIPE = "judge one recipe with -folds 5, without -modes"
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
REFUSED_UNLESS_EPOCHS_AUTO = {
    "MAX_TIME": "interrupt with Ctrl-C instead; the same command resumes; or give -epochs auto, too"
}
"""Settings that are refused unless TRAIN.NUM_EPOCHS is auto -> what to do instead."""
SET_PER_FOLD = {
    "DATA.FOLD": "leave out DATA.FOLD to validate on each fold, or leave out -folds to validate only on this one"
}
"""Settings that compare.py sets for each run with -folds -> what to give instead."""
NOT_VARIED = (
    SET_PER_RUN
    | REFUSED_UNLESS_EPOCHS_AUTO
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
    """One value of an axis: the recipe or the settings that it stands for."""

    label: str
    """Its part in the names of contenders: bf16, SAMPLER=balanced"""
    cfg: str | None = None
    """Path of the recipe, if recipes vary."""
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Key of a setting -> its value, and the flag that gave it."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Key of a setting -> its value as text, from KEY=VALUE."""

    @property
    def keys(self) -> set[str]:
        """Keys of the settings that it sets."""
        return self.flags.keys() | self.words.keys()

    @classmethod
    def of_mode(cls, mode: Mode) -> Value:
        """The value of the axis `modes` that stands for this precision."""
        return cls(mode.name, flags={f"AMP.{key}": (given, "-modes") for key, given in mode.settings.items()})


Axes = dict[str, tuple[Value, ...]]
"""What varies (a setting, the name of a flag, cfg or modes) -> its values, of which the first is the baseline's."""


@dataclass(frozen=True)
class Contender:
    """One combination of settings that are compared: one value of each axis."""

    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ", ".join(value.label for value in self.values)

    @property
    def file_name(self) -> str:
        """The name without characters that a shell or the command line would take for something else."""
        return re.sub(r"[^A-Za-z0-9.+-]+", "-", self.name.replace("_", "-")).strip("-.")

    def load(self, line: ToolLine, more: Mapping[str, tuple[Any, str]] | None = None) -> Loaded:
        """Read the contender's settings: those of the command line, those of its values, and `more`.

        `more`: key of a setting -> its value, and the flag or script that gives it.
        """
        cfg = line.run.cfg
        flags = dict[str, tuple[Any, str]]()
        words = dict(line.run.words)  # KEY=VALUE of the command line; the contender's come on top
        for value in self.values:
            cfg = value.cfg or cfg
            flags |= value.flags
            words |= value.words
        settings_of_run = replace(line.run, cfg=cfg, words=words)
        return replace(line, run=settings_of_run).load({**flags, **(more or {})})

    def run(self, line: ToolLine, out: Path, seed: int, fold: Fold | None, loaded: Loaded, metric: Metric) -> Run:
        """Return the run of this contender with this seed and fold, in a folder below `out`.

        `loaded`: the contender's settings as `load` returns them. `metric`: the one that decides the comparison. If it
        can choose the best checkpoint of a run, it does so, unless the settings name another metric for that.
        """
        # Settings of this run alone, each as its value and who gives it.
        own_settings: dict[str, tuple[Any, str]] = {"SEED": (seed, "-seeds")}
        folder_ending = f"{seed}"
        if fold is not None:
            own_settings["DATA.FOLD"] = (str(fold), "-folds")
            folder_ending = f"fold{fold.number}"
        if loaded.config.TRAIN.NUM_EPOCHS != AUTO:  # a recipe's time limit would leave the run unfinished
            own_settings["MAX_TIME"] = (None, "compare.py")
        run = Run(self.name, seed, loaded.config, out / f"{self.file_name}-{folder_ending}", fold)
        if metric.decides and loaded.is_default(BEST_BY):
            best_by = metric.name
            has_begun = run.settings_file.exists()
            if has_begun:  # it keeps the metric by which it chooses its best checkpoint
                best_by = load_config(str(run.settings_file)).config.SAVE_BEST_BY
            own_settings[BEST_BY] = (best_by, "-metric")
        return replace(run, config=self.load(line, own_settings).config)


def read_axes(vary: Sequence[str] | None) -> Axes:
    """Parse the -vary flags, such as KEY=a,[b,c]."""
    texts_of: dict[str, list[str]] = {}
    for text in vary or ():
        before_equals, _, after_equals = text.partition("=")
        name = before_equals.strip().removeprefix("-")
        values = [value.strip() for value in _split_at_commas(after_equals)]
        if len(values) < 2 or not all(values):
            raise UserError(f"-vary {text}: name a setting or flag and at least two values, {EXAMPLE}.")
        if len(set(values)) < len(values):
            raise UserError(f"-vary {text}: a value is listed twice; list each one once.")
        if name in texts_of:
            raise UserError(f"-vary {name}: given twice; list all its values in one -vary.")
        texts_of[name] = values

    # Labels are short, such as SAMPLER for DATA.SAMPLER, unless two settings would have the same one.
    short_names = [name.rpartition(".")[2] for name in texts_of]
    axes: Axes = {}
    for (name, values), short_name in zip(texts_of.items(), short_names, strict=True):
        label = short_name if short_names.count(short_name) == 1 else name
        axes[name] = tuple(_parse_value(name, label, text) for text in values)
    return axes


def _split_at_commas(text: str) -> list[str]:
    """Split a text at its commas, but not at those inside brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        if letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse_value(name: str, label: str, text: str) -> Value:
    """Parse one of the values of -vary. `name` is what varies, `label` the short form of it for names of contenders.

    Raises UserError if `name` is no setting or flag, if the flag does not take the value, or if it cannot be varied.
    """
    if name == "cfg":
        return Value(Path(text).stem, cfg=text)
    flag = BY_NAME.get(name)
    if flag is not None and flag.keys:
        try:
            flag_value = [text] if flag.append else flag.kind(text)  # flags that may be repeated collect a list
        except ValueError as error:
            raise UserError(f"-vary {name}={text}: {error}.") from None
        settings_of_flag = command_line({name: flag_value}, {}).flags
        value = Value(f"{label}={redacted(text)}", flags=settings_of_flag)
    elif name in settings():
        value = Value(f"{label}={redacted(text)}", words={name: text})
    elif name.isupper():
        raise UserError(f"-vary {name}: unknown key.{suggest(name)}")
    else:
        names_to_vary = ["cfg", *(flag.name for flag in BY_NAME.values() if flag.keys)]
        raise UserError(f"-vary {name}: neither a setting nor a flag that sets one.{nearest(name, names_to_vary)}")
    for key, instead in NOT_VARIED.items():
        if key in value.keys:
            raise UserError(f"-vary {name}: {key} cannot be varied; {instead}.")
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


def read_seeds(text: str) -> tuple[int, ...]:
    """Parse -seeds: `3` means three seeds, which are 0, 1 and 2; `0,1,5` is a list of seeds, and so is `5,`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    is_list = "," in text
    if is_list:
        seeds = tuple(numbers)
    else:
        number_of_seeds = sum(numbers)  # the only number, or 0 if the text is none
        seeds = tuple(range(number_of_seeds))
    if not seeds or len(numbers) < len(parts):
        raise UserError(f"-seeds {text}: give a number of seeds, such as 3, or a list, such as 0,1,5.")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"-seeds {text}: a seed is listed twice; list each one once.")
    return seeds


def read_modes(text: str, config: Config, device: torch.device) -> tuple[Mode, ...]:
    """Parse -modes. A level alone (`O2`) and `auto` are resolved as by -amp on this device.

    Raises UserError if two of them are the same precision here.
    """
    from tools.common.precisions import modes_named

    named_modes = modes_named(text, config, device)
    given_name_of = dict[str, str]()
    for given_name, mode in named_modes:
        if mode.name in given_name_of:
            raise UserError(
                f"-modes {text}: {given_name_of[mode.name]} and {given_name} are both {mode.name} on this device; list "
                f"others, such as -modes fp32,bf16, compare settings with -vary, or {TO_JUDGE_ONE_RECIPE}."
            )
        given_name_of[mode.name] = given_name
    return tuple(mode for _, mode in named_modes)


def read_rounds(line: ToolLine) -> list[tuple[int, Fold | None]]:
    """Return seed and fold of each round, in which every contender trains once.

    Without -folds, a round is a seed, and its fold is None. With -folds, a round is a fold, and all have one seed.
    """
    asked = line.asked
    folds = asked.folds
    if folds is None:
        return [(seed, None) for seed in read_seeds(asked.seeds)]  # -seeds is 3 by default
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
    """Raise UserError if the command line has one of the settings in `refused`: key -> what to do instead.

    A refused setting would have no effect, or it would override what varies or what compare.py sets for each run.
    """
    for key, instead in refused.items():
        given_by = line.given_by(key)
        if given_by:
            raise UserError(f"{key} ({given_by}): cannot be given here; {instead}.")


def load_all(contenders: Sequence[Contender], line: ToolLine) -> dict[str, Loaded]:
    """Read the settings of each contender, by its name. No two may have the same folder, or the same settings."""
    contender_of_folder: dict[str, str] = {}
    for contender in contenders:
        other = contender_of_folder.get(contender.file_name)
        if other:
            raise UserError(f"-vary: {other} and {contender.name} would have the same folder; give one another name.")
        contender_of_folder[contender.file_name] = contender.name
    loaded = {contender.name: contender.load(line) for contender in contenders}
    for (first_name, first), (second_name, second) in itertools.combinations(loaded.items(), 2):
        if not differences(first.config, second.config):
            raise UserError(f"{first_name} and {second_name} have the same settings here; list one of them.")
    return loaded


def make_plan(line: ToolLine, out: Path) -> Plan:
    """Plan the runs: what varies, all combinations of that as contenders, and a run for each contender and round.

    Every error that can be found before training is found here.
    """
    asked = line.asked
    given_axes = read_axes(asked.vary)
    rounds = read_rounds(line)
    baseline, modes_text = _load_baseline(line, given_axes)

    from engine.machine.device import pick_device
    from tools.common.sessions import own_process
    from utils.distributed.world import ALONE

    # Query the device. A process that queries a GPU keeps a CUDA context on it until it ends, and in exclusive mode the
    # whole GPU. So another process queries it.
    device = pick_device(baseline.config.DEVICE, ALONE)
    several_processes = baseline.config.NGPUS != -1 or bool(line.given_by("NGPUS"))
    if device.type == "cuda":
        with own_process() as process:
            device_facts = process.submit(_query, modes_text, baseline.config, device, several_processes).result()
    else:
        device_facts = _query(modes_text, baseline.config, device, several_processes)

    remarks = list(device_facts.remarks)
    varied_keys = set(given_axes)
    for first_value, *_ in given_axes.values():  # all values of an axis set the same keys
        varied_keys |= first_value.keys
    if not varied_keys.isdisjoint(validation_keys(baseline.config) + ["DATA.PART", "cfg"]):
        remarks.append("what varies may change what is validated on: then the metrics cannot be compared")

    # Contenders are all combinations of the values of all axes. Modes are the first axis. If nothing varies, the only
    # contender is named after the recipe or the run.
    axes = given_axes
    if device_facts.modes:
        axes = {"modes": tuple(map(Value.of_mode, device_facts.modes)), **given_axes}
    elif not given_axes:
        recipe = Path(line.run.cfg or baseline.config.MODEL.NAME).absolute()
        axes = {"cfg": (Value(recipe.parent.name if recipe.name == CONFIG else recipe.stem),)}
    contenders = tuple(map(Contender, itertools.product(*axes.values())))
    loaded_by_name = load_all(contenders, line)
    judged = judged_by(asked.metric, asked.weights, [loaded.config for loaded in loaded_by_name.values()])

    # Plan a run of each contender in each round.
    runs = []
    for (seed, fold), contender in alternating_order(contenders, rounds):
        runs.append(contender.run(line, out, seed, fold, loaded_by_name[contender.name], judged.metric))
    check_runs(runs)
    best_by = ", ".join(dict.fromkeys(run.config.SAVE_BEST_BY for run in runs))
    if asked.metric or best_by != judged.metric.name:
        verdict = f"the verdict is of {judged.words} after the last epoch"
        remarks.append(f"{BEST_BY} {best_by}: chooses the best checkpoint of each run; {verdict}")

    # A remark on the settings of several contenders is logged once.
    remarks_on_settings = dict[str, None]()
    for loaded in loaded_by_name.values():
        remarks_on_settings |= dict.fromkeys(loaded.notes + loaded.warnings)
    return Plan(
        contenders=tuple(loaded_by_name),
        judged=judged,
        folds=asked.folds,
        runs=tuple(runs),
        device=device_facts.name,
        several_processes=several_processes,
        remarks=tuple(remarks_on_settings) + tuple(remarks),
        varied=tuple(given_axes),
        budget_min=asked.budget_min,
        these_images=asked.these_images,
    )


def _load_baseline(line: ToolLine, axes: Axes) -> tuple[Loaded, str | None]:
    """Return the settings of the baseline, and the text of -modes; None if modes are not compared.

    The baseline has the first value of each of `axes`, which are what -vary gives. Without -modes, -vary and -folds,
    DEFAULT_MODES are compared. Raises UserError for settings on the command line that this comparison varies or sets
    itself.
    """
    asked = line.asked
    if "cfg" in axes and line.run.cfg is not None:
        raise UserError(f"-cfg {line.run.cfg}: cannot be given here; list it in -vary cfg=...")
    modes_text = asked.modes or (None if axes or asked.folds else DEFAULT_MODES)
    if modes_text and len([mode for mode in modes_text.split(",") if mode.strip()]) < 2:
        example = "such as fp32,bf16; the first is the baseline"
        raise UserError(f"-modes {modes_text}: list at least two, {example}. Or {TO_JUDGE_ONE_RECIPE}.")

    # Refuse settings that each run, fold, mode or value of an axis sets.
    refused = dict(SET_PER_RUN)
    if asked.folds:
        refused |= SET_PER_FOLD
    if modes_text:
        refused |= SET_BY_MODE
    for name, values in axes.items():
        for value in values:
            refused |= dict.fromkeys(value.keys, f"it varies ({name})")
    check_given(line, refused)

    # Loading imports torch, so the command line is checked before.
    first_values = tuple(values[0] for values in axes.values())
    baseline = Contender(first_values).load(line)
    if baseline.config.TRAIN.NUM_EPOCHS != AUTO:
        check_given(line, REFUSED_UNLESS_EPOCHS_AUTO)
    check_one_training(baseline, "compare.py")
    return baseline, modes_text


class DeviceFacts(NamedTuple):
    """Facts for which the device must be queried."""

    modes: tuple[Mode, ...]
    """The precisions to compare, as they are resolved on the device; empty if modes are not compared"""
    remarks: list[str]
    """Lines for the log: on modes that are emulated, and on the processes of each run"""
    name: str
    """Name of the device"""


def _query(modes_text: str | None, config: Config, device: torch.device, several_processes: bool) -> DeviceFacts:
    """Query the device: its name, the precisions that it supports of those in -modes, and remarks for the log.

    `modes_text`: the text of -modes, or None. `several_processes`: whether main_multi_gpu.py trains the runs.
    """
    from engine.machine.device import describe_device, visible_devices
    from tools.common.precisions import emulated

    modes = () if modes_text is None else read_modes(modes_text, config, device)
    remarks = list[str]()
    for mode in modes:
        warning = emulated(mode, device)
        if warning:
            remarks.append(f"{mode.name}: {warning}")
    if several_processes:
        processes = counted(visible_devices(config), "process")
        remarks.append(f"each run: {processes}, started by {started_as('main_multi_gpu.py')} (-ngpus)")
    return DeviceFacts(modes, remarks, describe_device(device))


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
    if not run.settings_file.exists():  # `check_runs` of a later command compares its settings with this file
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, redacted(f"{run.title}\n{to_yaml(run.config)}"))
    script = "main_multi_gpu.py" if several_processes else "main_single_gpu.py"
    command = [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]
    command += arguments
    # The file has no passwords, which URLs may contain. So settings with a password are arguments of each start.
    texts = [f"{key}={one_line(value)}" for key, value in values_by_key(run.config).items()]
    command += [text for text in texts if redacted(text) != text]
    with tempfile.TemporaryFile() as output:
        process = start(command, output)
        try:
            code = process.wait()
        except KeyboardInterrupt as error:
            _forward_signal(process, signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            raise
        if not code:
            return None
        # The reason is the last error that the run printed, or else its last line.
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reasons = errors or lines or ["no output"]
        return f"exit code {code}: {reasons[-1]}"


def _forward_signal(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Send a signal to a run, which then saves and exits, and wait for that. A second Ctrl-C makes it exit at once."""
    process.send_signal(signal_number)
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM inside the context. It is a KeyboardInterrupt, as Ctrl-C raises.

    `train_run`, which waits for the run in progress, catches it and forwards the signal to that run.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
