"""The lists of operators: each name acts, on the CPU and by CUDA's key, in every way a model is run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config as autograd_config
import torch.nn.functional as F
from small_vit import aot, small_vit, step
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import config as compiler_config

from engine.amp.op_lists import OPERATORS, PADDLE, OpLists, check_names
from utils.errors import UserError

LOW_ON_CPU = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")

Make = Callable[..., Tensor]
# One call or more of each operator, on tensors that `t(*size)` makes.
CALLS: dict[str, list[Callable[[Make], Tensor]]] = {
    "linear": [lambda t: F.linear(t(2, 4), t(4, 4), t(4)), lambda t: F.linear(t(2, 3, 4), t(4, 4))],
    "matmul": [lambda t: t(2, 4, 4) @ t(2, 4, 4), lambda t: torch.matmul(t(4, 4), t(4))],
    "mm": [lambda t: torch.mm(t(4, 4), t(4, 4))],
    "bmm": [lambda t: torch.bmm(t(2, 4, 4), t(2, 4, 4))],
    "addmm": [lambda t: torch.addmm(t(4), t(4, 4), t(4, 4))],
    "baddbmm": [lambda t: torch.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4))],
    "einsum": [lambda t: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4))],
    "conv_transpose2d": [lambda t: F.conv_transpose2d(t(1, 2, 6, 6), t(2, 2, 3, 3))],
    "scaled_dot_product_attention": [
        lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8))
    ],
    "layer_norm": [lambda t: F.layer_norm(t(2, 4), (4,), t(4), t(4))],
    "rms_norm": [lambda t: F.rms_norm(t(2, 4), (4,), t(4))],
    "group_norm": [lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4))],
    "batch_norm": [lambda t: F.batch_norm(t(2, 4, 3), None, None, training=True)],
    "softmax": [lambda t: F.softmax(t(2, 4), dim=-1), lambda t: t(2, 4).softmax(-1)],
    "log_softmax": [lambda t: F.log_softmax(t(2, 4), dim=-1)],
    "add": [lambda t: t(4) + t(4), lambda t: t(4) + 1, lambda t: 1.5 + t(4)],
    "sub": [lambda t: t(4) - t(4), lambda t: t(4) - 1, lambda t: 1 - t(4)],
    "mul": [lambda t: t(4) * t(4), lambda t: t(4) * 0.5],
    "div": [lambda t: t(4) / t(4), lambda t: t(4) / 3],
    "pow": [lambda t: t(4) ** 2, lambda t: t(4) ** t(4), lambda t: torch.pow(2.0, t(4))],
    "cumsum": [lambda t: t(4).cumsum(0)],
    "logsumexp": [lambda t: t(2, 4).logsumexp(-1)],
    "norm": [
        lambda t: t(4).norm(),
        lambda t: t(2, 4).norm(2, -1),
        lambda t: torch.linalg.vector_norm(t(4)),
        lambda t: torch.norm(t(2, 4), p=2, dim=-1),
    ],
    "cosine_similarity": [lambda t: F.cosine_similarity(t(2, 4), t(2, 4))],
    "max_pool2d": [lambda t: F.max_pool2d(t(1, 2, 4, 4), 2)],
    "avg_pool2d": [lambda t: F.avg_pool2d(t(1, 2, 4, 4), 2)],
    "adaptive_avg_pool2d": [lambda t: F.adaptive_avg_pool2d(t(1, 2, 4, 4), 1)],
    "cross_entropy": [lambda t: F.cross_entropy(t(2, 4), t(2, 4).softmax(-1))],
    "nll_loss": [lambda t: F.nll_loss(t(2, 4), t(2, 4).argmax(-1))],
    "kl_div": [lambda t: F.kl_div(t(4), t(4), reduction="sum")],
}
for name in ("sigmoid", "tanh", "exp", "log", "square", "sqrt", "rsqrt", "reciprocal"):
    CALLS[name] = [lambda t, name=name: getattr(t(4), name)()]
for name in ("sum", "mean", "var", "prod"):
    CALLS[name] = [lambda t, name=name: getattr(t(4), name)(), lambda t, name=name: getattr(t(2, 4), name)(-1)]
for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"):
    CALLS[name] = [lambda t, name=name: getattr(F, name)(t(4), t(4))]
for mode in ("bilinear", "bicubic"):
    CALLS[f"upsample_{mode}2d"] = [lambda t, mode=mode: F.interpolate(t(1, 2, 4, 4), (8, 8), mode=mode)]
for n in (1, 2, 3):
    for padding in (0, "same"):
        CALLS.setdefault(f"conv{n}d", []).append(
            lambda t, n=n, padding=padding: getattr(F, f"conv{n}d")(
                t(1, 2, *[6] * n), t(2, 2, *[3] * n), padding=padding
            )
        )
for name in ("gelu", "relu", "silu", "softplus", "hardswish", "hardsigmoid", "leaky_relu"):
    CALLS[name] = [lambda t, name=name: getattr(F, name)(t(4))]


@contextmanager
def autocast(device_type: str) -> Iterator[None]:
    """Autocast that does not mind whether there is a GPU, since only the dispatcher is asked."""
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    torch.set_autocast_enabled(device_type, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, torch.float16 if device_type == "cuda" else torch.bfloat16)


def outputs(name: str, given: torch.dtype, device_type: str) -> set[torch.dtype]:
    with autocast(device_type):
        return {call(lambda *size: torch.rand(*size, device=device_type).to(given)).dtype for call in CALLS[name]}


def test_every_operator_has_a_test_call() -> None:
    assert set(CALLS) == set(OPERATORS)
    assert {own for names in PADDLE.values() for own in names} <= set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("key", "tensors"), [("cpu", nullcontext), ("cuda", FakeTensorMode)])
def test_listed_operator_runs_in_the_listed_precision(name: str, key: str, tensors: Callable[..., Any]) -> None:
    with tensors():
        with OpLists(key, [], [name]):
            assert outputs(name, torch.bfloat16, key) == {torch.float32}
        with OpLists(key, [name], []):
            assert outputs(name, torch.float32, key) == {torch.bfloat16}


def test_lists_cast_only_under_autocast_and_neither_fp64_nor_integers() -> None:
    with OpLists("cpu", ["softmax"], ["gelu"]):
        assert F.softmax(torch.rand(4), dim=0).dtype is torch.float32
        assert F.gelu(torch.rand(4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    with OpLists("cpu", [], ["add"]), autocast("cpu"):
        assert (torch.ones(2, dtype=torch.float64) + 1).dtype is torch.float64
        assert (torch.ones(2, dtype=torch.int64) + 1).dtype is torch.int64


def test_dtype_argument_of_a_call_is_respected() -> None:
    values = torch.rand(64)
    fp32 = F.softmax(values, dim=0)
    with OpLists("cpu", ["softmax"], []), autocast("cpu"):
        assert torch.equal(F.softmax(values, dim=0, dtype=torch.float32), fp32)
        assert not torch.equal(F.softmax(values, dim=0).float(), fp32)


@pytest.mark.parametrize("lists", [(["batch_norm"], []), ([], ["batch_norm"])])
def test_batch_norm_updates_its_statistics(lists: tuple[list[str], list[str]]) -> None:
    norm = torch.nn.BatchNorm1d(3)
    with OpLists("cpu", *lists), autocast("cpu"):
        norm(5 + torch.rand(4, 3)).sum().backward()
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float32
    assert (norm.running_mean > 0.4).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_black_list_of_all_operators_equals_fp32_bit_for_bit(fused: bool, checkpointing: bool, compiled: bool) -> None:
    fp32 = step(small_vit(fused), amp=False)
    assert not step(small_vit(fused)).equals(fp32)
    model = small_vit(fused, checkpointing)
    with OpLists("cpu", [], LOW_ON_CPU):
        assert step(model, aot(model) if compiled else None).equals(fp32)


def test_white_list_acts_the_same_eager_compiled_and_checkpointed() -> None:
    without = step(small_vit())
    compiled = small_vit(checkpointing=True)
    with OpLists("cpu", ["softmax", "layer_norm"], []):
        eager = step(small_vit())
        assert not eager.equals(without)
        assert step(small_vit(checkpointing=True)).equals(eager)
        assert step(compiled, aot(compiled)).equals(eager)


def test_leaving_restores_torchs_behaviour() -> None:
    before = step(small_vit())
    tag, backward = compiler_config.cache_key_tag, autograd_config.backward_pass_autocast
    lists = OpLists("cpu", ["softmax"], ["linear"])
    with lists:
        assert compiler_config.cache_key_tag != tag
        assert not step(small_vit()).equals(before)
    assert (compiler_config.cache_key_tag, autograd_config.backward_pass_autocast) == (tag, backward)
    assert step(small_vit()).equals(before)
    with lists:
        assert not step(small_vit()).equals(before)


def test_operator_on_both_lists_is_an_error_under_any_name() -> None:
    with pytest.raises(UserError, match="both name linear "):
        check_names(["linear"], ["fused_gemm_epilogue"])


def test_mul_means_torchs_elementwise_product_and_warns(said: pytest.LogCaptureFixture) -> None:
    check_names([], ["mul"])
    assert "elementwise" in said.text


def test_cached_graphs_are_kept_apart_by_lists() -> None:
    tags = set()
    for device_type, *lists in (
        ("cpu", [], []),
        ("cpu", [], ["gelu"]),
        ("cpu", [], ["softmax"]),
        ("cpu", ["gelu"], []),
        ("cuda", [], ["gelu"]),
    ):
        with OpLists(device_type, *lists):
            tags.add(compiler_config.cache_key_tag)
    assert len(tags) == 5
