"""The notice of a run that uses the CPU without being asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.machine import device
from tests.program import Result
from utils.config import Config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the driver's file would be."""
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "version")
    return tmp_path / "version"


@pytest.mark.parametrize(
    ("env", "driver_there", "cuda", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, False, None, "No GPU is visible (CUDA_VISIBLE_DEVICES is ''): "),
        ({}, False, None, "No GPU is visible: "),
        (
            {"CUDA_VISIBLE_DEVICES": "7"},
            True,
            "13.2",
            "(CUDA_VISIBLE_DEVICES is '7'; an NVIDIA driver is installed, and nvidia-smi shows",
        ),
        ({}, True, "13.2", "nvidia-smi shows"),
        ({}, True, None, "is built for CPUs only"),
    ],
)
def test_notice_names_why_no_gpu_is_visible(
    driver: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], driver_there: bool, cuda: str | None, said: str
) -> None:
    if driver_there:
        driver.touch()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert said in (device.no_gpu_notice(Config(), CPU, env) or "")
    assert device.no_gpu_notice(Config(DEVICE="cpu"), CPU, env) is None


def test_notice_is_logged_once_per_run(vitamp: Callable[..., Result], tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("DEVICE: cpu\n", ""))
    command = ("-cfg", tiny, "-ngpus", 2, "-dry_run")
    done = vitamp(*command, script="main_multi_gpu.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.code, done.text.count("No GPU is visible")) == (0, 1), done.text
