"""MODEL.ATTENTION packed: timm's attention by kernels that take queries, keys and values as one product leaves them.

torch's kernels take them apart, and their gradients have to be put together again before the product's own backward
pass: a copy of all, in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention as TimmAttention  # pyright: ignore[reportPrivateImportUsage]  # where all of timm have it
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.speed.amx import why_not
from engine.speed.kernels.attention import packed_attention, takes, try_out
from engine.speed.replace_forward import mix_in

FEWEST_PATCHES, NARROWEST_HEAD = 64, 32
FEW_TOKENS = 50
"""To try the kernels with."""


class PackedAttention(nn.Module):
    """Where the kernels do not serve (fp32, more tokens, another device), torch's own choice does."""

    packed: bool = False
    nothing_else: bool = False
    """A RuntimeError, then, instead of torch's choice."""
    num_heads: int
    attn_drop: nn.Dropout
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        drops = self.training and self.attn_drop.p > 0
        if not self.packed or attn_mask is not None or any(others.values()) or drops:
            self._refuse("for dropout or a mask")
            return super().forward(x, attn_mask=attn_mask, **others)
        qkv = self.qkv(x)
        if serves(qkv, self.num_heads):
            found, _ = packed_attention(qkv, self.num_heads)
        else:
            self._refuse(f"for {tuple(qkv.shape)} {qkv.dtype}")
            q, k, v = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(found))

    def _refuse(self, why: str) -> None:
        if self.nothing_else:
            raise RuntimeError(f"packed attention: no kernel {why}")


def serves(qkv: Tensor, heads: int) -> bool:
    kind = qkv.device.type
    return kind in ("cuda", "cpu") and takes(qkv.shape[1], qkv.shape[2] // heads // 3, qkv.dtype, kind)


def can_be_packed(layer: Any) -> bool:
    """Whether it is timm's own, with nothing between its products and attention."""
    if type(layer).forward not in (TimmAttention.forward, PackedAttention.forward):
        return False
    between = [getattr(layer, name, None) for name in ("q_norm", "k_norm", "norm")]
    plain = all(part is None or isinstance(part, nn.Identity) for part in between)
    return plain and getattr(layer, "gate", None) is None and layer.scale == cast(int, layer.head_dim) ** -0.5


def pays_on_cpu(model: nn.Module) -> bool:
    """Small models train in seconds, which kernels to be compiled first would take as well."""
    layers: list[Any] = [layer for layer in model.modules() if can_be_packed(layer)]
    if not layers or any(layer.attn_drop.p > 0 for layer in layers):
        return False
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", 0)
    return patches >= FEWEST_PATCHES and layers[0].head_dim >= NARROWEST_HEAD


def why_not_on_cpu(model: nn.Module, precision: Precision) -> str:
    """Why this model cannot compute attention by the kernels in C; nothing where it can."""
    layer: Any = next((module for module in model.modules() if can_be_packed(module)), None)
    if layer is None:
        return f"{type(model).__name__} has no attention layer of timm's with nothing more in it"
    if why := why_not():
        return why
    dtype = torch.float32 if precision.level == "O0" else precision.choice.dtype
    try:
        _have_tried(FEW_TOKENS, layer.head_dim, dtype, torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return ""


def pack(layer: nn.Module) -> None:
    if can_be_packed(layer):
        mix_in(layer, PackedAttention)
        layer.packed = True  # pyright: ignore[reportArgumentType]


@contextmanager
def packed_alone(layer: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """This layer by these kernels and no others. A RuntimeError where they do not serve, or not as they should."""
    if not can_be_packed(layer):
        raise RuntimeError("packed attention: not for such a layer")
    _have_tried(tokens, layer.head_dim, dtype, device)
    own, before = type(layer), getattr(layer, "packed", False)
    mix_in(layer, PackedAttention)
    layer.packed = layer.nothing_else = True
    try:
        yield
    finally:
        layer.packed, layer.nothing_else = before, False
        layer.__class__ = own


@cache
def _have_tried(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    if device.type not in ("cuda", "cpu") or not takes(tokens, width, dtype, device.type):
        raise RuntimeError(f"packed attention: no kernel for {tokens} tokens, {width} wide, {dtype}, on {device.type}")
    try:
        try_out(device, dtype, tokens, width)
    except Exception as error:  # no Triton, no compiler for its code, too small a GPU: each has its own class
        raise RuntimeError(f"packed attention does not run here: {error}") from error
