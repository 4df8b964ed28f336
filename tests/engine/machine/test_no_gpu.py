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


def notice(**env: str) -> str:
    return device.no_gpu_notice(Config(), CPU, env) or ""


def test_notice_names_cuda_visible_devices_that_hides_all_gpus() -> None:
    assert notice(CUDA_VISIBLE_DEVICES="").startswith("No GPU is visible, because CUDA_VISIBLE_DEVICES is ''")
    assert notice(CUDA_VISIBLE_DEVICES="-1").startswith("No GPU is visible, because CUDA_VISIBLE_DEVICES is '-1'")
    assert notice(CUDA_VISIBLE_DEVICES="0").startswith("No GPU is visible: ")


def test_notice_names_a_missing_gpu_in_cuda_visible_devices(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    text = notice(CUDA_VISIBLE_DEVICES="7")
    assert text.startswith("No GPU is visible, because CUDA_VISIBLE_DEVICES is '7' (nvidia-smi -L")


def test_notice_names_a_cpu_build_of_torch_beside_a_driver(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert "nvidia-smi shows" in notice()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built for CPUs only" in notice()


def test_no_notice_with_device_cpu_or_on_a_gpu() -> None:
    assert device.no_gpu_notice(Config(DEVICE="cpu"), CPU, {}) is None
    assert device.no_gpu_notice(Config(), torch.device("cuda", 0), {}) is None


def test_notice_is_logged_once_per_run(vitamp: Callable[..., Result], tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("DEVICE: cpu\n", ""))
    command = ("-cfg", tiny, "-ngpus", 2, "-dry_run")
    done = vitamp(*command, script="main_multi_gpu.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.code, done.text.count("No GPU is visible")) == (0, 1), done.text
