"""The plan of a comparison: what varies, and a run for each combination and seed or fold.

Every error that can be found before training is found here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.common.command_line import ToolLine, check_one_training
from tools.common.comparison import judged_by
from tools.common.contenders import validation_keys
from tools.common.turns import alternating_order
from tools.compare.runs import Plan, Run, check_runs
from utils.cli import command_line
from utils.config import Config, Loaded, differences, load_config
from utils.config.keys import settings
from utils.config.kinds import AUTO, Fold
from utils.config.words import suggest
from utils.errors import UserError, nearest
from utils.flags import BY_NAME
from utils.program import started_as
from utils.record.run_folder import CONFIG
from utils.text import counted, redacted
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


def file_name(name: str) -> str:
    """Return a name without characters that a shell or the command line would take for something else."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", name.replace("_", "-")).strip("-.")


@dataclass(frozen=True)
class Contender:
    """One combination of settings that are compared: one value of each axis."""

    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ", ".join(value.label for value in self.values)

    @property
    def file_name(self) -> str:
        return file_name(self.name)

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
