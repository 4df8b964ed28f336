"""The settings that a table of benchmark_amp.py measures with: the user's, and small ones for the rest on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tools.common.command_line import ToolLine, about_one_device, check_one_training
from utils.cli import Flag
from utils.config import Config, Loaded

if TYPE_CHECKING:
    import torch

MODEL = Flag("model", "the model, by its name (or -cfg FILE)", "NAME", ("MODEL",))
ON_CPU: dict[str, Any] = {"MODEL.NAME": "vit_tiny_patch16_224", "DATA.BATCH_SIZE": 8}
"""So that a CPU ends in minutes."""


def settings_of(
    line: ToolLine,
    small: Mapping[str, Any] = ON_CPU,
    fixed: Mapping[str, Any] | None = None,
    usual: Mapping[str, Any] | None = None,
) -> tuple[Loaded, torch.device, list[str]]:
    """The settings, checked, their device, and what to say of them.

    `small`: what holds on a CPU where the user said nothing, and `usual` elsewhere. `fixed`: what this table gives
    beside what the user says.
    """
    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    given = {key: (value, "benchmark_amp.py") for key, value in (fixed or {}).items()}
    if "MODEL" in line.own:
        given["MODEL.NAME"] = line.own["MODEL"]
    loaded = line.load(given)
    device = pick_device(loaded.config.DEVICE, ALONE)
    remarks: list[str] = []
    on_cpu = device.type == "cpu"
    filled = {k: v for k, v in (small if on_cpu else usual or {}).items() if loaded.sources[k] == "default"}
    if filled:
        loaded = line.load({**given, **{key: (value, "benchmark_amp.py") for key, value in filled.items()}})
    if filled and on_cpu:
        told_of = ", ".join(f"{key} {value}" for key, value in filled.items())
        remarks.append(f"small on a CPU where nothing else is given: {told_of}")
    check_one_training(loaded, "benchmark_amp.py")
    return loaded, device, [*loaded.notes, *about_one_device(loaded), *remarks]


def synthetic(config: Config, updates: int) -> Config:
    """The same, on images made on the device, in epochs of no less than `updates` whole updates."""
    samples = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * updates
    data = {"DATASET": "synthetic", "DATA_PATH": None, "SYNTHETIC_TRAIN": samples, "DROP_LAST": True}
    return changed(config, "DATA", **data)


def changed(config: Config, section: str, **values: Any) -> Config:
    """The same settings but for some of one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
