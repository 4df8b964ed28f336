"""torch.ops.vitamp.cpu_linear and cpu_mlp: linear layers and MLPs by AMX, forward and backward.

They compute in bf16, with weights in fp32 or bf16, or in fp32: an fp32 number is the sum of three bf16 numbers, and six
products of these are as exact as one in fp32. They are custom operators, so autograd and compiled graphs do not look
into them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.speed.amx.build import address, load, workspace

SOURCES = {torch.float32: "products_amx", torch.bfloat16: "products_half_amx"}
NOTHING, GELU, TIMES = range(3)
"""Operation after a product; see products_body.h."""
PANEL = 32
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Expected error of a product in each dtype, relative to its largest value."""


@torch.library.custom_op("vitamp::cpu_linear", mutates_args=(), device_types="cpu")
def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(_rows(x), weight, bias=bias, b_transposed=True).view(*x.shape[:-1], len(weight))


@torch.library.custom_op("vitamp::cpu_linear_backward", mutates_args=(), device_types="cpu")
def cpu_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty tensors for those that are not needed."""
    grad, dx, dw, db = _rows(grad), x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    if needs[0]:
        dx = _product(grad, weight).view(x.shape)
    if needs[1]:
        dw, db = _gradients_of_layer(grad, _rows(x), weight.dtype)
    elif needs[2]:
        db = grad.sum(0, dtype=torch.float32).to(weight.dtype)
    return dx, dw, db


@torch.library.custom_op("vitamp::cpu_mlp", mutates_args=(), device_types="cpu")
def cpu_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for the backward pass GELU's slope and GELU's output."""
    y = x.new_empty(x[..., 0].numel(), len(w1))
    slope = _product(_rows(x), w1, bias=b1, b_transposed=True, after=GELU, other=y)
    return _product(y, w2, bias=b2, b_transposed=True).view(*x.shape[:-1], len(w2)), slope, y


@torch.library.custom_op("vitamp::cpu_mlp_backward", mutates_args=(), device_types="cpu")
def cpu_mlp_backward(
    grad: Tensor, x: Tensor, slope: Tensor, y: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad = _rows(grad)
    dw2, db2 = _gradients_of_layer(grad, y, w2.dtype)
    dh = _product(grad, w2, after=TIMES, other=slope)
    dw1, db1 = _gradients_of_layer(dh, _rows(x), w1.dtype)
    return _product(dh, w1).view(x.shape), dw1, db1, dw2, db2


def _rows(x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else rows.contiguous()


def _gradients_of_layer(grad: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, summed in fp32. The bias's is a by-product of the weight's."""
    width = grad.shape[1]
    sums = grad.new_empty(-(-width // PANEL) * PANEL, dtype=torch.float32)
    dw = _product(grad, x, a_transposed=True, sums=sums, out=torch.float32)
    return dw.to(dtype), sums[:width].to(dtype, copy=True)


def _product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    a_transposed: bool = False,
    b_transposed: bool = False,
    after: int = NOTHING,
    other: Tensor | None = None,
    sums: Tensor | None = None,
    out: torch.dtype | None = None,
) -> Tensor:
    """Product of two matrices, which may be stored transposed; in the dtype of `a`, or in `out`."""
    rows, columns, depth = a.shape[int(a_transposed)], b.shape[int(not b_transposed)], a.shape[int(not a_transposed)]
    product = a.new_empty(rows, columns, dtype=out)
    library = _library(a.dtype)
    b, bias = b.contiguous(), None if bias is None else bias.float().contiguous()
    left = (address(a), a.stride(0), a_transposed)
    right = (address(b), b.stride(0), b_transposed, b.dtype is torch.bfloat16)
    threads = torch.get_num_threads()
    sizes = (rows, columns, depth, address(workspace(library.workspace_bytes(threads))), threads)
    to = (address(product), product.dtype is torch.bfloat16)
    library.product(*left, *right, *to, address(bias), address(other), after, address(sums), *sizes)
    return product


@cache
def _library(dtype: torch.dtype) -> Any:
    library = load(SOURCES[dtype])
    pointer, long, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    matrix, sizes = (pointer, long, number), (long, long, long, pointer, number)
    library.product.argtypes = [*matrix, *matrix, number, pointer, number, pointer, pointer, number, pointer, *sizes]
    library.product.restype = None
    library.workspace_bytes.argtypes, library.workspace_bytes.restype, library.longest.restype = [number], long, long
    return library


@cpu_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cpu_linear_backward.register_fake
def _(_grad: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    nothing = (0,)
    dx, dw = x.new_empty(x.shape if needs[0] else nothing), weight.new_empty(weight.shape if needs[1] else nothing)
    return dx, dw, weight.new_empty(weight.shape[:1] if any(needs[1:]) else nothing)


@cpu_mlp.register_fake
def _(x: Tensor, w1: Tensor, _b1: Tensor, w2: Tensor, _b2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x[..., 0].numel(), w1.shape[0]
    return x.new_empty(*x.shape[:-1], w2.shape[0]), x.new_empty(rows, width), x.new_empty(rows, width)


@cpu_mlp_backward.register_fake
def _(
    _grad: Tensor, x: Tensor, _slope: Tensor, _y: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dw1, dw2 = (given.new_empty(given.shape) for given in (x, w1, w2))
    return dx, dw1, w1.new_empty(w1.shape[0]), dw2, w2.new_empty(w2.shape[0])


def _save_for_linear(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:2])


def _backward_of_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad)
    gradients = torch.ops.vitamp.cpu_linear_backward(grad, *ctx.saved_tensors, needs)
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))


def _save_for_mlp(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w1, _, w2, _ = inputs
    ctx.save_for_backward(x, *output[1:], w1, w2)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_mlp(ctx: Any, grad: Tensor, _slope: Tensor | None, _y: Tensor | None) -> tuple[Tensor, ...]:
    return torch.ops.vitamp.cpu_mlp_backward(grad, *ctx.saved_tensors)


cpu_linear.register_autograd(_backward_of_linear, setup_context=_save_for_linear)
cpu_mlp.register_autograd(_backward_of_mlp, setup_context=_save_for_mlp)


def self_test(dtype: torch.dtype) -> None:
    """Run a small MLP forward and backward; raises an error if that fails or is less exact than `dtype`."""
    random = torch.Generator().manual_seed(0)
    sizes = ((70, 100), (50, 100), (50,), (40, 50), (40,))
    leaves = [torch.randn(*size, generator=random) for size in sizes]
    leaves = [leaf.requires_grad_() for leaf in (leaves[0].to(dtype), *leaves[1:])]
    x, w1, b1, w2, b2 = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output, expected = cpu_mlp(*leaves)[0], F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    grad = torch.randn(70, 40, generator=random).to(dtype)
    ours = (output, *torch.autograd.grad(output, leaves, grad))
    right = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for one, other in zip(ours, right, strict=True):
        error = float((one.detach().double() - other.detach()).abs().max() / other.detach().abs().max())
        if not error < LARGEST_ERROR[dtype]:
            raise RuntimeError(f"the kernels' products have an error of {error:.0e} relative to their largest value")
