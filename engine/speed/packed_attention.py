"""Computes timm's attention by kernels that read queries, keys and values from the packed qkv tensor (SPEED +packed).

torch's kernels take three tensors. In the backward pass of each layer, their three gradients are copied into one,
which these kernels avoid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention as TimmAttention  # pyright: ignore[reportPrivateImportUsage]  # where all of timm have it
from torch import Tensor, nn

from engine.speed.kernels.attention import packed_attention, self_test, supports
from engine.speed.speedup import mix_in


class PackedAttention(nn.Module):
    """Mixin for timm's attention that computes by packed kernels.

    Where they do not work, such as in fp32 on a GPU, it computes by torch's choice of kernel.
    """

    packed: bool = False
    strict: bool = False
    """Raise RuntimeError instead of using torch's choice."""
    num_heads: int
    attn_drop: nn.Dropout
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        """Compute attention of the tokens `x` (batch x tokens x width) by packed kernels.

        Tensors that the kernels do not support are computed by torch's operator. With a mask, with dropout, or if the
        layer's `packed` is off, timm's own forward computes. If `strict`, both are a RuntimeError.
        """
        drops = self.training and self.attn_drop.p > 0
        if not self.packed or attn_mask is not None or any(others.values()) or drops:
            self._raise_if_strict("dropout or a mask")
            return super().forward(x, attn_mask=attn_mask, **others)
        qkv = self.qkv(x)
        if supports_call(qkv, self.num_heads):
            output, _ = packed_attention(qkv, self.num_heads)
        else:
            self._raise_if_strict(f"{tuple(qkv.shape)} {qkv.dtype}")
            # Each batch x heads x tokens x width of a head.
            q, k, v = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            output = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(output))

    def _raise_if_strict(self, unsupported: str) -> None:
        if self.strict:
            raise RuntimeError(f"packed attention has no kernel for {unsupported}")


def supports_call(qkv: Tensor, heads: int) -> bool:
    """Return whether the kernels support this tensor, by its device, number of tokens, width of a head and dtype."""
    return qkv.is_cuda and supports(qkv.shape[1], qkv.shape[2] // heads // 3, qkv.dtype)


def can_be_packed(layer: Any) -> bool:
    """Return whether this is timm's own attention layer, and attention gets its queries, keys and values unchanged.

    A norm of queries and keys, a gate, or another scale than the usual one would change the result.
    """
    if type(layer).forward not in (TimmAttention.forward, PackedAttention.forward):
        return False
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm", "norm")]
    has_no_norm = all(norm is None or isinstance(norm, nn.Identity) for norm in norms)
    has_no_gate = getattr(layer, "gate", None) is None
    usual_scale = cast(int, layer.head_dim) ** -0.5
    return has_no_norm and has_no_gate and layer.scale == usual_scale


def use_packed(layer: nn.Module) -> None:
    """Let a layer compute by packed kernels, if it can; others stay as they are."""
    if can_be_packed(layer):
        mix_in(layer, PackedAttention)
        layer.packed = True  # pyright: ignore[reportArgumentType]


@contextmanager
def packed_only(layer: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let this layer compute by packed kernels inside this context, and as before after it.

    RuntimeError if they do not support the layer, or fail their self-test.
    """
    if not can_be_packed(layer):
        raise RuntimeError("packed attention does not support this attention layer")
    _check_kernels(tokens, layer.head_dim, dtype, device)
    previous_class = type(layer)
    was_packed = getattr(layer, "packed", False)
    mix_in(layer, PackedAttention)
    layer.packed = True
    layer.strict = True  # where a kernel does not work, raise RuntimeError
    try:
        yield
    finally:
        layer.packed = was_packed
        layer.strict = False
        layer.__class__ = previous_class


@cache
def _check_kernels(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernels' self-test, once for each shape. RuntimeError if they do not work here."""
    if device.type != "cuda" or not supports(tokens, width, dtype):
        raise RuntimeError(f"packed attention has no kernel for {dtype} with heads {width} wide on {device.type}")
    try:
        self_test(device, dtype, tokens, width)
    except Exception as error:  # no Triton, no C compiler for it, too small a GPU: each raises another class
        raise RuntimeError(f"packed attention does not run here: {error}") from error
