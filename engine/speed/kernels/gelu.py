"""torch.ops.vitamp.gelu_with_bias: exact GELU of h + bias, whose backward pass also sums the bias's gradient.

It is a custom operator, so autograd, autocast, compiled graphs and CUDA graphs do not look into it. Sums have a fixed
order, so the same input gives the same bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F


@triton.jit
def _tail(a):
    """Tail of the normal distribution, Q(a) = P(X > a), for a >= 0.

    It is 2 to the power of a polynomial that was fitted to log2 Q(a). The relative error is below 7e-6 on [0, 6].
    Beyond 6, Q is so small that it does not matter: the result falls to 0 before bf16 would underflow.
    """
    power = -1.7937791855890437e-06 * a + 6.0726135e-05
    power = power * a - 9.2318555e-04
    power = power * a + 8.4768468e-03
    power = power * a - 5.3890936e-02
    power = power * a - 4.5854157e-01
    power = power * a - 1.1512144
    return tl.exp2(power * a - 1.0)


@triton.jit
def _gelu(x):
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * _tail(a)


@triton.jit
def _slope(x):
    """Derivative of GELU. The constants are -log2(e) / 2 and log2(1 / sqrt(2 pi))."""
    a = tl.abs(x)
    density = tl.exp2(a * a * -0.72134752 - 1.3257481)
    below = _tail(a) - a * density
    return tl.where(x > 0.0, 1.0 - below, below)


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    h, bias, y, tokens, width, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """Compute y = gelu(h + bias). `h` and `y` are matrices, tokens x width.

    A program computes ROWS rows of BLOCK_F columns, BLOCK_T rows at a time. `tokens` is not specialised, since batches
    of another size would compile the kernel again.
    """
    # The number of a program says its rows and, within them, its columns.
    column_blocks = tl.cdiv(width, BLOCK_F)
    first_row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS
    columns = (tl.program_id(0) % column_blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    has_column = columns < width
    biases = tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    h += first_row * width
    y += first_row * width
    rows_left = tokens - first_row
    for start in range(0, ROWS, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (rows < rows_left)[:, None] & has_column[None, :]
        offsets = rows[:, None] * width + columns[None, :]
        x = tl.load(h + offsets, mask=mask, other=0.0).to(tl.float32) + biases
        tl.store(y + offsets, _gelu(x).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    dy, h, bias, dh, sums, tokens, width, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """Compute the gradient of h for y = gelu(h + bias), from that of y, and sum it for the gradient of the bias.

    `dy`, `h`, `dh`: gradient of y, h and its gradient, tokens x width. `sums`: gets a row for each group of ROWS rows
    of dh, their sum in fp32, before dh is rounded. A program computes a group in BLOCK_F columns, BLOCK_T rows at a
    time.
    """
    # The number of a program says its group of rows and, within it, its columns.
    column_blocks = tl.cdiv(width, BLOCK_F)
    group = tl.program_id(0) // column_blocks
    first_row = group.to(tl.int64) * ROWS
    columns = (tl.program_id(0) % column_blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    has_column = columns < width
    biases = tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    dy += first_row * width
    h += first_row * width
    dh += first_row * width
    rows_left = tokens - first_row
    total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, ROWS, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (rows < rows_left)[:, None] & has_column[None, :]
        offsets = rows[:, None] * width + columns[None, :]
        x = tl.load(h + offsets, mask=mask, other=0.0).to(tl.float32) + biases
        gradient = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32) * _slope(x)
        total += gradient
        tl.store(dh + offsets, gradient.to(dh.dtype.element_ty), mask=mask)
    tl.store(sums + group.to(tl.int64) * width + columns, tl.sum(total, 0), mask=has_column)


@triton.jit(do_not_specialize=["groups"])
def add_up_kernel(sums, db, groups, width, STEPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_F: tl.constexpr):
    """Add up the sums of all groups of rows: `db`, the gradient of the bias, gets the sum of each column of `sums`.

    `sums`: groups x width. A program adds up BLOCK_F columns, BLOCK_G groups in each of STEPS steps.
    """
    columns = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    total = tl.zeros([BLOCK_G, BLOCK_F], tl.float32)
    for step in range(STEPS):
        rows = step * BLOCK_G + tl.arange(0, BLOCK_G)
        mask = (rows < groups)[:, None] & (columns < width)[None, :]
        total += tl.load(sums + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(db + columns, tl.sum(total, 0).to(db.dtype.element_ty), mask=columns < width)


@dataclass(frozen=True)
class Tiles:
    """Launch options: a program computes `rows` rows of up to `columns` columns, `step` rows at a time."""

    rows: int
    step: int
    columns: int
    warps: int

    def options(self, width: int) -> dict[str, Any]:
        # With fewer than 16 columns a warp's loads would not be contiguous.
        columns = min(self.columns, max(16, triton.next_power_of_2(width)))
        return {"ROWS": self.rows, "BLOCK_T": self.step, "BLOCK_F": columns, "num_warps": self.warps}

    def programs(self, tokens: int, width: int) -> tuple[int]:
        return (triton.cdiv(tokens, self.rows) * triton.cdiv(width, self.options(width)["BLOCK_F"]),)


FORWARD = Tiles(rows=4, step=4, columns=512, warps=4)
BACKWARD = Tiles(rows=64, step=1, columns=512, warps=2)
SUMS: dict[str, Any] = {"BLOCK_G": 256, "BLOCK_F": 16, "num_warps": 8}


@torch.library.custom_op("vitamp::gelu_with_bias", mutates_args=())
def gelu_with_bias(h: Tensor, bias: Tensor) -> Tensor:
    """Compute gelu(h + bias), with `h` [..., width] of any dtype and `bias` [width], in fp32; returned in h's dtype."""
    h = h.contiguous()
    bias = bias.contiguous()
    y = torch.empty_like(h)
    tokens, width = _sizes(h)
    with torch.cuda.device_of(h):
        forward_kernel[FORWARD.programs(tokens, width)](h, bias, y, tokens, width, **FORWARD.options(width))
    return y


@torch.library.custom_op("vitamp::gelu_with_bias_backward", mutates_args=())
def gelu_with_bias_backward(dy: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `h` and `bias` for gelu(h + bias), from the gradient of the output (`dy`).

    The gradient of the bias is the sum over all rows. One kernel sums each group of rows, a second one the groups.
    """
    dy = dy.contiguous()
    h = h.contiguous()
    bias = bias.contiguous()
    dh = torch.empty_like(h)
    db = torch.empty_like(bias)
    tokens, width = _sizes(h)
    groups = triton.cdiv(tokens, BACKWARD.rows)
    sums = torch.empty((groups, width), dtype=torch.float32, device=h.device)
    # The second kernel is compiled for each number of steps, so that number is rounded up to a power of two.
    sum_options: dict[str, Any] = {**SUMS, "STEPS": triton.next_power_of_2(triton.cdiv(groups, SUMS["BLOCK_G"]))}
    with torch.cuda.device_of(h):
        backward_kernel[BACKWARD.programs(tokens, width)](
            dy, h, bias, dh, sums, tokens, width, **BACKWARD.options(width)
        )
        add_up_kernel[(triton.cdiv(width, SUMS["BLOCK_F"]),)](sums, db, groups, width, **sum_options)
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


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    h, bias = inputs
    ctx.save_for_backward(h, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    h, bias = ctx.saved_tensors
    return torch.ops.vitamp.gelu_with_bias_backward(dy, h, bias)


gelu_with_bias.register_autograd(_backward, setup_context=_save_for_backward)


def self_test(device: torch.device, dtype: torch.dtype) -> None:
    """Run both passes of `gelu_with_bias` on a small matrix. Raises an error if they differ from torch's result."""
    values = torch.linspace(-6.0, 6.0, 16 * 64, device=device).view(16, 64)
    h = values.to(dtype, copy=True).requires_grad_()
    bias = (values[0] / 8).requires_grad_()
    output = gelu_with_bias(h, bias)
    expected = F.gelu(h.float() + bias)
    dh, db = torch.autograd.grad(output.float().sum(), (h, bias))
    expected_dh, expected_db = torch.autograd.grad(expected.float().sum(), (h, bias))
    for computed, reference in ((output, expected), (dh, expected_dh), (db, expected_db)):
        # The distance of neighbouring numbers in bf16, so that its rounding passes.
        torch.testing.assert_close(computed.float(), reference.float(), rtol=2.0**-7, atol=1e-4)
