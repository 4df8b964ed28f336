"""What a table of benchmark_amp.py is: its flags, its contenders, and the settings that it measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tools.benchmark_amp.results import Metrics, Results
from tools.common.command_line import ToolLine, about_one_device, check_one_training
from tools.common.tables import Section
from utils.config import Config, Loaded
from utils.errors import UserError
from utils.flags import Flag, whole

if TYPE_CHECKING:
    import torch

MODEL = Flag("model", "name of the model (or give -cfg FILE)", "NAME")
ROUNDS = Flag("rounds", "how often each contender is measured", "N", default=3, kind=whole(1))
ON_CPU: dict[str, Any] = {"MODEL.NAME": "vit_tiny_patch16_224", "DATA.BATCH_SIZE": 8}
"""Defaults on a CPU, where the usual ones would take hours."""
ON_THE_DEVICE = "synthetic (made on the device)"
OURS, TIMM, FUSED = "ours", "timm", "timm, fused"
"""Kinds of loops in the table `timm`."""


class Measurable(Protocol):
    """A contender: tools/common/sessions.py's Worker. Its first turn starts with building and warming up."""

    def turn(self) -> Metrics: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """Checked settings and the device to measure."""

    loaded: Loaded
    device: torch.device
    remarks: list[str]

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def is_default(self, key: str) -> bool:
        return self.loaded.sources[key] == "default"


@dataclass(frozen=True)
class Plan:
    """Everything to measure. Only a -json file with equal `settings` is resumed."""

    contenders: Mapping[str, Measurable]
    rounds: int
    settings: dict[str, Any]
    device: str
    """Its name and the number of threads."""
    images: str
    """Which images are measured."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name -> why it cannot be measured here."""
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """One subcommand: benchmark_amp.py NAME."""

    name: str
    about: str
    """For -h; its first line is the summary."""
    flags: tuple[Flag, ...]
    plan: Callable[[ToolLine], Plan]
    section: Callable[[Results], Section]


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
        parts = (self.kind, "compiled" * self.compiled, self.precision)
        return ", ".join(filter(None, parts))


def set_up(
    line: ToolLine,
    on_cpu: Mapping[str, Any] = ON_CPU,
    on_gpu: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    reads_data: bool = False,
) -> Setup:
    """Settings of the command line, completed by a table's own defaults, and their device.

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
    from engine.amp.precision import amp_may_gain
    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    given: dict[str, Any] = {key: (value, "benchmark_amp.py") for key, value in (fixed or {}).items()}
    if "model" in line.given:
        given["MODEL.NAME"] = line.asked.model, "-model"
    loaded = line.load(given, resolved=False)
    device = pick_device(loaded.config.DEVICE, ALONE)
    defaults = on_cpu if device.type == "cpu" else on_gpu or {}
    if not amp_may_gain(device):  # the tables measure mixed precision, also where -amp would compute in fp32
        defaults = {**defaults, "AMP.DTYPE": "bf16"}
    defaults = {key: value for key, value in defaults.items() if loaded.sources[key] == "default"}
    if defaults:
        own = {key: (value, "benchmark_amp.py") for key, value in defaults.items()}
        loaded = line.load({**given, **own}, resolved=False)
    check_one_training(loaded, "benchmark_amp.py")
    remarks = [*loaded.notes, *about_one_device(loaded)]
    if defaults and device.type == "cpu":
        remarks.append(
            f"on a CPU, defaults are small: {', '.join(f'{key} {value}' for key, value in defaults.items())}"
        )
    return Setup(loaded, device, remarks)


def prepared(setup: Setup) -> str:
    """Refuse a model that cannot be built, and prepare the device; return its name and the number of threads."""
    from engine.machine.device import describe_devices, set_up_device
    from models.build import build_without_weights
    from utils.distributed.world import ALONE

    config = setup.config
    build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    return describe_devices(setup.device, ALONE, set_up_device(config, setup.device, ALONE))


def users_data(setup: Setup) -> Config | None:
    """The settings with the data set that the user named, checked; None if none is named."""
    config = setup.config
    if setup.is_default("DATA.DATASET"):
        if config.DATA.DATA_PATH is None:
            return None
        from datasets.recognise import recognise

        if found := recognise(config.DATA.DATA_PATH):
            config = changed(config, "DATA", DATASET=found[0])
    from datasets import check_dataset

    check_dataset(config.DATA, int(config.MODEL.NUM_CLASSES))
    return config


def images_of(config: Config) -> str:
    """Which images are measured, for the report."""
    from datasets import source_of

    return ON_THE_DEVICE if config.DATA.DATASET == "synthetic" else f"those of {source_of(config.DATA)}"


def synthetic(config: Config, updates: int) -> Config:
    """`config` on images made on the device, with at least `updates` updates per epoch."""
    samples = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * updates
    data = {"DATASET": "synthetic", "DATA_PATH": None, "SYNTHETIC_TRAIN": samples, "DROP_LAST": True}
    return changed(config, "DATA", **data)


def changed(config: Config, section: str, **values: Any) -> Config:
    """A copy of `config` with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
