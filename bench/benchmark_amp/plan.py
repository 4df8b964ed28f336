"""What a table of benchmark_amp.py is: its flags, contenders and settings, its measurements, and their report.

It imports nothing heavy before a command line is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import ToolLine, about_one_device, check_one_training
from tools.common.tables import in_columns, rounded
from utils.config import Config, Loaded
from utils.errors import UserError
from utils.flags import Flag, whole

if TYPE_CHECKING:
    import torch

    from bench.benchmark_amp.sessions import Worker

ROUNDS = Flag("rounds", "how often each contender is measured", "N", default=3, kind=whole(1))
ON_CPU: dict[str, Any] = {"MODEL.NAME": "vit_tiny_patch16_224", "DATA.BATCH_SIZE": 8}
"""Defaults on a CPU, where the usual ones would take hours."""
ON_THE_DEVICE = "synthetic (made on the device)"
OURS = "ours"
TIMM = "timm"
FUSED = "timm, fused"
"""Kinds of loops in the table `timm`."""
AGAIN = ", again"
"""Suffix of the control: a contender that is measured twice. The ratio of the two shows the noise."""
DEFAULTS = {"MODEL.NAME": "vit_base_patch16_224", "DATA.IMAGE_SIZE": 224, "DATA.BATCH_SIZE": 256, "TRAIN.ACCUM_ITER": 1}
"""Of settings that the report names; the results have only those that differ from the default."""
NOT_SHOWN = ("computed_in", "compile_why")


@dataclass(frozen=True)
class Plan:
    """Everything to measure."""

    contenders: Mapping[str, Worker]
    rounds: int
    settings: dict[str, Any]
    device: str
    """Its name and the number of threads"""
    images: str
    left_out: dict[str, str] = field(default_factory=dict)
    """Name -> why it cannot be measured here."""
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """One loop in one precision."""

    kind: str
    precision: str
    compiled: bool = False
    train_py: Path | None = None
    """timm's train.py, whose own loop is to run."""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.kind, "compiled" if self.compiled else "", self.precision)))


def set_up(
    line: ToolLine,
    on_cpu: Mapping[str, Any] = ON_CPU,
    on_gpu: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    reads_data: bool = False,
) -> tuple[Loaded, torch.device, str, list[str]]:
    """Settings of the command line, completed by a table's own defaults; their device, which is prepared, its name
    and number of threads; and remarks. A model that cannot be built is refused.

    `on_cpu`, `on_gpu`: defaults for keys that the user did not set. `fixed`: settings that the table always uses.
    `reads_data`: whether the table can measure a data set of the user.
    """
    asked = {key: value for key, (value, _) in line.run.flags.items()} | line.run.words
    for key, flag in (("DATA.DATA_PATH", "-data_path"), ("DATA.DATASET", "-dataset")):
        if not reads_data and asked.get(key) not in (None, "synthetic"):
            raise UserError(
                f"{flag} {asked[key]}: this table measures no files, only data made on the device. Leave {flag} out, "
                "or use the table amp or precisions, which read the images of a data set."
            )
    from engine.amp.precision import amp_may_gain, check_amp
    from engine.machine.device import describe_devices, pick_device, set_up_device
    from models.build import build_without_weights
    from utils.distributed.world import ALONE

    given: dict[str, Any] = {key: (value, "benchmark_amp.py") for key, value in (fixed or {}).items()}
    if typed := [key for key, (value, _) in given.items() if key in asked and asked[key] != value]:
        raise UserError(f"{typed[0]}: this table has a value of its own for all loops; leave it out.")
    loaded = line.load(given, resolved=False)
    device = pick_device(loaded.config.DEVICE, ALONE)
    defaults = on_cpu if device.type == "cpu" else on_gpu or {}
    if not amp_may_gain(device):  # the tables measure mixed precision, also where -amp would compute in fp32
        defaults = {**defaults, "AMP.DTYPE": "bf16"}
    defaults = {key: value for key, value in defaults.items() if loaded.is_default(key)}
    if defaults:
        given |= {key: (value, "benchmark_amp.py") for key, value in defaults.items()}
        loaded = line.load(given, resolved=False)
    if loaded.config.USE:
        use = loaded.sources["USE"]
        raise UserError(f"{use}: benchmark_amp.py has no USE; its processes execute no code of your own.")
    check_one_training(loaded, "benchmark_amp.py")
    remarks = [*loaded.notes, *about_one_device(loaded)]
    if defaults and device.type == "cpu":
        small = ", ".join(f"{key} {value}" for key, value in defaults.items())
        remarks.append(f"on a CPU, defaults are small: {small}")
    config = loaded.config
    amp = config.AMP.changed(ENABLED=True)  # the tables switch it on themselves
    check_amp(amp, config.TRAIN)
    build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    return loaded, device, describe_devices(device, ALONE, set_up_device(config, device, ALONE)), remarks


def users_data(loaded: Loaded) -> tuple[Config | None, str]:
    """The settings with the data set that the user named, checked, or None; and which images are measured."""
    config = loaded.config
    if loaded.is_default("DATA.DATASET"):
        if config.DATA.DATA_PATH is None:
            return None, ON_THE_DEVICE
        from engine.preflight import with_data_set

        config = with_data_set(loaded).config
    from datasets import check_dataset, source_of

    check_dataset(config.DATA, int(config.MODEL.NUM_CLASSES))
    return config, ON_THE_DEVICE if config.DATA.DATASET == "synthetic" else f"those of {source_of(config.DATA)}"


def synthetic(config: Config, updates: int) -> Config:
    """`config` on images made on the device, with at least `updates` updates per epoch."""
    samples = (config.TRAIN.GLOBAL_BATCH or config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER) * updates
    data = {"DATASET": "synthetic", "DATA_PATH": None, "SYNTHETIC_TRAIN": samples, "DROP_LAST": True}
    return config.changed(DATA=data)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format the ratio of two contenders: median, minimum and maximum over the rounds; '-' without a round of both.

    It is computed round by round, so that a slow moment of the machine is in both values.
    """
    ratios = [our_value / their_value for our_value, their_value in zip(ours, theirs, strict=False)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


class Results(dict[str, Any]):
    """Contents of a -json file; `measure` in command.py lists the fields."""

    @property
    def turns(self) -> dict[str, list[dict[str, Any]]]:
        """Name of a contender -> its turns."""
        return self["turns"]

    def per_turn(self, name: str, key: str) -> list[float]:
        """Metric `key` in every turn of a contender that has it."""
        return [turn[key] for turn in self.turns.get(name, []) if turn.get(key) is not None]

    def median(self, name: str, key: str) -> float | None:
        values = self.per_turn(name, key)
        return statistics.median(values) if values else None

    def ratio(self, name: str, other: str, key: str) -> str:
        """Metric `key` of one contender relative to another's."""
        return ratio(self.per_turn(name, key), self.per_turn(other, key))

    def first(self, name: str, key: str, default: Any) -> Any:
        """`key` of a contender's first turn that has it."""
        return next((turn[key] for turn in self.turns.get(name, []) if key in turn), default)

    def failures(self) -> list[str]:
        """One line per reason why contenders could not be measured."""
        names: dict[str, list[str]] = {}
        failed = {name: reason for name in self.turns if (reason := self.first(name, "failed", ""))}
        for name, reason in [*self["left_out"].items(), *failed.items()]:
            names.setdefault(reason, []).append(name)
        return [f"not measured: {quoted(who)}: {reason}" for reason, who in names.items()]

    def cell(self, name: str, key: str, digits: int = 3, factor: float = 1.0) -> str:
        """The median of metric `key`, times `factor`."""
        median = self.median(name, key)
        return rounded(None if median is None else factor * median, digits)

    def control_line(self, name: str, key: str, label: str = "") -> str:
        """Note on the noise, measured by the contender that runs twice. `label`: its name in the table, if another."""
        control = self.ratio(name + AGAIN, name, key)
        return f"control: {quoted([label or name])} against itself: {control}; ratios within this range are noise"

    def choices_lines(self, labels: Mapping[str, str]) -> list[str]:
        """Notes on kernels and formats chosen by the device or by measurement, grouped by equal choices.

        `labels`: name of a contender -> its name in the table.
        """
        alike: dict[str, list[str]] = {}
        for name, label in labels.items():
            choices = self.first(name, "choices", {})
            words = [f"{key} {value}" for key, value in choices.items() if key not in NOT_SHOWN and value is not False]
            alike.setdefault(", ".join(words), []).append(label)
        return [f"kernels and formats chosen for {quoted(who)}: {words}" for words, who in alike.items() if words]

    def subject(self) -> str:
        """Model, image size and batch size."""
        settings = DEFAULTS | self["settings"]
        return f"{settings['MODEL.NAME']}, {settings['DATA.IMAGE_SIZE']} pixels, batch {settings['DATA.BATCH_SIZE']}"

    def iteration_line(self) -> str:
        """Note on the number of images per iteration."""
        settings = DEFAULTS | self["settings"]
        batch = int(settings["DATA.BATCH_SIZE"])
        total = settings.get("TRAIN.GLOBAL_BATCH")
        parts = int(total) // batch if total else int(settings["TRAIN.ACCUM_ITER"])
        images = f"{batch} images" if parts == 1 else f"{parts} micro-batches of {batch} images"
        return f"an iteration is one update of {images}"

    def report(self, title: str, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> list[str]:
        """The lines of a table for the terminal. The first row is the heading."""
        waits = {name: self.median(name, "data_wait_percent") or 0.0 for name in self.turns}
        most = max(waits, key=lambda name: waits[name])
        waiting = f"; waiting for data: at most {waits[most]:.0f} % of the time ({quoted([most])})"
        versions = ", ".join(f"{name} {version}" for name, version in self["versions"].items())
        about = [
            f"images: {self['images']}" + waiting * any(self.per_turn(name, "data_wait_percent") for name in waits),
            *self.failures(),
            f"{self['device']}, {versions}, {self['date']}",
            self["command"],
        ]
        return ["", title, *in_columns(rows), *(f"  {note}" for note in notes), "", *(f"  {line}" for line in about)]


def with_columns(
    names: Iterable[str], columns: Sequence[tuple[str, Callable[[str], str]]], first: str = ""
) -> list[list[str]]:
    """A heading, and one row per name. `columns`: a heading, and the cell for a name; `first`: heading of the names."""
    heading = [first, *(title for title, _ in columns)]
    return [heading, *([name, *(cell(name) for _, cell in columns)] for name in names)]


def quoted(names: Iterable[str]) -> str:
    """Names of contenders, which may contain commas, as a list."""
    return ", ".join(f"`{name}`" for name in names)
