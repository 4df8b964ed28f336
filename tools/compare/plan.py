"""Plan of a comparison: modes, seeds, the settings of every run, and whether this machine can train all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tools.common.command_line import ToolLine, check_one_training
from tools.common.settings import non_defaults
from tools.common.turns import alternating_order
from utils.config import Config, differences, load_config, to_yaml
from utils.config.kinds import Fold
from utils.errors import UserError
from utils.files import write_atomically
from utils.parent import die_with_parent
from utils.text import counted

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode

T = TypeVar("T")
USE_MODES = "list the precisions to compare in -modes"
SET_PER_RUN = {
    "AMP.ENABLED": USE_MODES,
    "AMP.DTYPE": USE_MODES,
    "AMP.LEVEL": USE_MODES,
    "AMP.TF32": "list tf32 in -modes",
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
MAY_DIFFER = ("OUTPUT", "SAVE", "MODEL.RESUME")
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True)
class Run:
    """One training: a mode with a seed and perhaps a fold, its settings and its folder."""

    mode: str
    seed: int
    config: Config
    folder: Path
    fold: Fold | None = None

    @property
    def name(self) -> str:
        return f"{self.mode}, seed {self.seed}" if self.fold is None else f"{self.mode}, fold {self.fold}"

    @property
    def settings_file(self) -> Path:
        """The file given to the run by -cfg."""
        return self.folder.with_name(f"{self.folder.name}.yaml")


@dataclass(frozen=True)
class Plan:
    modes: tuple[Mode, ...]
    """The first is the baseline."""
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

    def rounds(self) -> str:
        """The seeds or folds of every mode, for the log."""
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
    """Seed and fold of each run of a mode, from -seeds and -folds."""
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
    loaded = line.load()
    rounds = read_rounds(line)
    for key, instead in (SET_PER_RUN if line.asked.folds is None else SET_PER_RUN | SET_PER_FOLD).items():
        given_by = "on the command line" if key in line.run.words else line.run.flags.get(key, ("", ""))[1]
        if given_by:
            raise UserError(f"{key} ({given_by}): cannot be given here; {instead}.")
    check_one_training(loaded, "compare.py")

    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    device = pick_device(loaded.config.DEVICE, ALONE)
    # A process that queries a GPU keeps a CUDA context on it until it ends, and in exclusive mode the whole GPU.
    many = loaded.config.NGPUS != -1 or "NGPUS" in {**line.run.flags, **line.run.words}
    query = line.asked.modes, loaded.config, device, many
    modes, remarks, name = in_another_process(_query, *query) if device.type == "cuda" else _query(*query)
    runs = tuple(
        Run(mode.name, seed, _settings(line, mode, seed, fold), out / _folder(mode, seed, fold), fold)
        for (seed, fold), mode in alternating_order(modes, rounds)
    )
    _check_all(runs)
    seeds = tuple(dict.fromkeys(seed for seed, _ in rounds))
    remarks = (*loaded.notes, *loaded.warnings, *remarks)
    return Plan(modes, seeds, line.asked.folds, runs, name, many, remarks)


def _folder(mode: Mode, seed: int, fold: Fold | None) -> str:
    return f"{mode.name}-{seed}" if fold is None else f"{mode.name}-fold{fold.number}"


def in_another_process(work: Callable[..., T], *given: object) -> T:
    """Call `work` in a new process; return its result, or raise its error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with_parent) as process:
        return process.submit(work, *given).result()


def _query(words: str, config: Config, device: torch.device, many: bool) -> tuple[tuple[Mode, ...], list[str], str]:
    """Everything that needs the device itself: the modes, remarks on them, and the name of the device."""
    from engine.machine.device import describe_device, visible_devices

    modes = read_modes(words, config, device)
    remarks = _remarks(modes, config, device)
    if many:
        remarks.append(
            f"each run: {counted(visible_devices(config), 'process')}, started by main_multi_gpu.py (-ngpus)"
        )
    return modes, remarks, describe_device(device)


def _settings(line: ToolLine, mode: Mode, seed: int, fold: Fold | None) -> Config:
    amp = mode.amp(line.load().config.AMP)
    keys = dict.fromkeys(("ENABLED", "DTYPE", "LEVEL", "TF32", *mode.settings))
    given = {f"AMP.{key}": (getattr(amp, key), "-modes") for key in keys}
    given["SEED"] = seed, "-seeds"
    if fold is not None:
        given["DATA.FOLD"] = str(fold), "-folds"
    return line.load(given).config


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


def command_of(run: Run, many: bool) -> list[str]:
    """Command line that trains or resumes the run."""
    script = "main_multi_gpu.py" if many else "main_single_gpu.py"
    return [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]


def compared_settings(config: Config) -> dict[str, Any]:
    """Settings of all runs that differ from the defaults."""
    return {key: value for key, value in non_defaults(config).items() if key not in SET_PER_RUN | SET_PER_FOLD}
