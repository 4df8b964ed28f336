"""Run by Triton's interpreter, in a process of its own: how far the packed attention is from fp64, as JSON.

python -m tests.engine.speed.interpreted_attention, with TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timm.layers.attention import Attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter

import engine.speed.kernels.attention as kernels
import engine.speed.packed_attention as packed_attention_module
from engine.speed.kernels.attention import packed_attention, supports
from engine.speed.packed_attention import use_packed
from tests.engine.speed.exact_attention import apart, exact_attention

CASES = [(197, 64), (50, 64), (17, 32), (256, 32), (1, 64)]
KINDS = [(torch.bfloat16, 1.0), (torch.float16, 4.0)]
"""With the spread of queries and keys: 4 makes a few weights of each row large."""
builder: Any = interpreter.InterpreterBuilder


def numbers(handle: Any) -> Any:
    """The interpreter keeps bf16 as integers, and multiplies matrices of them as such."""
    wide = handle.data.astype(np.uint32) << 16 if handle.data.dtype == np.uint16 else handle.data
    return wide.view(np.float32) if wide.dtype == np.uint32 else wide


def dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    product = np.matmul(numbers(a), numbers(b), dtype=np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def errors(tokens: int, width: int, dtype: torch.dtype, spread: float) -> dict[str, float]:
    torch.manual_seed(0)
    heads = 2
    leaf = torch.randn(2, tokens, 3 * heads * width)
    leaf[..., : 2 * heads * width] *= spread
    qkv, grad = leaf.to(dtype).requires_grad_(), torch.randn(2, tokens, heads * width).to(dtype)
    out, logsumexp = packed_attention(qkv, heads)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    expected_out, expected_logsumexp, expected_grad = exact_attention(qkv, heads, grad)
    found["out"] = (out, expected_out)
    found["logsumexp"] = (logsumexp, expected_logsumexp / math.log(2.0))
    parts = [whole.unflatten(2, (3, -1)).unbind(2) for whole in (torch.autograd.grad(out, qkv, grad)[0], expected_grad)]
    found |= dict(zip(("dq", "dk", "dv"), zip(*parts, strict=True), strict=True))
    return {name: apart(*pair) for name, pair in found.items()}


def layer_in_each_way() -> dict[str, bool]:
    """timm's layer under autocast: whether a compiled and a checkpointed one give the bits of the one as written."""
    packed_attention_module.supports_call = lambda qkv, heads: supports(
        qkv.shape[1], qkv.shape[2] // heads // 3, qkv.dtype
    )
    torch.manual_seed(0)
    layer, x = Attention(64, num_heads=2, qkv_bias=True), torch.randn(2, 17, 64)
    use_packed(layer)
    vars(layer)["strict"] = True

    def passes(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            out = call(leaf)
        return [out, *torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])]

    expected = passes(layer)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
        "checkpointed": lambda leaf: checkpoint(layer, leaf, use_reentrant=False),
    }
    return {
        name: all(torch.equal(*pair) for pair in zip(passes(way), expected, strict=True)) for name, way in ways.items()
    }


if __name__ == "__main__":
    builder.create_dot = dot
    told: dict[str, dict[str, Any]] = {
        f"{tokens} {width} {str(dtype).removeprefix('torch.')}": errors(tokens, width, dtype, spread)
        for tokens, width in CASES
        for dtype, spread in KINDS
    }
    kernels.BACKWARD = replace(kernels.BACKWARD, keys=64)
    told["in blocks of keys"] = errors(197, 64, torch.float16, 1.0)
    sample = torch.randn(2, 5, 3 * 2 * 32, dtype=torch.float16, requires_grad=True)
    told["operator"] = torch.library.opcheck(packed_attention, (sample, 2))
    told["layer"] = layer_in_each_way()
    print(json.dumps(told))
