"""Speed-ups of a model: which of them are asked, and what is recorded of the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.speed.tuning import speedups
from tests.engine.small import build
from utils.config import Config

ALWAYS, ON_GPUS = ["attention"], ["linear_patches", "fused_mlp", "channels_last"]


@pytest.mark.parametrize(
    ("device", "level", "keys"),
    [
        ("cpu", "O1", [*ALWAYS, "linear_patches", "channels_last"]),
        ("cuda", "O0", ALWAYS),
        ("cuda", "O1", [*ALWAYS, *ON_GPUS]),
        ("mps", "O1", ALWAYS),
    ],
)
def test_only_what_can_be_chosen_is_asked(device: str, level: str, keys: list[str]) -> None:
    precision: Any = SimpleNamespace(device=torch.device(device), level=level)
    assert [one.key for one in speedups(Config(), precision)] == keys


def test_settings_choose_on_any_device() -> None:
    precision: Any = SimpleNamespace(device=torch.device("mps"), level="O0")
    settings = {"SPEED": "+linear_patches,+fused_mlp,+channels_last", "TRAIN": {"GRAD_CHECKPOINT": "blocks"}}
    possible = speedups(Config.model_validate(settings), precision)
    assert [one.key for one in possible] == [*ALWAYS, *ON_GPUS, ""]


def test_speedups_that_are_not_asked_are_recorded_as_false(tiny: Path) -> None:
    choices = build(tiny, SPEED="-linear_patches").choices
    assert [choices[key] for key in ON_GPUS] == [False] * 3
    assert choices["computed_in"] == "cpu fp32"
