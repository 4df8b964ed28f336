"""CPU_BF16 amx: layers in bf16 by the kernels in C, against float64 and against torch's autocast."""

from __future__ import annotations

import json
import os
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
import engine.speed.amx.products as products
from engine.speed.amx import build as kernels
from engine.speed.amx.layers import MAX_BF16_SUM, use_linear_layers, use_tiles
from engine.speed.amx.products import _library, cpu_linear, cpu_mlp
from engine.speed.attention import apply_attention
from engine.speed.fused_mlp import fuse_mlps
from engine.speed.linear_patches import use_linear_patches
from tests.engine.small import build, train
from tests.engine.speed.amx_numbers import FP32_BOUND, layers_of, needs_tiles
from tests.engine.speed.exact_attention import apart

BF16 = torch.bfloat16
ROUNDED = 2.0**-8
"""What rounding to bf16 does to a number at most."""


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_layers, "MIN_MULTIPLICATIONS", 0)


def in_half(given: list[Tensor], weights: torch.dtype) -> list[Tensor]:
    """Weights that bf16 can hold, so that what is computed is exact but for its own rounding."""
    x, *weights_, grad = (tensor.detach().to(BF16) for tensor in given)
    return [x.requires_grad_(), *(weight.to(weights).requires_grad_() for weight in weights_), grad]


@needs_tiles
@pytest.mark.parametrize("weights", [torch.float32, BF16])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (70, 100, 50), (32, 32, 32), (33, 31, 65), (500, 384, 520), (7, 3000, 3), (900, 1600, 96)]
)
def test_bf16_linear_rounds_once(sizes: tuple[int, ...], weights: torch.dtype) -> None:
    x, weight, bias, grad = in_half(layers_of(*sizes), weights)
    found = cpu_linear(x, weight, bias)
    exact_x, exact_weight, exact_bias = (leaf.detach().double() for leaf in (x, weight, bias))
    assert (found.dtype, found.shape) == (BF16, (sizes[0], sizes[2]))
    assert apart(found, F.linear(exact_x, exact_weight, exact_bias)) < ROUNDED / 2
    dx, dw, db = torch.autograd.grad(found, (x, weight, bias), grad)
    assert (dx.dtype, dw.dtype, db.dtype) == (BF16, weights, weights)
    bound = FP32_BOUND if weights is torch.float32 else ROUNDED
    assert apart(dx, grad.double() @ exact_weight) < ROUNDED / 2
    assert apart(dw, grad.double().T @ exact_x) < bound, "gradients of fp32 weights are not rounded to bf16"
    assert apart(db, grad.double().sum(0)) < max(bound, 1e-5)


@needs_tiles
@pytest.mark.parametrize("emulated", [False, True])
def test_weights_are_rounded_to_bf16_as_by_torch(
    emulated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`emulated`: the conversions, as on a CPU that has AVX-512 but no instructions for bf16."""
    if emulated:
        monkeypatch.setenv(kernels.EMULATED, "1")
        monkeypatch.setattr(kernels, "_cpu_features", lambda: frozenset(kernels.VECTORS))
        monkeypatch.setattr(kernels, "_loaded", {})
        monkeypatch.setattr(kernels, "_folder", tmp_path)
        monkeypatch.setattr(products, "_library", products._library.__wrapped__)
    bits = torch.randint(-(2**31), 2**31, (64, 64), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[0] = torch.arange(64) * 0x4000 + 0x3F800000  # halfway between two of bf16, among others
    bits[1] = torch.arange(64)  # below the normal numbers
    weight = bits.view(torch.float32).nan_to_num(1.0).clamp(-1e38, 1e38)
    found = cpu_linear(torch.eye(64, dtype=BF16), weight, None)
    normal = weight.where(weight.abs() >= torch.finfo(BF16).tiny, 0.0)
    assert torch.equal(found, normal.T.to(BF16)), "what is below the normal numbers counts as zero"


@needs_tiles
@pytest.mark.parametrize("sizes", [(70, 100, 50, 40), (33, 64, 520, 64), (1, 5, 9, 3), (450, 96, 384, 96)])
def test_bf16_mlp_is_closer_to_float64_than_autocast(sizes: tuple[int, ...]) -> None:
    x, *weights, grad = in_half(layers_of(*sizes), torch.float32)

    def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    def both_passes(compute: Any, leaves: list[Tensor]) -> list[Tensor]:
        out = compute(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    exact = both_passes(mlp, [leaf.detach().double().requires_grad_() for leaf in (x, *weights)])
    ours = both_passes(lambda *given: cpu_mlp(*given)[0], [x, *weights])
    with torch.autocast("cpu", BF16):
        torchs = both_passes(mlp, [x, *weights])
    for one, other, right in zip(ours, torchs, exact, strict=True):
        assert apart(one, right) < max(1.2 * apart(other, right), ROUNDED)


@needs_tiles
def test_bits_do_not_depend_on_threads() -> None:
    *leaves, grad = in_half(layers_of(333, 100, 70, 90), torch.float32)

    def all_numbers(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        out = cpu_mlp(*leaves)[0]
        return [out, *torch.autograd.grad(out, leaves, grad)]

    before = torch.get_num_threads()
    try:
        alone = all_numbers(1)
        for threads in (2, 3, 7):
            assert all(map(torch.equal, alone, all_numbers(threads)))
    finally:
        torch.set_num_threads(before)


@needs_tiles
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_work_in_threads_with_small_stacks(dtype: str) -> None:
    code = "import torch; torch.set_num_threads(3); from engine.speed.amx.products import cpu_linear; "
    code += f"x = torch.ones(300, 96, dtype=torch.{dtype}); print(cpu_linear(x, torch.ones(40, 96), None).sum().item())"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_STACKSIZE": "200k"}, check=True)
    assert float(done.stdout) == pytest.approx(300 * 40 * 96, rel=1e-2)


@needs_tiles
def test_torch_finds_the_operators_well_made() -> None:
    for weights in (torch.float32, BF16):
        x, w1, b1, *others = in_half(layers_of(40, 33, 50, 20), weights)
        torch.library.opcheck(torch.ops.vitamp.cpu_linear.default, (x, w1, b1))
        torch.library.opcheck(torch.ops.vitamp.cpu_mlp.default, (x, w1, b1, *others[:2]))


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_long_sums_and_other_dtypes_are_left_to_torch() -> None:
    assert _library(BF16).longest() == MAX_BF16_SUM
    x, weight = torch.zeros(2, MAX_BF16_SUM, dtype=BF16), torch.zeros(3, MAX_BF16_SUM)
    longer = torch.zeros(3, MAX_BF16_SUM + 1)
    with torch.autocast("cpu", BF16):
        assert use_tiles(x, weight, BF16)
        assert not use_tiles(x, longer, BF16)
        assert not use_tiles(x, longer.T, BF16), "the gradient's sum"
        assert not use_tiles(x, weight, torch.float32)
        assert not use_tiles(x.double(), weight, BF16)
    assert not use_tiles(x, weight, BF16), "fp32 weights without autocast are torch's to refuse"
    assert use_tiles(x, weight.to(BF16), BF16)
    with torch.autocast("cpu", torch.float16):
        assert not use_tiles(x, weight, BF16)


@needs_tiles
@pytest.mark.usefixtures("however_small")
def test_model_under_autocast_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def vit() -> nn.Module:
        torch.manual_seed(0)
        return create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5)

    plain, ours, images = vit(), vit(), torch.randn(3, 3, 32, 32)
    use_linear_layers(ours, BF16)
    apply_attention("packed", ours)
    fuse_mlps(ours, BF16)
    use_linear_patches(ours, BF16)
    names: list[str] = []
    for op in ("cpu_linear", "cpu_mlp"):
        real = getattr(torch.ops.vitamp, op)
        monkeypatch.setattr(torch.ops.vitamp, op, lambda *a, real=real, op=op: names.append(op) or real(*a))
    assert apart(ours(images), plain(images).double()) < FP32_BOUND, "in fp32 torch computes"
    assert not names
    exact = plain.double()(images.double())
    plain = vit()
    with torch.autocast("cpu", BF16):
        found, expected = ours(images), plain(images)
    assert {name: names.count(name) for name in set(names)} == {"cpu_linear": 6, "cpu_mlp": 2}
    assert found.dtype is BF16
    assert apart(found, exact) < 1.5 * apart(expected, exact)
    for model, out in ((ours, found), (plain, expected)):
        out.float().square().sum().backward()
        assert all(weight.grad is not None and weight.grad.dtype is torch.float32 for weight in model.parameters())
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert apart(one.grad, other.grad.double()) < 0.05


@needs_tiles
@pytest.mark.usefixtures("however_small")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_by_them_is_the_same_training(tiny: Path, level: str) -> None:
    ends = []
    for library in ("amx", "onednn"):
        words = {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": level, "CPU_BF16": library}
        ready = build(tiny, **words)
        assert ready.choices["cpu_bf16"] == library
        assert ready.choices["fused_mlp"] == (library == "amx")
        before = torch.cat([weight.detach().float().flatten().clone() for weight in ready.model.parameters()])
        train(ready, 3)
        after = torch.cat([weight.detach().float().flatten() for weight in ready.model.parameters()])
        ends.append(after - before)
    assert float(ends[1].norm()) > 0
    assert apart(ends[0], ends[1].double()) < 0.3, "Adam's first steps go by the sign of what may be rounding"


@needs_tiles
@pytest.mark.slow  # machine code; compiled updates are tested with tests/engine/compile
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled_run_equals_an_eager_one(vitamp, tiny: Path, tmp_path: Path, how: str) -> None:
    ends = []
    for compiled in ("none", how):
        words = ("-cfg", tiny, "-output", tmp_path / compiled, "-amp", "bf16", "MODEL.EMBED_DIM=128", "THREADS=1")
        words += ("CPU_BF16=amx", "REPORT_FREQ=1", f"TRAIN.COMPILE={compiled}", "TRAIN.MAX_UPDATES=2")
        done = vitamp(*words, "DATA.BATCH_SIZE=128")
        assert done.code == 0, done.text
        assert "MLPs in one operator" in done.text
        lines = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        ends.append([json.loads(line)["loss"] for line in lines if json.loads(line)["event"] == "train"])
    assert ends[0]
    assert ends[1] == pytest.approx(ends[0], abs=5e-3)


@needs_tiles
def test_a_run_says_so_and_a_resumed_one_goes_on_with_it(vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "-amp", "bf16", "CPU_BF16=amx")
    done = vitamp(*words, "TRAIN.MAX_UPDATES=2", f"DATA.CACHE={tmp_path / 'cache'}")
    assert done.code == 0, done.text
    assert "bf16 products by amx (as asked for)" in done.text
    assert "MLPs in one operator" in done.text
    built = sorted(path.name.split("-")[0] for path in (tmp_path / "cache" / "kernels").glob("*.so"))
    assert "products_half_amx" in built
    done = vitamp("-resume", tmp_path / "run", "TRAIN.MAX_UPDATES=3")
    assert done.code == 0, done.text
    choices = json.loads((tmp_path / "run" / "run.json").read_text())["choices"]
    assert choices["cpu_bf16"] == "amx"
    done = vitamp("-eval", "-resume", tmp_path / "run", "-amp", "off")
    assert done.code == 0, done.text


def test_amx_is_rejected_with_amp_lists_before_the_run(vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "-amp", "bf16", "CPU_BF16=amx")
    done = vitamp(*words, "AMP.CUSTOM_BLACK_LIST=[linear]")
    assert done.code == 2, done.text
    assert "CPU_BF16 amx: AMP's lists would have no effect on linear with amx; use onednn." in done.err
