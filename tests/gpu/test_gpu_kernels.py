"""fused_mlp on a GPU: its kernels' numbers against float64, compiled or not, and the runs that take them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from engine.speed.fused_mlp import FusedMlps
from tests.engine.small import built_of
from tests.gpu.runs import PLACE, Train, apart, on_a_gpu_alone, skip_if_missing

pytestmark = on_a_gpu_alone

SIZES = [(25216, 3072), (1001, 333), (3, 67, 96), (1, 1), (50, 4, 1536), (4099, 5)]
DTYPES = [torch.bfloat16, torch.float16]
DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1", "SPEED=+fused")

Operator = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=["eager", "compiled"])
def operator(request: pytest.FixtureRequest) -> Operator:
    import engine.speed.kernels.gelu  # noqa: F401

    def call(h: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.vitamp.gelu_with_bias(h, bias)

    return call if request.param == "eager" else torch.compile(call, fullgraph=True, dynamic=False)


def values(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """h, bias and the gradient of what is made of them."""
    random = torch.Generator(PLACE).manual_seed(0)
    h, bias, dy = (torch.randn(size, device=PLACE, generator=random) for size in (sizes, sizes[-1:], sizes))
    return (2 * h).to(dtype).requires_grad_(), bias.requires_grad_(), dy.to(dtype)


def both_passes(operator: Operator, h: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    y = operator(h, bias)
    return [y.detach(), *torch.autograd.grad(y, (h, bias), dy)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_numbers_are_those_of_float64_but_for_the_last_rounding(
    operator: Operator, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    h, bias, dy = values(sizes, dtype)
    y, dh, db = both_passes(operator, h, bias, dy)
    wide, shift = (given.detach().double().requires_grad_() for given in (h, bias))
    exact_y, exact_dh, exact_db = both_passes(lambda h, bias: F.gelu(h + bias), wide, shift, dy.double())
    half_ulp = torch.finfo(dtype).eps / 2
    assert (y.dtype, dh.dtype, db.dtype) == (dtype, dtype, torch.float32)
    assert torch.allclose(y.double(), exact_y, rtol=1.02 * half_ulp, atol=1e-6)
    assert torch.allclose(dh.double(), exact_dh, rtol=1.02 * half_ulp, atol=1e-5)
    # Summed before dh is rounded: errors of 1e-6 each, of as many tokens, all one way at the worst.
    assert torch.allclose(db.double(), exact_db, rtol=1e-5, atol=2e-6 * (h.numel() // h.shape[-1]) + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_twice_is_the_same_to_the_bit(operator: Operator, dtype: torch.dtype) -> None:
    given = values((25216, 3072), dtype)
    first, second = both_passes(operator, *given), both_passes(operator, *given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradients(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = call(x)
    return [y.detach().clone(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_an_mlp_under_autocast_is_as_near_to_float64_as_timms(mode: str | None) -> None:
    skip_if_missing(torch.bfloat16)
    torch.manual_seed(0)
    theirs = Mlp(96, 384).to(PLACE)
    fused, exact = Mlp(96, 384).to(PLACE), Mlp(96, 384).to(PLACE).double()
    fused.load_state_dict(theirs.state_dict())
    exact.load_state_dict(theirs.state_dict())
    FusedMlps().apply(built_of(fused), True)
    x = torch.randn(8, 197, 96, device=PLACE)
    y = exact(x.double())
    wanted = [y.detach(), *torch.autograd.grad(y.square().sum(), list(exact.parameters()))]
    call = fused if mode is None else torch.compile(fused, fullgraph=True, mode=mode)
    for _ in range(2):  # CUDA graphs are recorded by the second call, and replayed by the third
        gradients(call, fused, x)
    found = gradients(call, fused, x)
    for ours, usual, right in zip(found, gradients(theirs, theirs, x), wanted, strict=True):
        assert ours.dtype is usual.dtype
        off, usually = (((given.double() - right).norm() / right.norm()).item() for given in (ours, usual))
        assert off < 1.5 * usually + 1e-4


@pytest.mark.parametrize("words", [("-amp", "bf16"), ("-amp", "fp16"), ("-amp", "bf16", "AMP.LEVEL=O2")])
def test_a_run_takes_them_tells_it_and_learns_alike(train: Train, words: tuple[str, ...]) -> None:
    run = train("fused", *words, *DESCENT)
    plain = train("plain", *words, *DESCENT, "SPEED=+fused,-fused_mlp")
    assert run.choices["fused_mlp"] is True
    assert plain.choices["fused_mlp"] is False
    assert "bias and GELU in one kernel" in run.text
    assert "bias and GELU in one kernel" not in plain.text
    assert 0 < apart(run.losses, plain.losses) < 2.0**-6


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_updates_take_them_too(train: Train, how: str) -> None:
    as_written = train("written", "-amp", "bf16", "TRAIN.COMPILE=none", *DESCENT, "SPEED=+fused,+fused_mlp")
    run = train(how, "-amp", "bf16", f"TRAIN.COMPILE={how}", *DESCENT, "SPEED=+fused,+fused_mlp")
    assert run.choices["fused_mlp"] is True
    assert apart(run.losses, as_written.losses) < 2.0**-6


def test_a_validation_in_fp32_computes_as_without_them(train: Train) -> None:
    run = train("run", "-amp", "fp16", "SPEED=+fused_mlp")
    plain = train("eval", "-eval", "-resume", run.folder, "-amp", "off", "SPEED=-fused_mlp", updates=None)
    assert run.of("val")[-1]["loss"] == pytest.approx(plain.of("val")[-1]["loss"], rel=1e-5)
