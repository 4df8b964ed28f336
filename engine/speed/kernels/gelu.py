"""torch.ops.vitamp.gelu_with_bias: exact GELU of h + bias, whose backward pass sums the bias's gradient on its way.

An operator of torch's own kind: autograd, autocast, compiled graphs and CUDA graphs take it as one piece. What it adds
up, it adds up in the same order each time, so the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from engine.speed.kernels.gelu_triton import add_up_kernel, backward_kernel, forward_kernel


@dataclass(frozen=True)
class Tiles:
    """How a matrix is dealt out: a program walks through `rows` rows of up to `columns` columns, `step` at a time."""

    rows: int
    step: int
    columns: int
    warps: int

    def options(self, width: int) -> dict[str, Any]:
        # 16 is the least that keeps a warp's loads in one piece where a matrix is narrow.
        columns = min(self.columns, max(16, triton.next_power_of_2(width)))
        return {"ROWS": self.rows, "BLOCK_T": self.step, "BLOCK_F": columns, "num_warps": self.warps}

    def programs(self, tokens: int, width: int) -> tuple[int]:
        return (triton.cdiv(tokens, self.rows) * triton.cdiv(width, self.options(width)["BLOCK_F"]),)


FORWARD = Tiles(rows=4, step=4, columns=512, warps=4)
BACKWARD = Tiles(rows=64, step=1, columns=512, warps=2)
SUMS: dict[str, Any] = {"BLOCK_G": 256, "BLOCK_F": 16, "num_warps": 8}


@torch.library.custom_op("vitamp::gelu_with_bias", mutates_args=())
def gelu_with_bias(h: Tensor, bias: Tensor) -> Tensor:
    """`h`: [..., width], in any precision; computed in fp32 and given in h's. `bias`: [width]."""
    h, bias = h.contiguous(), bias.contiguous()
    y = torch.empty_like(h)
    tokens, width = _sizes(h)
    with torch.cuda.device_of(h):
        forward_kernel[FORWARD.programs(tokens, width)](h, bias, y, tokens, width, **FORWARD.options(width))
    return y


@torch.library.custom_op("vitamp::gelu_with_bias_backward", mutates_args=())
def gelu_with_bias_backward(dy: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dy, h, bias = dy.contiguous(), h.contiguous(), bias.contiguous()
    dh, db = torch.empty_like(h), torch.empty_like(bias)
    tokens, width = _sizes(h)
    groups = triton.cdiv(tokens, BACKWARD.rows)
    sums = torch.empty((groups, width), dtype=torch.float32, device=h.device)
    # Steps are compiled for: of powers of two there are few.
    adding: dict[str, Any] = {**SUMS, "STEPS": triton.next_power_of_2(triton.cdiv(groups, SUMS["BLOCK_G"]))}
    with torch.cuda.device_of(h):
        backward_kernel[BACKWARD.programs(tokens, width)](
            dy, h, bias, dh, sums, tokens, width, **BACKWARD.options(width)
        )
        add_up_kernel[(triton.cdiv(width, SUMS["BLOCK_F"]),)](sums, db, groups, width, **adding)
    return dh, db


def _sizes(h: Tensor) -> tuple[int, int]:
    return h.numel() // h.shape[-1], h.shape[-1]


@gelu_with_bias.register_fake
def _(h: Tensor, _bias: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@gelu_with_bias_backward.register_fake
def _(_dy: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    like = torch.contiguous_format
    return torch.empty_like(h, memory_format=like), torch.empty_like(bias, memory_format=like)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.vitamp.gelu_with_bias_backward(dy, *ctx.saved_tensors)


gelu_with_bias.register_autograd(_backward, setup_context=_keep)


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Both passes once, on little; raises what goes wrong, or where the numbers are not torch's."""
    wave = torch.linspace(-6.0, 6.0, 16 * 64, device=device).view(16, 64)
    h, bias = wave.to(dtype, copy=True).requires_grad_(), (wave[0] / 8).requires_grad_()
    found = gelu_with_bias(h, bias)
    expected = F.gelu(h.float() + bias)
    both = [torch.autograd.grad(y.float().sum(), (h, bias)) for y in (found, expected)]
    for ours, torchs in zip((found, *both[0]), (expected, *both[1]), strict=True):
        torch.testing.assert_close(ours.float(), torchs.float(), rtol=2.0**-7, atol=1e-4)
