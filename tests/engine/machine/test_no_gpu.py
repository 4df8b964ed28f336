"""The one line that a run on a CPU says where nobody asked for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.machine import no_gpu
from tests.program import Result
from utils.config import Config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the driver's file would be."""
    monkeypatch.setattr(no_gpu, "NVIDIA_DRIVER", tmp_path / "version")
    return tmp_path / "version"


def told(**env: str) -> str:
    return no_gpu.hint(Config(), CPU, env) or ""


def test_a_hidden_gpu_is_told() -> None:
    assert told(CUDA_VISIBLE_DEVICES="").startswith("No GPU is seen, for CUDA_VISIBLE_DEVICES is ''")
    assert told(CUDA_VISIBLE_DEVICES="-1").startswith("No GPU is seen, for CUDA_VISIBLE_DEVICES is '-1'")
    assert told(CUDA_VISIBLE_DEVICES="0").startswith("No GPU is seen: ")


def test_one_that_is_not_there_is_told(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert told(CUDA_VISIBLE_DEVICES="7").startswith("No GPU is seen, for CUDA_VISIBLE_DEVICES is '7' (nvidia-smi -L")


def test_torch_for_cpus_beside_a_driver_is_told(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert "nvidia-smi tells" in told()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build for CPUs alone" in told()


def test_nothing_is_said_where_it_is_meant_or_there_is_one() -> None:
    assert no_gpu.hint(Config(DEVICE="cpu"), CPU, {}) is None
    assert no_gpu.hint(Config(), torch.device("cuda", 0), {}) is None


def test_once_a_run(vitamp: Callable[..., Result], tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("DEVICE: cpu\n", ""))
    command = ("-cfg", tiny, "-ngpus", 2, "-dry_run")
    done = vitamp(*command, script="main_multi_gpu.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.code, done.text.count("No GPU is seen")) == (0, 1), done.text
