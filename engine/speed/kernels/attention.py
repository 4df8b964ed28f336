"""torch.ops.vitamp.packed_attention: attention over few tokens, read from and differentiated into the packed qkv.

By kernels of Triton's on GPUs, and in C on CPUs. An operator of torch's own kind: autograd, autocast, compiled graphs
and CUDA graphs take it as one piece. No program of its kernels waits for another one's sums, so the same input gives
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.speed.amx import attention as in_c

IN_C = {"cpu"}
"""Kinds of devices that the kernels in C are for; on others Triton's are taken."""
MOST_TOKENS = 256
WIDTHS = (32, 64)
"""Of one head."""
HALVES = (torch.bfloat16, torch.float16)
LEAST = 16
"""Of rows or columns, in a product of Triton's."""
LOG2_E = log2(2.718281828459045)


@dataclass(frozen=True)
class Forward:
    """A program takes `rows` queries of a head after the other, against all its keys."""

    rows: int = 64
    warps: int = 4
    stages: int = 3

    def options(self, tokens: int, heads: int, width: int) -> dict[str, Any]:
        first, second, third = key_blocks(tokens)
        sizes = {"N": tokens, "H": heads, "D": width, "ROWS": min(self.rows, _power_from(tokens))}
        return sizes | {"K1": first, "K2": second, "K3": third, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Backward:
    """A program takes `keys` of a head after the other, and for them `rows` queries after the other."""

    rows: int = 32
    keys: int = 256
    warps: int = 8
    stages: int = 3

    def options(self, tokens: int, heads: int, width: int) -> dict[str, Any]:
        rows, keys = (min(most, _power_from(tokens)) for most in (self.rows, self.keys))
        warps = self.warps if keys == self.keys else self.warps // 2
        sizes = {"N": tokens, "H": heads, "D": width, "ROWS": rows, "KEYS": keys}
        return sizes | {"num_warps": warps, "num_stages": self.stages}


FORWARD, BACKWARD = Forward(), Backward()


def takes(tokens: int, width: int, dtype: torch.dtype, device: str = "cuda") -> bool:
    if device in IN_C:
        return in_c.takes(tokens, width, dtype)
    return tokens <= MOST_TOKENS and width in WIDTHS and dtype in HALVES


def key_blocks(tokens: int) -> tuple[int, int, int]:
    """Up to three powers of two that hold all keys with few to spare; 0 where fewer do."""
    left, blocks = -(-tokens // LEAST) * LEAST, []
    while left > 0:
        last = len(blocks) == 2
        blocks.append(_power_from(left) if last else _power_up_to(left))
        left -= blocks[-1]
    if sum(blocks) == _power_from(tokens):
        blocks = [sum(blocks)]
    first, second, third = (*blocks, 0, 0)[:3]
    return first, second, third


def _power_from(number: int) -> int:
    return max(LEAST, 1 << (number - 1).bit_length())


def _power_up_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)


@torch.library.custom_op("vitamp::packed_attention", mutates_args=())
def packed_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`qkv`: [batch, tokens, 3 * heads * width], as one product leaves it. Gives [batch, tokens, heads * width], and
    what the backward pass needs: the binary logarithm of each query's sum of weights, [batch, heads, tokens].
    """
    qkv = qkv.contiguous()
    batch, tokens, width = _sizes(qkv, heads)
    out, norms = _results(qkv, heads)
    if qkv.device.type in IN_C:
        in_c.forward(qkv, out, norms, heads)
        return out, norms
    from engine.speed.kernels import attention_triton as kernels

    with torch.cuda.device_of(qkv):
        kernels.forward_kernel[(batch * heads,)](
            qkv, out, norms, width**-0.5 * LOG2_E, **FORWARD.options(tokens, heads, width)
        )
    return out, norms


@torch.library.custom_op("vitamp::packed_attention_backward", mutates_args=())
def packed_attention_backward(grad: Tensor, qkv: Tensor, out: Tensor, norms: Tensor, heads: int) -> Tensor:
    grad, qkv = grad.contiguous(), qkv.contiguous()
    batch, tokens, width = _sizes(qkv, heads)
    dqkv = torch.empty_like(qkv)
    if qkv.device.type in IN_C:
        in_c.backward(grad, qkv, out, norms, dqkv, heads)
        return dqkv
    from engine.speed.kernels import attention_triton as kernels

    scale = width**-0.5
    with torch.cuda.device_of(qkv):
        kernels.backward_kernel[(batch * heads,)](
            qkv, out, norms, grad, dqkv, scale, scale * LOG2_E, **BACKWARD.options(tokens, heads, width)
        )
    return dqkv


def _sizes(qkv: Tensor, heads: int) -> tuple[int, int, int]:
    batch, tokens, packed = qkv.shape
    return batch, tokens, packed // heads // 3


def _results(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = _sizes(qkv, heads)
    return qkv.new_empty(batch, tokens, heads * width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@packed_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _results(qkv, heads)


@packed_attention_backward.register_fake
def _(_grad: Tensor, qkv: Tensor, _out: Tensor, _norms: Tensor, _heads: int) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return torch.ops.vitamp.packed_attention_backward(grad, *ctx.saved_tensors, ctx.heads), None


packed_attention.register_autograd(_backward, setup_context=_keep)


def try_out(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Both passes once, for two heads; raises what goes wrong, or where the numbers are not torch's."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, tokens, 3 * 2 * width, generator=random).to(device, dtype).requires_grad_()
    wave = torch.randn(2, tokens, 2 * width, generator=random).to(device, dtype)
    found, _ = packed_attention(qkv, 2)
    q, k, v = qkv.float().unflatten(2, (3, 2, width)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) * width**-0.5).softmax(-1)
    expected = (weights @ v).transpose(1, 2).flatten(2)
    both = [torch.autograd.grad(y, qkv, wave.to(y.dtype))[0] for y in (found, expected)]
    for ours, torchs in ((found, expected), both):
        error = F.mse_loss(ours.float(), torchs.float()).sqrt() / torchs.float().square().mean().sqrt()
        if not error < 2.0**-6:
            raise RuntimeError(f"attention's kernels are off by {error:.1e}")
