"""torch.ops.vitamp.packed_attention: attention over few tokens that reads the packed qkv and writes its gradient.

The kernels are in Triton. It is a custom operator, so autograd, autocast, compiled graphs
and CUDA graphs do not look into it. No two programs add to the same sum, so the same input gives the same bits.
"""

from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_TOKENS = 256
WIDTHS = (32, 64)
"""Supported widths of a head."""
HALVES = (torch.bfloat16, torch.float16)
MIN_DOT_SIZE = 16
"""Least number of rows and columns in Triton's matrix product."""
LOG2_E = log2(2.718281828459045)
MOST_ERROR = 2.0**-6
"""Relative error from which the self-test fails; bf16 rounds by up to 2^-8."""


def forward_options(tokens: int, heads: int, width: int) -> dict[str, Any]:
    """Return how to launch the forward kernel: a program computes a head, 64 queries at a time, with all its keys."""
    first, second, third = key_blocks(tokens)
    sizes = {"N": tokens, "H": heads, "D": width, "ROWS": min(64, _next_power_of_2(tokens))}
    return sizes | {"K1": first, "K2": second, "K3": third, "num_warps": 4, "num_stages": 3}


def backward_options(tokens: int, heads: int, width: int) -> dict[str, Any]:
    """Return how to launch the backward kernel: a program computes a head, all its keys with 32 queries at a time."""
    keys = _next_power_of_2(tokens)
    sizes = {"N": tokens, "H": heads, "D": width, "ROWS": min(32, keys), "KEYS": keys}
    return sizes | {"num_warps": 8 if keys == MAX_TOKENS else 4, "num_stages": 3}


def supports(tokens: int, width: int, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for this number of tokens, width of a head, and dtype."""
    return tokens <= MAX_TOKENS and width in WIDTHS and dtype in HALVES


def key_blocks(tokens: int) -> tuple[int, int, int]:
    """Return three block sizes, powers of two, that together hold all keys with little padding; unused ones are 0."""
    left = -(-tokens // MIN_DOT_SIZE) * MIN_DOT_SIZE  # rounded up to a multiple
    blocks = []
    while left > 0:
        is_last = len(blocks) == 2
        # The largest power of two within `left`; the last block must hold all that is left.
        blocks.append(_next_power_of_2(left) if is_last else 1 << (left.bit_length() - 1))
        left -= blocks[-1]
    # If one block for all keys has no more padding than these blocks, it takes their place.
    if sum(blocks) == _next_power_of_2(tokens):
        blocks = [sum(blocks)]
    first, second, third = (blocks + [0, 0])[:3]
    return first, second, third


def _next_power_of_2(number: int) -> int:
    return max(MIN_DOT_SIZE, 1 << (number - 1).bit_length())


@torch.library.custom_op("vitamp::packed_attention", mutates_args=())
def packed_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Compute attention of `qkv`, [batch, tokens, 3 * heads * width].

    Returns the output, [batch, tokens, heads * width], and for the backward pass the logsumexp of each query to base 2,
    [batch, heads, tokens].
    """
    qkv = qkv.contiguous()
    batch, tokens, width = _sizes(qkv, heads)
    out, logsumexp = _empty_results(qkv, heads)
    from engine.speed.kernels import attention_triton as kernels

    # The kernel computes e^(score * width^-0.5) as a power of 2, for which there is an instruction.
    scale_to_base_2 = width**-0.5 * LOG2_E
    programs = (batch * heads,)
    with torch.cuda.device_of(qkv):
        kernels.forward_kernel[programs](qkv, out, logsumexp, scale_to_base_2, **forward_options(tokens, heads, width))
    return out, logsumexp


@torch.library.custom_op("vitamp::packed_attention_backward", mutates_args=())
def packed_attention_backward(grad: Tensor, qkv: Tensor, out: Tensor, logsumexp: Tensor, heads: int) -> Tensor:
    """Compute the gradient of `qkv` from the gradient of the output (`grad`) and from the results of the forward pass.

    Shapes are those of `packed_attention`: qkv is [batch, tokens, 3 * heads * width].
    """
    grad = grad.contiguous()
    qkv = qkv.contiguous()
    batch, tokens, width = _sizes(qkv, heads)
    dqkv = torch.empty_like(qkv)
    from engine.speed.kernels import attention_triton as kernels

    # The kernel computes the softmax anew, as powers of 2, and the gradient of the scores with the scale itself.
    scale = width**-0.5
    scale_to_base_2 = scale * LOG2_E
    programs = (batch * heads,)
    with torch.cuda.device_of(qkv):
        kernels.backward_kernel[programs](
            qkv, out, logsumexp, grad, dqkv, scale, scale_to_base_2, **backward_options(tokens, heads, width)
        )
    return dqkv


def _sizes(qkv: Tensor, heads: int) -> tuple[int, int, int]:
    """Return the number of images in the batch, the number of tokens, and the width of a head."""
    batch, tokens, packed_width = qkv.shape
    return batch, tokens, packed_width // heads // 3


def _empty_results(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Allocate the output of attention and the logsumexp of each query."""
    batch, tokens, width = _sizes(qkv, heads)
    return qkv.new_empty(batch, tokens, heads * width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@packed_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return _empty_results(qkv, heads)


@packed_attention_backward.register_fake
def _(_grad: Tensor, qkv: Tensor, _out: Tensor, _logsumexp: Tensor, _heads: int) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads = inputs
    out, logsumexp = output
    ctx.save_for_backward(qkv, out, logsumexp)
    ctx.mark_non_differentiable(logsumexp)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    qkv, out, logsumexp = ctx.saved_tensors
    return torch.ops.vitamp.packed_attention_backward(grad, qkv, out, logsumexp, ctx.heads), None


packed_attention.register_autograd(_backward, setup_context=_save_for_backward)


def self_test(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Run both passes of attention once, for two heads. Raises an error if they fail or differ from torch's result."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, tokens, 3 * 2 * width, generator=random).to(device, dtype).requires_grad_()
    grad = torch.randn(2, tokens, 2 * width, generator=random).to(device, dtype)
    output, _ = packed_attention(qkv, 2)
    q, k, v = qkv.float().unflatten(2, (3, 2, width)).permute(2, 0, 3, 1, 4)  # each images x heads x tokens x width
    weights = (q @ k.transpose(-2, -1) * width**-0.5).softmax(-1)
    expected = (weights @ v).transpose(1, 2).flatten(2)
    (gradient,) = torch.autograd.grad(output, qkv, grad)
    (expected_gradient,) = torch.autograd.grad(expected, qkv, grad.float())
    for computed, reference in ((output, expected), (gradient, expected_gradient)):
        error = F.mse_loss(computed.float(), reference.float()).sqrt() / reference.float().square().mean().sqrt()
        if not error < MOST_ERROR:  # also if it is NaN
            raise RuntimeError(f"the attention kernels have a relative error of {error:.1e}")
