"""The kernels of GELU with bias, carried out by Triton's interpreter, which needs no GPU.

Triton takes up its interpreter when it is imported: test_kernels.py runs these tests in a process of their own.
TRITON_INTERPRET=1 python -m pytest tests/engine/speed/interpreted_gelu.py does so by hand.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.amp.low_precision import force_fp32
from engine.speed import fused_mlp
from engine.speed.kernels import gelu
from tests.engine.small import built_of

HALVES = [torch.bfloat16, torch.float16]


def values(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """h, bias and the gradient of what is made of them."""
    random = torch.Generator().manual_seed(0)
    h, bias, dy = (torch.randn(size, generator=random) for size in (sizes, sizes[-1:], sizes))
    return (3 * h).to(dtype).requires_grad_(), bias.requires_grad_(), dy.to(dtype)


def ours(h: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.vitamp.gelu_with_bias(h, bias)


def both_passes(h: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dh and the bias's gradient."""
    y = ours(h, bias)
    return [y.detach(), *torch.autograd.grad(y, (h, bias), dy)]


def exactly(h: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    wide, shift = (given.detach().double().requires_grad_() for given in (h, bias))
    y = F.gelu(wide + shift)
    return [y.detach(), *torch.autograd.grad(y, (wide, shift), dy.double())]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((3, 67, 96), marks=pytest.mark.slow),
        pytest.param((130, 33), marks=pytest.mark.slow),
        (1, 1),
        (2, 600),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_gelu_equals_float64_to_the_last_digit(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    given = values(*sizes, dtype=dtype)
    # The interpreter cuts fp32 off where a GPU rounds it to bf16; tests/gpu asks for half of that.
    last = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 0.0}[dtype]
    (y, dh, db), (exact_y, exact_dh, exact_db) = both_passes(*given), exactly(*given)
    assert (y.dtype, dh.dtype, db.dtype) == (dtype, dtype, torch.float32)
    assert torch.allclose(y.double(), exact_y, rtol=1.01 * last, atol=1e-6)
    assert torch.allclose(dh.double(), exact_dh, rtol=1.01 * last, atol=1e-5)
    # Summed before dh is rounded: as near in bf16 as in fp32.
    assert torch.allclose(db.double(), exact_db, rtol=1e-5, atol=2e-4)


@pytest.mark.slow
def test_bias_gradient_sums_more_groups_than_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of many tokens are: here 5 sums, by 2 at a time, in 4 steps."""
    monkeypatch.setitem(gelu.SUMS, "BLOCK_G", 2)
    given = values(4 * gelu.BACKWARD.rows + 1, 5)
    assert torch.allclose(both_passes(*given)[2].double(), exactly(*given)[2], rtol=1e-5, atol=2e-4)


def test_gelu_is_accurate_in_its_tails() -> None:
    given = torch.linspace(-6.0, 6.0, 1201, requires_grad=True), torch.zeros(1201, requires_grad=True), torch.ones(1201)
    (y, dh, _), (exact_y, exact_dh, _) = both_passes(*given), exactly(*given)
    assert torch.allclose(y.double(), exact_y, rtol=2e-5, atol=0)
    far_out = given[0].abs() > 2  # the derivative goes through 0 nearer by
    assert torch.allclose(dh.double()[far_out], exact_dh[far_out], rtol=2e-5, atol=0)


def test_gelu_of_infinities_and_nan() -> None:
    h = torch.tensor([1e30, -1e30, 65504.0, -65504.0, 12.0, -12.0, float("nan")], requires_grad=True)
    y, dh, _ = both_passes(h, torch.zeros(7, requires_grad=True), torch.ones(7))
    expected = torch.tensor([1e30, 0.0, 65504.0, 0.0, 12.0, 0.0, float("nan")])
    assert torch.allclose(y, expected, atol=1e-12, equal_nan=True)
    assert torch.allclose(dh, torch.tensor([1.0, 0, 1, 0, 1, 0, float("nan")]), atol=1e-12, equal_nan=True)


@pytest.mark.slow
def test_bias_gradient_has_the_biass_dtype_and_is_deterministic() -> None:
    h, bias, dy = values(130, 16, dtype=torch.bfloat16)
    first, second = both_passes(h, bias, dy), both_passes(h, bias, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    half = bias.detach().bfloat16().requires_grad_()
    db = both_passes(h, half, dy)[2]
    assert db.dtype is torch.bfloat16
    wide = both_passes(h, half.detach().float().requires_grad_(), dy)[2]
    assert torch.allclose(db.float(), wide, rtol=2.0**-7, atol=0)


def test_gradients_may_be_non_contiguous() -> None:
    h, bias, _ = values(5, 20)
    spread = torch.tensor(0.5).expand(5, 20)
    for found, expected in zip(both_passes(h, bias, spread), exactly(h, bias, spread), strict=True):
        assert torch.allclose(found.double(), expected, atol=2e-5)
    turned = h.detach().t().contiguous().t().requires_grad_()
    assert torch.equal(ours(turned, bias), ours(h, bias))


@pytest.mark.slow
def test_gelu_passes_torchs_opcheck() -> None:
    h, bias, dy = values(2, 5, 33)
    torch.library.opcheck(torch.ops.vitamp.gelu_with_bias.default, (h, bias))
    torch.library.opcheck(torch.ops.vitamp.gelu_with_bias_backward.default, (dy, h.detach(), bias.detach()))


@pytest.fixture
def mlps(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    """timm's, and a copy with the operator, which takes CPUs for GPUs here."""
    monkeypatch.setattr(fused_mlp, "_in_half", lambda x: torch.is_autocast_enabled("cpu") or x.dtype in HALVES)
    torch.manual_seed(0)
    theirs = nn.Sequential(Mlp(12, 40))
    fused = copy.deepcopy(theirs)
    fused_mlp.FusedMlps().apply(built_of(fused), True)
    return theirs, fused


def is_fused(y: Tensor) -> bool:
    """Whether the operator is among what `y` was made by."""
    nodes: list[Any] = [y.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None]
    return any("gelu_with_bias" in node.name() for node in nodes)


def results(model: nn.Module, x: Tensor, forward: Callable[..., Any] | None = None) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = (forward or model)(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


def test_fused_mlp_equals_timms_under_autocast(mlps: tuple[nn.Module, nn.Module]) -> None:
    theirs, fused = mlps
    x = torch.randn(3, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_fused(fused(x))
        assert not is_fused(theirs(x))
    exact = copy.deepcopy(theirs).double()
    y = exact(x.double())
    wanted = [y.detach(), *torch.autograd.grad(y.square().sum(), list(exact.parameters()))]
    for found, by_timm, right in zip(results(fused, x), results(theirs, x), wanted, strict=True):
        assert found.dtype is by_timm.dtype
        error, usual = ((given.double() - right).norm() / right.norm() for given in (found, by_timm))
        assert error < 1.5 * usual + 1e-3
        assert error < 2.0**-7


@pytest.mark.slow
def test_fused_mlp_is_the_same_compiled_and_checkpointed(mlps: tuple[nn.Module, nn.Module]) -> None:
    _, fused = mlps
    x = torch.randn(3, 7, 12)
    expected = results(fused, x)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(fused, x, compiled), expected))
    recomputed = results(fused, x, lambda images: checkpoint(fused, images, use_reentrant=False))
    assert all(map(torch.equal, recomputed, expected))


def test_fused_mlp_uses_timms_forward_in_fp32_and_with_hooks(mlps: tuple[nn.Module, nn.Module]) -> None:
    theirs, fused = mlps
    x = torch.randn(3, 7, 12)
    assert torch.equal(fused(x), theirs(x)), "no autocast"
    for name in ("0.act", "0.fc1"):
        forced = copy.deepcopy(fused)
        force_fp32(forced, [name], "cpu")
        seen: list[Tensor] = []
        watched = copy.deepcopy(fused)
        watched.get_submodule(name).register_forward_hook(lambda _module, _x, y, seen=seen: seen.append(y))
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_fused(forced(x))
            assert not is_fused(watched(x))
        assert [y.shape for y in seen] == [(3, 7, 40)]
    whole = copy.deepcopy(fused)
    force_fp32(whole, ["0"], "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_fused(whole(x))
        assert whole(x).dtype is torch.float32
