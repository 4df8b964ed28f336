"""The kinds of kernels for attention (SPEED), and what they can compute."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

FUSED, PLAIN, FLASH, EFFICIENT, CUDNN, PACKED = "fused", "plain", "flash", "efficient", "cudnn", "packed"
OWN = "the model's own"
KINDS = {"cuda": (FUSED, PLAIN, FLASH, EFFICIENT, CUDNN, PACKED)}
KINDS_ELSEWHERE = (FUSED, PLAIN)
FUSED_OPERATOR = frozenset({"scaled_dot_product_attention", "fused_attention", "flash_attn"})
"""Names of torch's fused operator on AMP's lists, which have no effect on `packed`."""


def attention_layers(model: nn.Module) -> list[Any]:
    """timm's attention layers, whose kernel can be chosen."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]


def packed_is_possible(listed: frozenset[str]) -> bool:
    return not FUSED_OPERATOR & listed and find_spec("triton") is not None


def backends_of(kind: str, strictly: bool = False) -> list[Any]:
    """torch's backends for a kind, by preference; empty for torch's own choice.

    The others are fallbacks: flash and cuDNN do not support fp32, in which a run may validate.
    """
    if kind not in (FLASH, EFFICIENT, CUDNN):
        return []
    from torch.nn.attention import SDPBackend

    named = {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
    named[CUDNN] = SDPBackend.CUDNN_ATTENTION
    fallbacks = [] if strictly else [named[EFFICIENT], SDPBackend.MATH]
    return list(dict.fromkeys([named[kind], *fallbacks]))
