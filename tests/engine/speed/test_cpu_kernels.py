"""Kernels in C for CPUs with AMX: their numbers against float64, and what happens where they cannot be had."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import create_model
from torch import Tensor, nn

import engine.speed.amx.layers as amx_layers
import engine.speed.packed_attention as packed
from engine.speed.amx import build as native
from engine.speed.amx.layers import TileLinear, use_linear_layers, use_tiles
from engine.speed.amx.products import cpu_linear, cpu_mlp
from engine.speed.attention import apply_attention
from engine.speed.fused_mlp import FusedMlp, fuse_mlps
from engine.speed.kernels.attention import packed_attention
from engine.speed.linear_patches import use_linear_patches
from tests.engine.small import build, train
from tests.engine.speed.amx_numbers import FP32_BOUND, layers_of, needs_tiles, numbers
from tests.engine.speed.exact_attention import apart, exact_attention
from tests.program import ROOT
from utils.errors import UserError

HALF_BOUND = 2.0**-7


@pytest.fixture(autouse=True)
def one_thread_again():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [
        (197, 3, 64),
        (50, 2, 64),
        (17, 2, 32),
        (1, 1, 64),
        (32, 1, 16),
        (300, 2, 80),
        (577, 1, 64),
        (33, 3, 20),
        (5, 1, 128),
    ],
)
def test_attention_is_close_to_fp64(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    qkv, grad = numbers((2, tokens, 3 * heads * width), (2, tokens, heads * width), dtype=dtype)
    leaf = (2 * qkv).requires_grad_()  # weights of some contrast
    out, logsumexp = packed_attention(leaf, heads)
    (dqkv,) = torch.autograd.grad(out, leaf, grad)
    exact_out, exact_logsumexp, exact_grad = exact_attention(leaf, heads, grad)
    bound = FP32_BOUND if dtype is torch.float32 else HALF_BOUND
    assert (out.dtype, dqkv.dtype) == (dtype, dtype)
    assert apart(out, exact_out) < bound
    assert apart(logsumexp, exact_logsumexp / math.log(2.0)) < FP32_BOUND
    assert apart(dqkv, exact_grad) < bound  # all three together: of one token, two are nothing but rounding


@needs_tiles
def test_attention_of_large_scores_stays_finite() -> None:
    """Before it is scaled down by the largest of its row, a weight would be 2 to the power of thousands."""
    qkv, grad = numbers((1, 40, 3 * 32), (1, 40, 32))
    leaf = (100 * qkv).requires_grad_()
    out, _ = packed_attention(leaf, 1)
    (dqkv,) = torch.autograd.grad(out, leaf, grad)
    assert torch.isfinite(dqkv).all()
    assert apart(out, exact_attention(leaf, 1, grad)[0]) < 1e-4


def compare(ours: Any, torchs: Any, given: list[Tensor]) -> None:
    """Both passes, by norm and at the worst, against fp64; as near as fp32 would be."""
    *leaves, grad = given
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, expected = ours(*leaves), torchs(*exact)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    )
    for one, other in pairs:
        assert one.shape == other.shape
        assert apart(one, other) < FP32_BOUND
        assert float((one.double() - other).abs().max() / other.abs().max()) < 2 * FP32_BOUND


@needs_tiles
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (70, 100, 50), (32, 32, 32), (33, 31, 65), (500, 384, 520), (7, 1000, 3), (1200, 48, 96)]
)
def test_linear_is_as_exact_as_fp32(sizes: tuple[int, ...]) -> None:
    compare(cpu_linear, F.linear, layers_of(*sizes))


@needs_tiles
@pytest.mark.parametrize("sizes", [(70, 100, 50, 40), (33, 64, 520, 64), (1, 5, 9, 3), (450, 96, 384, 96)])
def test_mlp_is_as_exact_as_fp32(sizes: tuple[int, ...]) -> None:
    def torchs(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    compare(lambda *given: cpu_mlp(*given)[0], torchs, layers_of(*sizes))


@needs_tiles
def test_gelu_is_accurate_in_its_tails_and_at_fp32s_limits() -> None:
    """A product by one gives its input; what goes through is GELU alone."""
    x = torch.cat([torch.linspace(-14, 14, 2001), torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e30])])[:, None]
    one, nothing = torch.ones(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    leaf = x.requires_grad_()
    found = cpu_mlp(leaf, one, nothing, one, nothing)[0]
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    exact_leaf = x.detach().double().requires_grad_()
    exact = F.gelu(exact_leaf)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_leaf)
    # In the tails torch takes 1 less what is almost 1; erfc leaves all digits.
    tail = 0.5 * exact_leaf.detach() * torch.special.erfc(-exact_leaf.detach() / math.sqrt(2.0))
    assert torch.allclose(found.double(), tail, rtol=1e-5, atol=1e-30)
    assert float((found.double() - exact)[x.abs() < 1e3].abs().max()) < 2e-6
    assert float((slope.double() - exact_slope).abs().max()) < 2e-6


@needs_tiles
def test_nan_and_infinity_stay_visible() -> None:
    x, weight, *_ = layers_of(40, 40, 40)
    for bad in (float("nan"), float("inf")):
        spoilt = x.detach().clone()
        spoilt[3, 5] = bad
        found = cpu_linear(spoilt, weight, None)
        assert not torch.isfinite(found[3]).any()
        assert torch.isfinite(found[4]).all()


@needs_tiles
def test_bits_do_not_depend_on_threads() -> None:
    given, attention = layers_of(333, 100, 70, 90), numbers((3, 70, 3 * 2 * 32), (3, 70, 64))

    def all_numbers(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        *leaves, grad = given
        out = cpu_mlp(*leaves)[0]
        leaf = attention[0].requires_grad_()
        attended, _ = packed_attention(leaf, 2)
        return [
            out,
            *torch.autograd.grad(out, leaves, grad),
            attended,
            *torch.autograd.grad(attended, leaf, attention[1]),
        ]

    alone = all_numbers(1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, alone, all_numbers(threads)))


@needs_tiles
def test_torch_finds_the_operators_well_made() -> None:
    *leaves, _ = layers_of(40, 33, 50, 20)
    x, w1, b1, *_ = leaves
    ops = torch.ops.vitamp
    torch.library.opcheck(ops.cpu_linear.default, (x, w1, b1))
    torch.library.opcheck(ops.cpu_linear.default, (x.view(2, 20, 33), w1, None))
    torch.library.opcheck(ops.cpu_mlp.default, tuple(leaves))
    qkv = numbers((2, 17, 96))[0].requires_grad_()
    torch.library.opcheck(ops.packed_attention.default, (qkv, 2))


@needs_tiles
def test_only_trained_inputs_get_gradients() -> None:
    x, weight, bias, grad = layers_of(40, 30, 20)
    weight.requires_grad_(False)
    found = cpu_linear(x, weight, bias)
    found.backward(grad)
    assert weight.grad is None
    assert bias.grad is not None
    assert torch.allclose(bias.grad, grad.sum(0), atol=1e-5)
    assert x.grad is not None


@needs_tiles
def test_matrices_may_have_any_strides() -> None:
    x, weight, bias, _ = layers_of(40, 30, 20)
    expected = cpu_linear(x, weight, bias)
    turned = x.detach().t().contiguous().t().requires_grad_()
    wide = torch.cat([x.detach(), x.detach()], dim=1)[:, :30].requires_grad_()
    for other in (turned, wide):
        assert torch.equal(cpu_linear(other, weight, bias), expected)
    scattered = cpu_linear(x, weight.detach().t().contiguous().t(), bias)
    assert torch.equal(scattered, expected)
    one = torch.tensor(1.0).expand(40, 20)  # as the gradient of a sum is
    (spread,) = torch.autograd.grad(expected, x, one, retain_graph=True)
    assert torch.equal(spread, torch.autograd.grad(expected, x, one.contiguous())[0])


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_layers, "MIN_MULTIPLICATIONS", 0)


def vit_by_kernels() -> nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)
    use_linear_layers(model, torch.float32)
    apply_attention("packed", model)
    fuse_mlps(model, torch.float32)
    use_linear_patches(model, torch.float32)
    return model


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_model_gives_the_same_results_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)
    ours, images = vit_by_kernels(), numbers((3, 3, 32, 32))[0]
    assert list(ours.state_dict()) == list(plain.state_dict())
    names: list[str] = []
    for op in ("cpu_linear", "cpu_mlp", "packed_attention"):
        real = getattr(torch.ops.vitamp, op)
        monkeypatch.setattr(torch.ops.vitamp, op, lambda *a, real=real, op=op: names.append(op) or real(*a))
    monkeypatch.setattr(packed, "packed_attention", torch.ops.vitamp.packed_attention)
    found, expected = ours(images), plain(images)
    assert {name: names.count(name) for name in set(names)} == {"cpu_linear": 6, "cpu_mlp": 2, "packed_attention": 2}
    assert apart(found, expected.double()) < FP32_BOUND
    for model, out in ((ours, found), (plain, expected)):
        out.square().sum().backward()
        assert all(weight.grad is not None for weight in model.parameters())
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert apart(one.grad, other.grad.double()) < 1e-5


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_torch_multiplies_under_autocast_and_on_other_devices() -> None:
    model, images = vit_by_kernels(), numbers((2, 3, 32, 32))[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
    assert found.dtype is torch.bfloat16
    assert not use_tiles(torch.zeros(4, 4).double(), torch.zeros(4, 4).double(), torch.float32)
    meta = model.to("meta")
    assert meta(images.to("meta")).shape == (2, 5)


def test_small_products_are_left_to_torch() -> None:
    x, weight = numbers((64, 64), (64, 64))
    assert not use_tiles(x, weight, torch.float32)
    assert use_tiles(torch.empty(2048, 256), torch.empty(64, 256), torch.float32)


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_mlp_with_dropout_or_frozen_weights_is_not_fused() -> None:
    model = vit_by_kernels()
    mlp: Any = next(module for module in model.modules() if isinstance(module, FusedMlp))
    x = numbers((2, 17, 192))[0]
    together = mlp(x)
    assert "cpu_mlp" in str(together.grad_fn) + str(together.grad_fn.next_functions)
    mlp.fc1.weight.requires_grad_(False)
    apart_ = mlp(x)
    apart_.sum().backward()
    assert mlp.fc1.weight.grad is None
    assert mlp.fc2.weight.grad is not None
    assert torch.allclose(apart_, together, atol=1e-5)
    mlp.fc1.weight.requires_grad_(True)
    mlp.drop1.p = 0.5
    torch.manual_seed(0)
    assert not torch.allclose(mlp.train()(x), together, atol=1e-2)
    assert isinstance(mlp.fc1, TileLinear)


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_training_by_them_is_the_same_training(tiny: Path) -> None:
    """Weights after three updates, from the same ones, apart by rounding."""
    ends = []
    for words in ({"CPU_FP32": "amx", "MODEL__ATTENTION": "packed"}, {"CPU_FP32": "mkl", "MODEL__ATTENTION": "fused"}):
        ready = build(tiny, **words)
        assert ready.choices["cpu_fp32"] == words["CPU_FP32"]
        assert ready.choices["fused_mlp"] == (words["CPU_FP32"] == "amx")
        before = torch.cat([weight.detach().flatten().clone() for weight in ready.model.parameters()])
        train(ready, 3)
        ends.append(torch.cat([weight.detach().flatten() for weight in ready.model.parameters()]) - before)
    assert float(ends[1].norm()) > 0
    assert apart(ends[0], ends[1].double()) < 1e-3


@needs_tiles
@pytest.mark.slow
def test_a_run_says_so_and_a_resumed_one_goes_on_with_it(vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "CPU_FP32=amx", "MODEL.ATTENTION=packed")
    done = vitamp(*words, "TRAIN.MAX_UPDATES=2", f"DATA.CACHE={tmp_path / 'cache'}")
    assert done.code == 0, done.text
    assert "attention packed (as asked for); fp32 products by amx (as asked for)" in done.text
    built = sorted(path.name.split("-")[0] for path in (tmp_path / "cache" / "kernels").glob("*.so"))
    assert built == ["attention_amx", "products_amx"]
    assert ("AMX's tiles are emulated" in done.text) == native.emulated()
    assert f"Compiling products_amx for this CPU, once; cached in {tmp_path / 'cache' / 'kernels'}" in done.text
    done = vitamp("-resume", tmp_path / "run", "TRAIN.MAX_UPDATES=3")
    assert done.code == 0, done.text
    assert "Compiling" not in done.text
    choices = json.loads((tmp_path / "run" / "run.json").read_text())["choices"]
    assert (choices["attention"], choices["cpu_fp32"]) == ("packed", "amx")


@pytest.mark.parametrize("words", ["CPU_FP32=amx", "MODEL.ATTENTION=packed"])
def test_amx_without_a_compiler_is_rejected_before_the_run(vitamp, tiny: Path, tmp_path: Path, words: str) -> None:
    cache = f"DATA.CACHE={tmp_path / 'cache'}"
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", words, cache, env={"CC": str(tmp_path / "nothing")})
    assert done.code == 2
    reason = r"there is no C compiler" if not native.why_unavailable() else native.why_unavailable().split("(")[0]
    setting, value = words.split("=")
    assert f"{setting} {value}: " in done.err
    assert reason in done.err


@needs_tiles
def test_compiler_errors_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_folder", tmp_path)
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-mno-such-thing"))
    with pytest.raises(native.NoKernel, match=r"failed: .*no-such-thing"):
        native.load("products_amx")
    assert not list(tmp_path.glob("*.so"))


@needs_tiles
@pytest.mark.slow
def test_truncated_library_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a process of its own: the system kills what runs code that is not there, and knows what it has loaded."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_folder", tmp_path)
    native.load("products_amx")
    (built,) = tmp_path.glob("*.so")
    whole = built.read_bytes()
    built.unlink()  # what is loaded keeps its own
    built.write_bytes(whole[:20000])
    loads = "import sys; from pathlib import Path; from engine.speed.amx import build as native; "
    loads += "native.set_kernel_folder(Path(sys.argv[1])); native.load('products_amx')"
    subprocess.run([sys.executable, "-c", loads, str(tmp_path)], check=True)
    assert len(built.read_bytes()) >= len(whole)


@needs_tiles
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cache_folder_that_is_not_writable_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_folder", tmp_path / "kernels")
    with pytest.raises(native.NoKernel, match="cannot be stored or loaded"):
        native.load("products_amx")


WHERE_AMX_IS_A_VALUE = {
    "utils/config/schema.py",
    "engine/checkpoint/fields.py",
    "engine/speed/cpu_products.py",
    "scripts/dev/mutants.py",
}
"""Of a setting, in the configuration, a checkpoint, and where its words are."""


def test_only_its_own_package_knows_of_amx() -> None:
    """Others import its door. A feature of a CPU in Linux's words and a reason in the banner are none of its parts."""
    elsewhere = re.compile(r"^from engine\.speed\.amx import |\"amx_bf16\"|\"by AMX\"")
    found = []
    for room in ("engine", "datasets", "models", "utils", "tools", "scripts"):
        for path in (ROOT / room).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("engine/speed/amx/") or name in WHERE_AMX_IS_A_VALUE:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{name}: {line}" for line in lines if "amx" in line.lower() and not elsewhere.search(line)]
    assert found == []


def test_amx_is_rejected_on_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many, say, whose first one decided for it."""
    monkeypatch.setattr(amx_layers, "why_not", lambda _: "this CPU has no AMX")
    with pytest.raises(UserError, match="CPU_FP32 amx: this CPU has no AMX; use mkl"):
        use_linear_layers(nn.Linear(2, 2), torch.float32)
    with pytest.raises(UserError, match="CPU_BF16 amx: this CPU has no AMX; use onednn"):
        use_linear_layers(nn.Linear(2, 2), torch.bfloat16)
