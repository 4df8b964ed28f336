"""Norm and clipping of an update's gradients, to the bit what torch's own clipping gives."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from engine.optim.build import clip_gradients


def model_of(size: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With gradients of about that norm, and one weight that has none."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).to(dtype)
    for parameter in list(model.parameters())[1:]:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * size / math.sqrt(230)).to(dtype)
    return model


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.01, 0.5, 0.98, 1.0, 1.02, 3.0, math.inf, math.nan])
def test_clipping_equals_torchs(size: float, dtype: torch.dtype) -> None:
    ours, torchs = model_of(size, dtype), model_of(size, dtype)
    norm, expected = clip_gradients([*ours.parameters()], 1.0), clip_grad_norm_(torchs.parameters(), 1.0)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for own, other in zip(gradients_of(ours), gradients_of(torchs), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


def test_clipping_of_a_norm_equal_to_the_limit() -> None:
    """Torch's factor is below 1 there now and then, where the norm is not above the limit."""
    for step in range(200):
        ours = model_of(0.5)
        limit = float(clip_gradients([*ours.parameters()], None)) * (1 + (step - 20) * 2e-8) + 1e-6
        torchs = copy.deepcopy(ours)
        for own, other in zip(ours.parameters(), torchs.parameters(), strict=True):
            other.grad = None if own.grad is None else own.grad.clone()
        clip_gradients([*ours.parameters()], limit)
        clip_grad_norm_(torchs.parameters(), limit)
        for own, other in zip(gradients_of(ours), gradients_of(torchs), strict=True):
            assert torch.equal(own, other), step
