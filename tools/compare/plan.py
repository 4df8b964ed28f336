"""Plan of a comparison: contenders, seeds, the settings of every run, and whether this machine can train them all."""

from __future__ import annotations

import math
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tools.common.command_line import ToolLine, check_one_training
from tools.common.comparison.judged import Judged, judged_by
from tools.common.settings import non_defaults
from tools.common.turns import alternating_order
from tools.compare.contenders import (
    MODES,
    Axis,
    Contender,
    contenders_of,
    first_as_baseline,
    modes_axis,
    read_axes,
    refuse_equal,
    refuse_fixed,
)
from utils.config import Config, differences, load_config, to_yaml
from utils.config.kinds import Fold
from utils.errors import UserError
from utils.files import write_atomically
from utils.parent import die_with_parent
from utils.text import counted

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode
    from utils.config import TrainConfig

T = TypeVar("T")
DEFAULT_MODES = "fp32,auto"
USE_MODES = "list the precisions to compare in -modes"
SET_BY_MODE = {
    "AMP.ENABLED": USE_MODES,
    "AMP.DTYPE": USE_MODES,
    "AMP.LEVEL": USE_MODES,
    "AMP.TF32": "list tf32 in -modes",
}
"""Settings that each of -modes sets -> what to give instead."""
SET_PER_RUN = {
    "SEED": "give -seeds",
    "OUTPUT": "give -output DIR, the folder of all runs",
    "TRAIN.LAST_EPOCH": "leave it out, since every run starts at epoch 1",
    "MAX_TIME": "interrupt with Ctrl-C instead; the same command resumes",
}
"""Settings that compare.py sets for each run -> what to give instead."""
SET_PER_FOLD = {
    "DATA.FOLD": "leave out DATA.FOLD to validate on each fold, or leave out -folds to validate only on this one"
}
"""The same with -folds."""
DATA = ("DATA.DATASET", "DATA.DATA_PATH", "DATA.VAL_FRACTION", "DATA.GROUP", "DATA.EXCLUDE", "DATA.PART", "cfg")
"""What may choose other validation images."""
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


@dataclass(frozen=True)
class Stage:
    """How far all runs are trained before the better half of the contenders goes on (-halving)."""

    updates: int | None = None
    """None: to the end of the training, without -halving."""
    words: str = ""


@dataclass(frozen=True)
class Plan:
    contenders: tuple[str, ...]
    """The first is the baseline."""
    judged: Judged
    seeds: tuple[int, ...]
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
    stages: tuple[Stage, ...] = (Stage(),)

    @property
    def last_stage(self) -> Stage:
        return self.stages[-1]

    def rounds(self) -> str:
        """The seeds or folds of every contender, for the log."""
        if self.folds is not None:
            return f"each on {self.folds} folds, with seed {self.seeds[0]}"
        return f"each with seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"


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


def read_rounds(line: ToolLine) -> tuple[tuple[int, Fold | None], ...]:
    """Seed and fold of each run of a contender, from -seeds and -folds."""
    folds = line.asked.folds
    if folds is None:
        return tuple((seed, None) for seed in read_seeds(line.asked.seeds))
    seeds: tuple[int, ...] = read_seeds(line.asked.seeds) if "seeds" in line.given else (0,)
    if len(seeds) != 1:
        raise UserError(
            f"-folds {folds} -seeds {line.asked.seeds}: with -folds, all runs have the same seed. Leave -seeds out for "
            "seed 0, or give one seed with a comma after it: -seeds 7,"
        )
    return tuple((seeds[0], Fold(number, folds)) for number in range(1, folds + 1))


def read_modes(text: str, config: Config, device: torch.device) -> tuple[Mode, ...]:
    """Parse -modes. A level alone (`O2`) and `auto` are resolved as by -amp on this device."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    modes = [_mode(name, config, device) for name in named]
    if len(modes) < 2:
        raise UserError(f"-modes {text}: list at least two, such as fp32,bf16; the first is the baseline.")
    seen: dict[str, str] = {}
    for name, mode in zip(named, modes, strict=True):
        if mode.name in seen:
            raise UserError(f"-modes {text}: {seen[mode.name]} and {name} are both {mode.name} here; list one of them.")
        seen[mode.name] = name
    return tuple(modes)


def _mode(name: str, config: Config, device: torch.device) -> Mode:
    from tools.common.precisions import mode_of, unknown_mode

    mode = mode_of(name, config.AMP, device)
    if mode is None:
        raise unknown_mode(name)
    return mode


def make_plan(line: ToolLine, out: Path) -> Plan:
    """Plan the runs. Every error that can be found before training is found here."""
    rounds, (modes_text, axes) = read_rounds(line), what_varies(line.asked)
    _refuse_given(line, SET_PER_RUN | (SET_PER_FOLD if line.asked.folds else {}) | (SET_BY_MODE if modes_text else {}))
    refuse_fixed(axes, line)
    base = Contender(tuple(axis.values[0] for axis in axes)).load(line)
    check_one_training(base, "compare.py")

    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    device = pick_device(base.config.DEVICE, ALONE)
    # A process that queries a GPU keeps a CUDA context on it until it ends, and in exclusive mode the whole GPU.
    many = base.config.NGPUS != -1 or "NGPUS" in {**line.run.flags, **line.run.words}
    query = modes_text, base.config, device, many
    modes, remarks, name, processes = in_another_process(_query, *query) if device.type == "cuda" else _query(*query)
    axes = (*([modes_axis(modes)] if modes else []), *axes)
    contenders = first_as_baseline(contenders_of(axes, line.asked.pairs), line.asked.baseline)
    loaded = {contender.name: contender.load(line) for contender in contenders}
    refuse_equal(loaded)
    judged = judged_by(line.asked.metric, line.asked.weights, [one.config for one in loaded.values()])
    runs = tuple(
        Run(contender.name, seed, _settings(line, contender, seed, fold), out / _folder(contender, seed, fold), fold)
        for (seed, fold), contender in alternating_order(contenders, rounds)
    )
    _check_all(runs)
    if any(key in DATA for axis in axes for key in (axis.name, *axis.values[0].keys)):
        remarks.append("what varies may choose other validation images: then the metrics cannot be compared")
    seeds = tuple(dict.fromkeys(seed for seed, _ in rounds))
    notes = dict.fromkeys(text for one in loaded.values() for text in (*one.notes, *one.warnings))
    varied = tuple(axis.name for axis in axes if axis.name != MODES)
    counted_rounds, remarks = (seeds, line.asked.folds), (*notes, *remarks)
    stages = (Stage(),)
    if line.asked.halving:
        stages = halving_stages(len(contenders), base.config.TRAIN, updates_per_epoch(base.config, processes))
        if (first := stages[0].updates) is not None and len(stages) > 1:
            remarks = (*remarks, *_within_warm_up(first, base.config.TRAIN, stages[-1].updates or first))
    more = varied, line.asked.budget_min, stages
    return Plan(tuple(loaded), judged, *counted_rounds, runs, name, many, remarks, *more)


def _within_warm_up(first: int, train: TrainConfig, end: int) -> list[str]:
    """A remark, if contenders are dropped before their learning rate is reached."""
    if first > train.WARMUP_EPOCHS * end / train.NUM_EPOCHS:
        return []
    return [
        f"-halving drops contenders after {counted(first, 'update')}, while the learning rate still rises "
        f"(TRAIN.WARMUP_EPOCHS {train.WARMUP_EPOCHS:g}): for a comparison of learning rates, use a shorter warm-up"
    ]


def updates_per_epoch(config: Config, processes: int) -> int:
    import torch

    from engine.setup import training_data
    from utils.distributed.world import World

    _, loader = training_data(config, World(size=processes, local_size=processes), torch.device("cpu"))
    loader.close()
    return loader.order.updates


def halving_stages(contenders: int, train: TrainConfig, per_epoch: int) -> tuple[Stage, ...]:
    """Each stage is twice as long as the one before; the last two contenders train to the end."""
    stages: dict[int, Stage] = {}
    end = min(train.NUM_EPOCHS * per_epoch, train.MAX_UPDATES or sys.maxsize)
    for left in range(max(1, math.ceil(math.log2(contenders))) - 1, -1, -1):
        updates = max(1, round(end / 2**left / per_epoch)) * per_epoch if left else end
        updates = min(updates, end)
        epochs = f"{counted(updates / per_epoch, 'epoch')} of {train.NUM_EPOCHS}"
        stages[updates] = Stage(updates, epochs if updates % per_epoch == 0 else counted(updates, "update"))
    return tuple(stages.values())


def what_varies(asked: Namespace) -> tuple[str | None, tuple[Axis, ...]]:
    """The text of -modes, if precisions vary, and the other axes. `-vary amp=A,B` is `-modes A,B`."""
    texts = [*(asked.vary or ())]
    modes = [text.partition("=")[2] for text in texts if text.partition("=")[0].lstrip("-") == "amp"]
    axes = read_axes([text for text in texts if text.partition("=")[0].lstrip("-") != "amp"])
    if len(modes) + (asked.modes is not None) > 1:
        raise UserError("the precisions are listed twice; give one -modes, or one -vary amp=...")
    if not axes and not modes and asked.modes is None:
        return DEFAULT_MODES, ()
    return asked.modes or next(iter(modes), None), axes


def _refuse_given(line: ToolLine, refused: Mapping[str, str]) -> None:
    for key, instead in refused.items():
        if given_by := line.given_by(key):
            raise UserError(f"{key} ({given_by}): cannot be given here; {instead}.")


def _folder(contender: Contender, seed: int, fold: Fold | None) -> str:
    return f"{contender.file_name}-{seed}" if fold is None else f"{contender.file_name}-fold{fold.number}"


def in_another_process(work: Callable[..., T], *given: object) -> T:
    """Call `work` in a new process; return its result, or raise its error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with_parent) as process:
        return process.submit(work, *given).result()


def _query(
    modes_text: str | None, config: Config, device: torch.device, many: bool
) -> tuple[tuple[Mode, ...], list[str], str, int]:
    """Everything that needs the device itself: modes, remarks on them, the device's name, processes of a run."""
    from engine.machine.device import describe_device, visible_devices

    modes = () if modes_text is None else read_modes(modes_text, config, device)
    remarks, processes = _remarks(modes, config, device), 1
    if many:
        processes = visible_devices(config)
        remarks.append(f"each run: {counted(processes, 'process')}, started by main_multi_gpu.py (-ngpus)")
    return modes, remarks, describe_device(device), processes


def _settings(line: ToolLine, contender: Contender, seed: int, fold: Fold | None) -> Config:
    of_fold = {} if fold is None else {"DATA.FOLD": (str(fold), "-folds")}
    return contender.load(line, {"SEED": (seed, "-seeds"), **of_fold}).config


def _remarks(modes: Iterable[Mode], config: Config, device: torch.device) -> list[str]:
    """Refuse modes that cannot run on this device; remark on those whose speed is meaningless."""
    from tools.common.precisions import cannot, is_emulated, lacks_arithmetic

    remarks = []
    for mode in modes:
        reason = cannot(mode, config, device)
        if reason:
            raise UserError(f"-modes {mode.name}: {reason}")
        if lacks_arithmetic(mode, device):
            remarks.append(
                f"{mode.name}: this CPU has no fp16 arithmetic; expect this mode to be many times slower than fp32"
            )
        if is_emulated(mode, device):
            remarks.append(f"{mode.name}: emulated on this device; its accuracy is meaningful, its speed is not")
    return remarks


def _check_all(runs: tuple[Run, ...]) -> None:
    """Refuse settings that training would refuse, and folders with other runs."""
    from engine.preflight import check

    for run in runs:
        if (run.seed, run.fold) == (runs[0].seed, runs[0].fold):
            check(run.config)
        if run.settings_file.exists():
            _check_same(run)
        elif run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"{run.folder}: already exists and was not made by compare.py; choose another -output.")


def _check_same(run: Run) -> None:
    before = load_config(str(run.settings_file)).config
    changed = [text for text in differences(before, run.config) if text.partition(":")[0] not in MAY_DIFFER]
    if changed:
        raise UserError(
            f"{run.folder}: was trained with other settings: {'; '.join(changed)}. "
            "Give the same settings to resume it, or choose another -output."
        )


def write_settings(run: Run) -> None:
    """Write the file for the run's process, which a later call compares its settings with."""
    if not run.settings_file.exists():
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, f"# {run.name}; made by scripts/compare.py\n{to_yaml(run.config)}")


def command_of(run: Run, many: bool, stage: Stage) -> list[str]:
    """Command line that trains or resumes the run."""
    script = "main_multi_gpu.py" if many else "main_single_gpu.py"
    command = [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]
    return [*command, f"TRAIN.MAX_UPDATES={stage.updates}"] if stage.updates else command


def compared_settings(config: Config) -> dict[str, Any]:
    """Settings of the baseline's runs that differ from the defaults."""
    set_here = SET_BY_MODE | SET_PER_RUN | SET_PER_FOLD
    return {key: value for key, value in non_defaults(config).items() if key not in set_here}
