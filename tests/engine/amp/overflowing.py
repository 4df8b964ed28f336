"""Small models that overflow, and an overflow watch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from datasets import Batch, MicroBatch
from engine.amp.overflow import Blame, OverflowWatch
from engine.amp.precision import Precision
from tests.engine.small import CPU, FP16, parts_of

SAMPLES = 4


def vit() -> Any:
    """Small enough for a CPU that computes fp16 slowly."""
    torch.manual_seed(0)
    return VisionTransformer(img_size=8, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=10)


def micro_batch(number: int = 0, images: Tensor | None = None) -> tuple[MicroBatch, Batch]:
    generator = torch.Generator().manual_seed(number)
    if images is None:
        images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    indices = torch.arange(SAMPLES) + 100 * (number + 1)
    return MicroBatch(number, indices.numpy(), 1.0), Batch(images, torch.arange(SAMPLES), indices)


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def watch_of(model: nn.Module, **options: Any) -> OverflowWatch:
    precision = Precision(FP16, CPU)
    watch = OverflowWatch(7, precision, **options)
    watch.attach(parts_of(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), criterion=F.cross_entropy))
    return watch


def hold(watch: OverflowWatch, update: int, *micro_batches: tuple[MicroBatch, Batch], scale: float = 1.0) -> None:
    """An update, up to the step of the optimiser."""
    for one in micro_batches:
        watch.after_backward(*one)
    watch._precision.scale_tensor = lambda: torch.tensor(scale)
    watch.before_step(update)


def blame_of(model: nn.Module, *micro_batches: tuple[MicroBatch, Batch], scale: float = 1.0) -> Blame:
    watch = watch_of(model)
    hold(watch, 1, *(micro_batches or [micro_batch()]), scale=scale)
    watch.after_update(1, False)
    (blame,) = watch.take()
    return blame


def with_huge_bias() -> Any:
    model = vit()
    nn.init.constant_(model.blocks[2].mlp.fc1.bias, 7e4)
    return model


class Forward(nn.Module):
    """A module that calls `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
