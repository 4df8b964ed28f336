"""The kernels of the packed attention, carried out by Triton's interpreter, as interpreted_gelu.py does those of GELU.

TRITON_INTERPRET=1 python -m pytest tests/engine/speed/interpreted_attention.py runs these tests by hand.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter

import engine.speed.packed_attention as packed_attention_module
from engine.speed.kernels.attention import packed_attention, supports
from engine.speed.packed_attention import use_packed
from tests.engine.speed.exact_attention import apart, exact_attention


def numbers(handle: Any) -> Any:
    """The interpreter keeps bf16 as integers, and multiplies matrices of them as such."""
    wide = handle.data.astype(np.uint32) << 16 if handle.data.dtype == np.uint16 else handle.data
    return wide.view(np.float32) if wide.dtype == np.uint32 else wide


def dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    product = np.matmul(numbers(a), numbers(b), dtype=np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def interpreter_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize(
    ("dtype", "spread", "bound"),
    [
        (torch.bfloat16, 1.0, 2.0**-5),  # the interpreter cuts bf16 off where a GPU rounds
        (torch.float16, 4.0, 2.0**-9),  # queries and keys so far apart make a few weights of each row large
    ],
)
@pytest.mark.parametrize(("tokens", "width"), [(197, 64), (50, 64), (17, 32), (256, 32), (1, 64)])
def test_packed_attention_is_close_to_fp64(
    tokens: int, width: int, dtype: torch.dtype, spread: float, bound: float
) -> None:
    torch.manual_seed(0)
    heads = 2
    leaf = torch.randn(2, tokens, 3 * heads * width)
    leaf[..., : 2 * heads * width] *= spread
    qkv, grad = leaf.to(dtype).requires_grad_(), torch.randn(2, tokens, heads * width).to(dtype)
    out, logsumexp = packed_attention(qkv, heads)
    expected_out, expected_logsumexp, expected_grad = exact_attention(qkv, heads, grad)
    assert apart(logsumexp, expected_logsumexp / math.log(2.0)) < 1e-6
    assert apart(out, expected_out) < bound
    parts = (whole.unflatten(2, (3, -1)).unbind(2) for whole in (torch.autograd.grad(out, qkv, grad)[0], expected_grad))
    for name, found, expected in zip("qkv", *parts, strict=True):
        assert apart(found, expected) < bound, name


def test_packed_attention_passes_torchs_opcheck() -> None:
    sample = torch.randn(2, 5, 3 * 2 * 32, dtype=torch.float16, requires_grad=True)
    torch.library.opcheck(packed_attention, (sample, 2))


def test_compiled_or_checkpointed_layer_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports_call(qkv: Tensor, heads: int) -> bool:
        return supports(qkv.shape[1], qkv.shape[2] // heads // 3, qkv.dtype)

    monkeypatch.setattr(packed_attention_module, "supports_call", supports_call)
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
    assert all(map(torch.equal, passes(torch.compile(layer, backend="aot_eager", fullgraph=True)), expected))
    assert all(map(torch.equal, passes(lambda leaf: checkpoint(layer, leaf, use_reentrant=False)), expected))
