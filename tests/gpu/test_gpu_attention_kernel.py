"""Attention on a GPU: the packed kernel near to fp64 and the same bits twice; the race; each kind by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor

from engine.compile.compiled import CACHE
from engine.speed.kernels.attention import packed_attention
from engine.speed.packed_attention import PackedAttention
from engine.speed.speedup import KINDS, PACKED
from engine.speed.tuning import AttentionKernel
from tests.engine.small import built_of
from tests.engine.speed import exact_attention as exact
from tests.gpu.runs import Train, apart, on_a_gpu_alone, skip_if_missing

pytestmark = on_a_gpu_alone
BOUNDS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
HEADS = 3
DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1")


def sample(tokens: int, width: int, dtype: torch.dtype, batch: int = 4) -> tuple[Tensor, Tensor]:
    skip_if_missing(dtype)
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * HEADS * width, device="cuda", dtype=dtype, requires_grad=True)
    return qkv, torch.randn(batch, tokens, HEADS * width, device="cuda", dtype=dtype)


def passes(call: Callable[..., Any], qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    out = call(qkv, HEADS)[0]
    return out, torch.autograd.grad(out, qkv, grad)[0]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "width"), [(197, 64), (256, 64), (129, 64), (65, 32), (50, 64), (17, 32), (256, 32), (1, 64)]
)
def test_both_passes_are_near_to_fp64_and_the_same_twice(tokens: int, width: int, dtype: torch.dtype) -> None:
    qkv, grad = sample(tokens, width, dtype)
    found, again = (passes(packed_attention, qkv, grad) for _ in range(2))
    out, _, dqkv = exact.exact_attention(qkv, HEADS, grad)
    assert exact.apart(found[0], out) < BOUNDS[dtype]
    for ours, right in zip(found[1].chunk(3, -1), dqkv.chunk(3, -1), strict=True):
        assert exact.apart(ours, right) < BOUNDS[dtype]
    assert torch.equal(found[0], again[0])
    assert torch.equal(found[1], again[1])


def test_all_heads_of_a_large_batch_are_their_own() -> None:
    """More programs than the GPU runs at a time; each as if it were alone."""
    qkv, grad = sample(197, 64, torch.bfloat16, batch=512)
    whole = passes(packed_attention, qkv, grad)
    leaf = qkv.detach()[-2:].clone().requires_grad_()
    part = passes(packed_attention, leaf, grad[-2:])
    assert torch.equal(whole[0][-2:], part[0])
    assert torch.equal(whole[1][-2:], part[1])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_compiled_layer_gives_the_numbers_of_the_one_as_written(
    dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # torch 2.11 does not ask for the dtype of autocast: a graph that was kept of bf16 would be taken for that of fp16.
    monkeypatch.setenv(CACHE, str(tmp_path / "compiled"))
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = Attention(128, num_heads=2, qkv_bias=True).cuda()
    AttentionKernel().apply(built_of(layer), PACKED)
    assert isinstance(layer, PackedAttention)
    vars(layer)["strict"] = True
    compiled = torch.compile(layer, fullgraph=True, mode=mode)

    def gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype):
            out = call(leaf)
        return [out.clone(), *(g.clone() for g in torch.autograd.grad(out.sum(), [leaf, *layer.parameters()]))]

    for _ in range(4):  # CUDA graphs are recorded in the second call, and replayed with other numbers from then on
        x = torch.randn(8, 197, 128, device="cuda")
        for ours, expected in zip(gradients(compiled, x), gradients(layer, x), strict=True):
            assert ours.dtype is expected.dtype
            assert exact.apart(ours, expected.double()) < BOUNDS[dtype]


def test_a_run_by_name_is_packed_and_the_same_twice(train: Train) -> None:
    runs = [train(name, "-amp", "bf16", "SPEED=+packed", "DETERMINISTIC=true") for name in ("one", "two")]
    assert runs[0].choices["attention"] == PACKED
    assert runs[0].losses == runs[1].losses


def test_the_race_is_told_and_kept(train: Train) -> None:
    run = train("run", "-amp")
    kind = run.choices["attention"]
    assert kind in KINDS["cuda"]
    (told,) = [line for line in run.result.out.splitlines() if line.startswith("  computing ")]
    assert f"attention {kind} (" in told
    assert "timed against " in told or "x as fast as fused; timed: " in told
    assert run.choices["computed_in"] == "cuda fp16"
    meta = json.loads((run.checkpoint / "meta.json").read_text(encoding="utf-8"))
    assert meta["choices"]["attention"] == kind


def _speed(kind: str) -> str:
    return "SPEED=-fused" if kind == "plain" else f"SPEED=+{kind}"


@pytest.mark.parametrize("kind", KINDS["cuda"])
def test_each_kind_is_the_same_mathematics(train: Train, kind: str) -> None:
    expected = train("fp32", "-amp", "off", "SPEED=-fused", *DESCENT)
    run = train(kind, "-amp", "bf16", _speed(kind), *DESCENT)
    assert f"attention {kind} (as asked for)" in run.text
    assert 0 < apart(run.losses, expected.losses) < 2.0**-6
    assert run.of("val")[-1]["loss"] == pytest.approx(expected.of("val")[-1]["loss"], rel=2.0**-6)


@pytest.mark.parametrize("kind", ["flash", "cudnn", "packed"])
def test_what_knows_no_fp32_validates_in_it_all_the_same(train: Train, kind: str) -> None:
    run = train("run", "-amp", "fp16", _speed(kind))
    plain = train("eval", "-eval", "-resume", run.folder, "-amp", "off", "SPEED=-fused", updates=None)
    assert run.of("val")[-1]["loss"] == pytest.approx(plain.of("val")[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["flash", "cudnn", "packed"])
def test_in_fp32_they_are_refused_by_name(train: Train, tmp_path: Path, kind: str) -> None:
    refused = train("run", _speed(kind), code=2)
    assert f"SPEED +{kind} does not support this GPU, model and precision (fp32); use " in refused.text
    assert not (tmp_path / "run").exists()
