"""A ViT of a few thousand weights, and one step of it under bf16 autocast on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn


@dataclass
class Step:
    loss: Tensor
    gradients: list[Tensor]

    def equals(self, other: Step) -> bool:
        """Bit for bit."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return torch.equal(self.loss, other.loss) and all(torch.equal(a, b) for a, b in pairs)


def small_vit(fused: bool = False, checkpointing: bool = False) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=16, depth=2, num_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros: every weight is to have a say
            parameter.add_(0.05 * torch.randn_like(parameter))
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for layer in layers:
        layer.fused_attn = fused
    model.set_grad_checkpointing(checkpointing)
    return model


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.arange(size) % 10


def step(
    model: nn.Module, forward: Callable[..., Any] | None = None, amp: bool = True, part: slice | None = None
) -> Step:
    """Forward under autocast, backward outside it. `forward` is the model as it is called, compiled for instance."""
    images, labels = (tensor[part or slice(None)] for tensor in batch())
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits = (model if forward is None else forward)(images)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    return Step(loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])


def aot(model: nn.Module) -> Callable[..., Any]:
    """Compiled as far as the graphs of forward and backward; making machine code of them would take long."""
    return torch.compile(model, backend="aot_eager")
