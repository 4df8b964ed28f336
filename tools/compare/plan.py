"""What compare.py is to train: modes, seeds, the settings of every run, and whether this machine can do all of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tools.common.command_line import ToolLine, check_one_training
from tools.common.settings import told
from utils.config import Config, differences, load_config, to_yaml
from utils.errors import UserError
from utils.files import write_atomically

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode

T = TypeVar("T")
SET_BY_IT = {
    "AMP.ENABLED": "the modes are compared: name them by -modes",
    "AMP.DTYPE": "the modes are compared: name them by -modes",
    "AMP.LEVEL": "the modes are compared: name them by -modes",
    "AMP.TF32": "tf32 is one of the -modes",
    "SEED": "the seeds are given by -seeds",
    "OUTPUT": "-output DIR is the folder of all the runs",
    "TRAIN.LAST_EPOCH": "every run begins at its beginning",
    "MAX_TIME": "interrupt it by Ctrl-C when you like; the same command goes on",
}
"""Settings that the user cannot give as well, and what to give instead."""
OF_ONE_START = ("OUTPUT", "SAVE", "MODEL.RESUME")


@dataclass(frozen=True)
class Run:
    """One training: a mode with a seed, its settings and its place."""

    mode: str
    seed: int
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.mode}, seed {self.seed}"

    @property
    def settings_file(self) -> Path:
        """What the process is given by -cfg."""
        return self.folder.with_name(f"{self.folder.name}.yaml")


@dataclass(frozen=True)
class Plan:
    modes: tuple[Mode, ...]
    """The others are compared with the first."""
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    """In the order in which they are trained."""
    device: str
    """Its name."""
    many: bool
    """Whether the runs are main_multi_gpu.py's: -ngpus was given."""
    remarks: tuple[str, ...]


def read_seeds(text: str) -> tuple[int, ...]:
    """`3` is 0, 1, 2; `0,1,5` is what it says."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    seeds = tuple(numbers) if "," in text else tuple(range(sum(numbers)))
    if not seeds or len(numbers) < len(parts):
        raise UserError(f"-seeds {text}: takes how many, such as 3, or which, such as 0,1,5.")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"-seeds {text}: the same seed twice is the same run twice; give others.")
    return seeds


def read_modes(text: str, config: Config, device: torch.device) -> tuple[Mode, ...]:
    """`fp32,bf16,O2-fp16`; a level alone (`O2`) and `auto` are what -amp makes of them on this device."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    modes = [_mode(name, config, device) for name in named]
    if len(modes) < 2:
        raise UserError(f"-modes {text}: name two or more, such as fp32,bf16; the others are compared with the first.")
    seen: dict[str, str] = {}
    for name, mode in zip(named, modes, strict=True):
        if mode.name in seen:
            raise UserError(f"-modes {text}: {seen[mode.name]} and {name} are both {mode.name} here; name it once.")
        seen[mode.name] = name
    return tuple(modes)


def _mode(name: str, config: Config, device: torch.device) -> Mode:
    from tools.common.precisions import mode_of, unknown_mode

    mode = mode_of(name, config.AMP, device)
    if mode is None:
        raise unknown_mode(name)
    return mode


def plan(line: ToolLine, out: Path) -> Plan:
    """Everything that can be wrong is found here, before anything is trained."""
    loaded = line.load()
    for key, instead in SET_BY_IT.items():
        given_by = "on the command line" if key in line.run.words else line.run.flags.get(key, ("", ""))[1]
        if given_by:
            raise UserError(f"compare.py: {key} ({given_by}) cannot be given; {instead}.")
    check_one_training(loaded, "compare.py")
    seeds = read_seeds(line.own["SEEDS"][0] if "SEEDS" in line.own else "3")

    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    device = pick_device(loaded.config.DEVICE, ALONE)
    named = line.own["MODES"][0] if "MODES" in line.own else "fp32,auto"
    # Whoever asks a GPU holds some of its memory to his end, and in exclusive mode all of it: that must not be us.
    many = loaded.config.NGPUS != -1 or "NGPUS" in {**line.run.flags, **line.run.words}
    asked = named, loaded.config, device, many
    modes, remarks, name = in_another_process(_judged, *asked) if device.type == "cuda" else _judged(*asked)
    runs = tuple(
        Run(mode.name, seed, _settings(line, mode, seed), out / f"{mode.name}-{seed}")
        for nth, seed in enumerate(seeds)
        # There and back: what is first with one seed is last with the next, so that none profits from a drift.
        for mode in modes[:: -1 if nth % 2 else 1]
    )
    _check_all(runs)
    return Plan(modes, seeds, runs, name, many, (*loaded.notes, *loaded.warnings, *remarks))


def in_another_process(work: Callable[..., T], *given: object) -> T:
    """What it gives back, or raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *given).result()


def _judged(named: str, config: Config, device: torch.device, many: bool) -> tuple[tuple[Mode, ...], list[str], str]:
    """The modes, what is to be told of them, and what the device is called: all that the device itself is asked."""
    from engine.machine.device import describe_one, visible_devices

    modes = read_modes(named, config, device)
    remarks = _remarks(modes, config, device)
    if many:
        remarks.append(f"each run: {visible_devices(config)} process(es), as main_multi_gpu.py starts them (-ngpus)")
    return modes, remarks, describe_one(device)


def _settings(line: ToolLine, mode: Mode, seed: int) -> Config:
    amp = mode.amp(line.load().config.AMP)
    keys = dict.fromkeys(("ENABLED", "DTYPE", "LEVEL", "TF32", *mode.settings))
    given = {f"AMP.{key}": (getattr(amp, key), "-modes") for key in keys}
    return line.load({**given, "SEED": (seed, "-seeds")}).config


def _remarks(modes: Iterable[Mode], config: Config, device: torch.device) -> list[str]:
    """What cannot run here is an error; what runs and tells nothing of speed is told."""
    from tools.common.precisions import cannot, is_emulated, lacks_arithmetic

    told = []
    for mode in modes:
        reason = cannot(mode, config, device)
        if reason:
            raise UserError(f"-modes {mode.name}: {reason}")
        if lacks_arithmetic(mode, device):
            told.append(f"{mode.name}: this CPU has no fp16 arithmetic; it will be many times slower than fp32")
        if is_emulated(mode, device):
            told.append(f"{mode.name}: emulated on this device; its accuracy counts, its speed says nothing")
    return told


def _check_all(runs: tuple[Run, ...]) -> None:
    """What the program itself would find wrong, and runs of other settings in the way."""
    from engine.preflight import check

    for run in runs:
        if run.seed == runs[0].seed:
            check(run.config)
        if run.settings_file.exists():
            _check_same(run)
        elif run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"{run.folder}: this lies in the way of a run, and compare.py did not make it.")


def _check_same(run: Run) -> None:
    before = load_config(str(run.settings_file)).config
    other = [text for text in differences(before, run.config) if text.partition(":")[0] not in OF_ONE_START]
    if other:
        raise UserError(
            f"{run.folder}: was trained with other settings: {'; '.join(other)}. "
            "Give the same settings to go on with it, or another -out."
        )


def write_settings(run: Run) -> None:
    """For the run's process; and for a later call to compare with."""
    if not run.settings_file.exists():
        run.settings_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.settings_file, f"# {run.name}; made by scripts/compare.py\n{to_yaml(run.config)}")


def command_of(run: Run, many: bool) -> list[str]:
    """How the program is started for it."""
    script = "main_multi_gpu.py" if many else "main_single_gpu.py"
    return [script, "-cfg", str(run.settings_file), "-output", str(run.folder), "-resume", "auto"]


def in_words(config: Config) -> dict[str, Any]:
    """What tells the settings of all runs from the defaults."""
    return {key: value for key, value in told(config).items() if key not in SET_BY_IT}
