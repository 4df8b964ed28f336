"""A half-precision copy that computes over fp32 masters: what it shares, what it gives back, what it never touches."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from engine.update import TrainState, accumulate, train_update
from tests.engine.small import flat, parts_of, window_of
from utils.config import AmpConfig

BF16, FP32 = torch.bfloat16, torch.float32


class Sum(nn.Module):
    """The gradient of its weight is the sum of the mean pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).mean(1, keepdim=True) * self.weight


def parts_at(level: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> TrainState:
    parts = parts_of(model, optimizer, AmpConfig(ENABLED=True, DTYPE="bf16", LEVEL=level), **options)  # pyright: ignore[reportArgumentType]
    parts.assemble()
    return parts


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_small_gradients_add_up_over_micro_batches(level: str) -> None:
    """1 + 16 times 1/1024 is 1 in bf16, each time anew."""
    model = Sum()
    parts = parts_at(level, model, torch.optim.SGD(model.parameters(), lr=1.0))
    images = [flat(1.0), *[flat(2.0**-10) for _ in range(16)]]
    train_update(parts, window_of(*images, weights=(1.0,) * 17), 1)
    assert 1 - model.weight.item() == pytest.approx(1 + 16 * 2.0**-10, abs=1e-6)


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_masters_accumulate_updates_smaller_than_half_precision(level: str) -> None:
    model = Sum()
    parts = parts_at(level, model, torch.optim.SGD(model.parameters(), lr=1.0))
    copied = next(parts.forward.parameters())
    for update in range(1, 9):
        train_update(parts, window_of(flat(-(2.0**-11))), update)
    assert model.weight.item() == 1 + 8 * 2.0**-11
    assert copied.item() == model.weight.bfloat16().item()
    for update in range(9, 17):
        train_update(parts, window_of(flat(-(2.0**-11))), update)
    assert copied.item() == 1 + 2.0**-7, "by now it is seen"


def resnet() -> Any:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 32, 32, generator=generator) for _ in range(count)]


def trained(level: str, model: Any, updates: int = 3) -> TrainState:
    parts = parts_at(
        level,
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
    )
    for update, images in enumerate(batches(updates), start=1):
        train_update(parts, window_of(images[:4], images[4:]), update)
    return parts


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_running_statistics_are_those_of_the_masters(level: str) -> None:
    model, usual = resnet(), resnet()
    before = statistics(model)
    parts = trained(level, model)
    trained("O1", usual)
    ours, theirs = statistics(model), statistics(usual)
    assert {t.dtype for t in ours.values() if t.is_floating_point()} == {FP32}
    counts = {name: int(t) for name, t in ours.items() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {6}, "three updates of two micro-batches"
    means = [name for name in ours if "running" in name]
    assert means
    for name in means:
        stepped = (theirs[name] - before[name]).norm()
        assert stepped > 0
        assert (ours[name] - theirs[name]).norm() < 0.05 * stepped, name
    copied = dict(parts.forward.named_buffers())
    assert all(copied[name] is buffer for name, buffer in model.named_buffers())


def test_frozen_weights_get_no_gradients() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].requires_grad_(False)
    parts = parts_at("NAIVE", model, torch.optim.SGD(model.parameters()))
    accumulate(parts, window_of(torch.ones(2, 1, 2, 2)), 1)
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    assert all(p.grad is None for p in parts.forward.parameters())
