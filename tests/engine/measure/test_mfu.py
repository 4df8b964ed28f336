"""A model's operations, counted; the peaks of devices; and the share of these that training uses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from engine.amp.precision import Precision, switch_tf32
from engine.measure import mfu as flops
from engine.measure.mfu import Peak, Utilisation, listed_tflops, peak_of, training_flops
from engine.measure.progress import Position
from engine.measure.throughput import FORWARD, HostStages, Throughput
from models import build_without_weights
from tests.engine.small import BF16, CPU, OFF
from utils.config import AmpConfig, Config, ModelConfig

GPU = torch.device("cuda", 0)
PEAK = Peak(tflops=100.0, kind="bf16", device="a GPU")


def counted(name: str, size: int = 224, **settings: Any) -> float:
    """GFLOP of an image in training."""
    model = build_without_weights(ModelConfig(NAME=name, **settings), size, 3)
    found = training_flops(model, 3, size)
    assert found is not None
    return found / 1e9


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_patch16_224", 7.46),
        pytest.param("vit_small_patch16_224", 27.5, marks=pytest.mark.slow),
        ("vit_base_patch16_224", 105.2),
        pytest.param("vit_large_patch16_224", 369, marks=pytest.mark.slow),
        pytest.param("vit_huge_patch14_224", 1003, marks=pytest.mark.slow),
        ("resnet50", 24.3),  # batch norm
    ],
)
def test_flops_of_known_models(name: str, expected: float) -> None:
    assert counted(name, TYPE="x") == pytest.approx(expected, rel=2e-3)


def by_hand(width: int, depth: int, tokens: int, mlp: int, patch: int, classes: int) -> float:
    """A ViT's products; forward, then two as large backward, but for the pixels, which want no gradient."""
    patches = 2 * (tokens - 1) * width * 3 * patch**2
    block = 2 * tokens * width * (4 * width + 2 * mlp * width) + 2 * 2 * tokens**2 * width
    return (2 * patches + 3 * (depth * block + 2 * width * classes)) / 1e9


SMALL: dict[str, Any] = {"EMBED_DIM": 64, "DEPTH": 2, "NUM_HEADS": 2, "PATCH_SIZE": 8, "NUM_CLASSES": 10}


def test_flops_include_attention() -> None:
    assert counted("own", 64, **SMALL) == pytest.approx(by_hand(64, 2, 65, 4, 8, 10), rel=1e-9)
    assert counted("own", 64, **SMALL, MLP_RATIO=2) == pytest.approx(by_hand(64, 2, 65, 2, 8, 10), rel=1e-9)


def test_flops_that_cannot_be_counted_are_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Curious(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images * float(images.mean())

    assert training_flops(Curious(), 3, 8) is None
    assert training_flops(nn.Identity(), 3, 8) is None
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    monkeypatch.setattr(flops, "build_without_weights", lambda *_: Curious())
    made = Utilisation(Config(), PEAK, 1, Position())
    with caplog.at_level(logging.INFO, "vitamp"):
        assert [made.percent(1000.0) for _ in range(3)] == [None] * 3
    assert caplog.text.count("MFU is not shown") == 1


@pytest.mark.parametrize(
    ("name", "kind", "tflops"),
    [
        ("Tesla T4", "fp16", 65.0),
        ("Tesla T4", "bf16", None),  # emulated there
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", None),  # another chip, for all that the name says
        ("NVIDIA A100-SXM4-40GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA L4", "fp16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 3090", "fp16", 71.0),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA B200", "bf16", 2250.0),
    ],
)
def test_listed_peaks_by_the_drivers_name(name: str, kind: str, tflops: float | None) -> None:
    assert listed_tflops(name, kind) == tflops


def precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, amp: AmpConfig) -> Precision:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return Precision(amp, GPU)


@pytest.mark.parametrize(
    ("amp", "tflops"),
    [
        (OFF, 67.0),
        (AmpConfig(TF32=True), 494.7),
        (BF16, 989.4),
        (AmpConfig(ENABLED=True, DTYPE="bf16", LEVEL="O2"), 989.4),
    ],
)
def test_peak_of_a_listed_gpu_depends_on_the_precision(
    monkeypatch: pytest.MonkeyPatch, amp: AmpConfig, tflops: float
) -> None:
    try:
        found = peak_of(precision_on_a_gpu(monkeypatch, "NVIDIA H200", amp))
    finally:
        switch_tf32(False)
    assert found is not None
    assert found.tflops == tflops


@pytest.mark.parametrize("name", ["Some GPU", "NVIDIA H200 MIG 1g.18gb"])
def test_other_devices_have_no_peak(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert peak_of(Precision(BF16, CPU)) is None
    assert peak_of(precision_on_a_gpu(monkeypatch, name, BF16)) is None


def test_mfu_of_known_flops() -> None:
    config = Config(MODEL=ModelConfig(NAME="vit_tiny_patch16_224"))
    made = Utilisation(config, PEAK, 4, Position())
    assert not made.counted
    # 7.464 GFLOP x 10,000 images a second, of 400 TFLOP/s
    assert made.percent(10_000) == pytest.approx(18.66, abs=0.01)
    assert made.counted


def test_mfu_counts_smaller_images_and_dropped_tokens() -> None:
    settings = {
        "MODEL": {"NAME": "own", **SMALL},
        "DATA": {"IMAGE_SIZE": 64},
        "TRAIN": {"NUM_EPOCHS": 4, "SIZE_SCHEDULE": [[0, 32], [0.5, 64]], "TOKEN_DROP": 0.5, "TOKEN_DROP_TAIL": 1},
    }
    position = Position()
    made = Utilisation(Config.model_validate(settings), PEAK, 1, position)
    found = []
    for epoch in (1, 2, 3, 4):
        position.epoch = epoch
        percent = made.percent(1e6)
        assert percent is not None
        found.append(percent)
    assert found[0] == found[1] < found[2] < found[3]
    whole = by_hand(64, 2, 65, 4, 8, 10)
    assert found[3] == pytest.approx(whole * 1e6 * 1e9 / 1e12, rel=0.02)  # and growing the positions, a little
    assert found[2] < 0.6 * found[3]


def test_counting_flops_is_left_out_of_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its time a stage's."""
    from engine.measure import throughput

    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])

    def counting(*_: object) -> float:
        now[0] += 1000.0
        return 1e9

    monkeypatch.setattr(flops, "training_flops", counting)
    config = Config.model_validate({"MODEL": {"NAME": "own", **SMALL}, "DATA": {"IMAGE_SIZE": 64}})
    stages = HostStages(lambda: now[0])
    made = Throughput(CPU, stages, Utilisation(config, PEAK, 1, Position()))
    rates = []
    for _ in range(3):
        for _ in range(4):
            stages.begin()
            now[0] += 1.0
            stages.mark(FORWARD)
            made.count(8)
        perf = made.read(0.0)
        assert perf.stages is not None
        assert (perf.stages.total, perf.mfu) == (4.0, pytest.approx(8e-3 / 100 * 100))
        rates.append(perf.images_per_second)
    assert rates == [8.0, 8.0, 8.0]
