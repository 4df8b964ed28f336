"""Triton kernels for bias and exact GELU: forward, backward with partial sums of the bias's gradient, and their sum.

With Q(a) the upper tail of the normal distribution, q its density and a = |x|, GELU is max(x, 0) - a Q(a). Its
derivative is Q(a) - a q(a) for x < 0, and 1 minus that for x > 0. Q(a) is computed as 2 to the power of a polynomial:
one instruction of the special function units, where erf takes about 25 ordinary ones and would slow the kernel down.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tail(a):
    """Q(a), with a relative error below 7e-6 on [0, 6]; beyond, it falls to 0 before bf16 would underflow."""
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
    blocks = tl.cdiv(width, BLOCK_F)
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    columns = (tl.program_id(0) % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    across = columns < width
    shift = tl.load(bias + columns, mask=across, other=0.0).to(tl.float32)[None, :]
    h += first * width
    y += first * width
    left = tokens - first
    for start in range(0, ROWS, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (rows < left)[:, None] & across[None, :]
        at = rows[:, None] * width + columns[None, :]
        x = tl.load(h + at, mask=mask, other=0.0).to(tl.float32) + shift
        tl.store(y + at, _gelu(x).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    dy, h, bias, dh, sums, tokens, width, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """`sums` gets one row for every ROWS rows of dh: their sum in fp32, before dh is rounded."""
    blocks = tl.cdiv(width, BLOCK_F)
    group = tl.program_id(0) // blocks
    first = group.to(tl.int64) * ROWS
    columns = (tl.program_id(0) % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    across = columns < width
    shift = tl.load(bias + columns, mask=across, other=0.0).to(tl.float32)[None, :]
    dy += first * width
    h += first * width
    dh += first * width
    left = tokens - first
    total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, ROWS, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (rows < left)[:, None] & across[None, :]
        at = rows[:, None] * width + columns[None, :]
        x = tl.load(h + at, mask=mask, other=0.0).to(tl.float32) + shift
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * _slope(x)
        total += gradient
        tl.store(dh + at, gradient.to(dh.dtype.element_ty), mask=mask)
    tl.store(sums + group.to(tl.int64) * width + columns, tl.sum(total, 0), mask=across)


@triton.jit(do_not_specialize=["groups"])
def add_up_kernel(sums, db, groups, width, STEPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_F: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    total = tl.zeros([BLOCK_G, BLOCK_F], tl.float32)
    for step in range(STEPS):
        rows = step * BLOCK_G + tl.arange(0, BLOCK_G)
        mask = (rows < groups)[:, None] & (columns < width)[None, :]
        total += tl.load(sums + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(db + columns, tl.sum(total, 0).to(db.dtype.element_ty), mask=columns < width)
