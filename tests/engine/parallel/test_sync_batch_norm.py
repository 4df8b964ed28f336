"""Batch norm over several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from engine.amp.overflow import OverflowWatch
from engine.amp.precision import Precision
from engine.parallel.ddp import SharedBatchNorm
from tests.engine.small import CPU, FP16, OFF, parts_of
from tests.program import Result
from utils.config import Config
from utils.distributed.world import World

TWO = World(rank=0, size=2)
GPU = torch.device("cuda", 0)
OWN_IMAGES = "Batch norm computes its statistics on each process's own images"


def precision_on(device: torch.device = GPU) -> Precision:
    precision = Precision(OFF, CPU)
    precision.device = device
    return precision


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), BatchNormAct2d(4), nn.Flatten(), nn.Linear(4, 2))


def share(model: nn.Module, precision: Precision, config: Config) -> None:
    parts = parts_of(model, torch.optim.SGD(model.parameters(), 1.0))
    SharedBatchNorm(precision, config.DIST, TWO).attach(parts)


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "BatchNorm" in type(module).__name__]


def test_sync_batch_norm_converts_norms_on_gpus(said: pytest.LogCaptureFixture) -> None:
    model = plain()
    before, weights = {name: id(value) for name, value in model.named_parameters()}, list(model.state_dict())
    buffers = {name: id(value) for name, value in model.named_buffers()}
    share(model, precision_on(), Config())
    assert kinds(model) == ["SyncBatchNorm", "SyncBatchNormAct"]
    assert isinstance(model[2].act, nn.ReLU)  # pyright: ignore[reportIndexIssue]
    assert {name: id(value) for name, value in model.named_parameters()} == before, "the optimiser holds these"
    assert {name: id(value) for name, value in model.named_buffers()} == buffers, "the average follows these"
    assert list(model.state_dict()) == weights
    assert "on the images of all 2 processes" in said.text


@pytest.mark.parametrize(
    ("settings", "device", "why"),
    [
        ({}, "cpu", "on GPUs only"),
        ({"DIST": {"SYNC_BATCHNORM": False}}, "cuda", "DIST.SYNC_BATCHNORM false"),
        ({"DIST": {"STRATEGY": "fsdp"}}, "cuda", "DIST.STRATEGY fsdp"),
    ],
)
def test_log_says_once_why_norms_are_not_synchronised(
    settings: dict[str, object], device: str, why: str, said: pytest.LogCaptureFixture
) -> None:
    model = plain()
    share(model, precision_on(torch.device(device)), Config.model_validate(settings))
    assert kinds(model) == ["BatchNorm2d", "BatchNormAct2d"]
    assert said.text.count(OWN_IMAGES) == 1
    assert why in said.text


def test_nothing_is_replayed_with_sync_batch_norm(said: pytest.LogCaptureFixture) -> None:
    model = plain()
    parts = parts_of(model, torch.optim.SGD(model.parameters(), 1.0), amp=FP16)
    watch = parts.callback(OverflowWatch)
    assert watch is not None
    parts.callbacks = (SharedBatchNorm(precision_on(), Config().DIST, TWO), *parts.callbacks)
    parts.assemble()
    watch.before_step(1)
    watch.after_update(1, False)
    assert watch.take() == []
    assert "With DIST.SYNC_BATCHNORM, skipped updates are not replayed" in said.text


@pytest.mark.slow
def test_two_processes_on_a_cpu_use_local_statistics(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    done = vitamp(
        *("-cfg", tiny, "-dataset", "synthetic", "-output", tmp_path / "run", "-ngpus", 2, "MODEL.TYPE=other"),
        *("MODEL.NAME=resnet10t", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "-batch_size", 4),
        *("MODEL.PATCH_SIZE=null", "MODEL.EMBED_DIM=null", "MODEL.DEPTH=null", "MODEL.NUM_HEADS=null"),
        *("DATA.SYNTHETIC_TRAIN=16", "DATA.SYNTHETIC_VAL=8", "TRAIN.NUM_EPOCHS=1"),
        script="main_multi_gpu.py",
    )
    assert done.code == 0, done.text
    assert done.out.count(OWN_IMAGES) == 1
