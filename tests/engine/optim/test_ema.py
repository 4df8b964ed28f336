"""The moving average of the weights."""

import pytest
import torch
from torch import nn

from engine.optim.ema import Ema
from tests.engine.small import CPU
from utils.config import TrainConfig

STEPS = 30


class Net(nn.Module):
    """A few weights, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


def wander(model: nn.Module, step: int) -> None:
    """Other weights and other running statistics, the same ones for the same step."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.add_(1)


def averaged(decay: float, warmup: bool, stepped: list[bool], as_tensor: bool) -> tuple[Ema, Net]:
    torch.manual_seed(0)
    model = Net()
    ema = Ema(model, TrainConfig(MODEL_EMA_DECAY=decay, MODEL_EMA_WARMUP=warmup), CPU)
    for step, yes in enumerate(stepped):
        wander(model, step)
        ema.after_update(1, torch.tensor(yes) if as_tensor else yes)
    return ema, model


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.5, 0.99, 0.99996])
def test_ema_equals_its_formula(decay: float, warmup: bool, as_tensor: bool) -> None:
    ema, _ = averaged(decay, warmup, [True] * STEPS, as_tensor)
    torch.manual_seed(0)
    model = Net()
    average = [p.detach().double().clone() for p in model.parameters()]
    for step in range(STEPS):
        wander(model, step)
        d = min(decay, (1 + step) / (10 + step)) if warmup else decay
        average = [d * a + (1 - d) * p.detach().double() for a, p in zip(average, model.parameters(), strict=True)]
    for ours, theirs in zip(ema.module.parameters(), average, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_ema_copies_or_leaves_buffers_of_any_dtype_bit_for_bit(as_tensor: bool) -> None:
    model = Net().half()  # its average is in fp32
    for name, buffer in {
        "mask": torch.tensor([True, False]),
        "table": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "columns": torch.randn(3, 4).T,
        "none": torch.zeros(0),
        "one": torch.tensor(0.1, dtype=torch.float64),
    }.items():
        model.register_buffer(name, buffer)
    ema = Ema(model, TrainConfig(MODEL_EMA_DECAY=0.5, MODEL_EMA_WARMUP=False), CPU)
    taken = {name: buffer.clone() for name, buffer in ema.module.named_buffers()}
    for stepped in (True, False, True):  # statistics of a pass that overflowed may be infinite
        for buffer in model.buffers():
            drawn = torch.randn(buffer.shape)
            buffer.copy_(drawn > 0 if buffer.dtype is torch.bool else drawn * (100 if stepped else torch.inf))
        if stepped:
            taken = {name: buffer.to(taken[name].dtype) for name, buffer in model.named_buffers()}
        ema.after_update(1, torch.tensor(stepped) if as_tensor else stepped)
        for name, buffer in ema.module.named_buffers():
            assert torch.equal(buffer, taken[name]), name
        taken = {name: buffer.clone() for name, buffer in taken.items()}
