"""SPEED +packed: its kernels by Triton's interpreter, and which layers and calls they are taken for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention as TimmAttention
from timm.models import create_model
from torch import Tensor, nn

import engine.speed.kernels.attention as kernels
import engine.speed.packed_attention as packed
from engine.amp.precision import Precision
from engine.speed import attention_race
from engine.speed.attention import AttentionKernel, attention_by_rule
from engine.speed.attention_kinds import PACKED, attention_layers
from engine.speed.attention_race import race_attention
from engine.speed.kernels.attention import key_blocks, supports
from engine.speed.packed_attention import PackedAttention, can_be_packed, packed_only
from tests.engine.small import BF16, CPU, built_of
from tests.engine.speed.exact_attention import apart, exact_attention
from utils.errors import UserError

TWO_IMAGES = {"BATCH_SIZE": 2, "IMAGE_SIZE": 160}
TORCHS_OPERATOR = "scaled_dot_product_attention"
ROOT = Path(__file__).resolve().parents[3]
BOUNDS = {"bfloat16": 2.0**-5, "float16": 2.0**-9}
"""The interpreter cuts bf16 off where a GPU rounds."""


class OnGpu:
    """As much of a precision as a decision asks for."""

    device, level, name = torch.device("cuda", 0), "O1", "bf16"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.engine.speed.interpreted_attention"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # an interpreter, and a compiler to import
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "width"),
    [(197, 64), (50, 64), pytest.param(17, 32, marks=pytest.mark.every_slice), (256, 32), (1, 64)],
)
def test_packed_attention_is_close_to_fp64(
    interpreted: dict[str, dict[str, Any]], tokens: int, width: int, dtype: str
) -> None:
    errors = interpreted[f"{tokens} {width} {dtype}"]
    assert errors.pop("logsumexp") < 1e-6
    assert set(errors) == {"out", "dq", "dk", "dv"}
    assert max(errors.values()) < BOUNDS[dtype], errors


@pytest.mark.slow
def test_query_gradients_add_up_over_key_blocks(interpreted: dict[str, dict[str, Any]]) -> None:
    """As they do where there are more keys than one block of the backward pass holds."""
    errors = interpreted["in blocks of keys"]
    assert max(errors.values()) < BOUNDS["float16"], errors


@pytest.mark.slow
def test_packed_attention_passes_torchs_opcheck(interpreted: dict[str, dict[str, Any]]) -> None:
    assert set(interpreted["operator"].values()) == {"SUCCESS"}
    assert interpreted["layer"] == {"compiled": True, "checkpointed": True}


def test_key_blocks_hold_any_number_of_tokens() -> None:
    for tokens in range(1, 257):
        held = sum(key_blocks(tokens))
        assert tokens <= held <= max(16, 1 << (tokens - 1).bit_length())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of what the kernels are called with: on a CPU, by fp64 in their place."""
    sizes: list[tuple[int, ...]] = []

    def stand_in(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        sizes.append(tuple(qkv.shape))
        grad = qkv.new_zeros(*qkv.shape[:2], qkv.shape[2] // 3)
        out, logsumexp, _ = exact_attention(qkv, heads, grad)
        return out.to(qkv.dtype), logsumexp.float()

    monkeypatch.setattr(packed, "packed_attention", stand_in)
    monkeypatch.setattr(
        packed, "supports_call", lambda qkv, heads: supports(qkv.shape[1], qkv.shape[2] // heads // 3, qkv.dtype)
    )
    return sizes


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    return TimmAttention(64, num_heads=2, qkv_bias=True)


def under_autocast(layer: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(*inputs, **named)


def test_packed_layer_gives_the_same_results(layer: Any, taken: list[tuple[int, ...]]) -> None:
    x = torch.randn(2, 17, 64)
    expected, names = under_autocast(layer, x), list(layer.state_dict())
    packed.use_packed(layer)
    assert isinstance(layer, PackedAttention)
    assert type(layer).__name__ == "Attention"
    assert list(layer.state_dict()) == names
    assert 0 < apart(under_autocast(layer, x), expected.double()) < 2.0**-6
    assert taken == [(2, 17, 192)]


@pytest.mark.parametrize(
    ("tokens", "autocast", "mask", "drop"),
    [(17, False, False, 0.0), (257, True, False, 0.0), (17, True, True, 0.0), (17, True, False, 0.5)],
    ids=["fp32", "many tokens", "a mask", "dropout"],
)
def test_packed_layer_falls_back_to_torch(
    layer: Any, taken: list[tuple[int, ...]], tokens: int, autocast: bool, mask: bool, drop: float
) -> None:
    layer.attn_drop.p = drop
    x, seen = torch.randn(2, tokens, 64), torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask else None
    found: list[Tensor] = []
    for packing in (False, True):
        if packing:
            packed.use_packed(layer)
        torch.manual_seed(0)
        found.append(under_autocast(layer, x, attn_mask=seen) if autocast else layer(x, attn_mask=seen))
    assert torch.equal(*found)
    assert taken == []


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True, "norm_layer": nn.LayerNorm}, {"scale_norm": True, "norm_layer": nn.LayerNorm}, {"gated": True}],
)
def test_layers_with_norms_or_gates_are_not_packed(options: dict[str, Any]) -> None:
    layer: Any = TimmAttention(64, num_heads=2, **options)
    packed.use_packed(layer)
    assert type(layer) is TimmAttention
    assert not can_be_packed(layer)


def test_other_attention_classes_are_not_packed() -> None:
    swin = create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(1, 1, 1, 1))
    assert attention_layers(swin)
    AttentionKernel().apply(built_of(swin), PACKED)
    assert not any(isinstance(module, PackedAttention) for module in swin.modules())
    AttentionKernel().apply(built_of(swin), "fused")


def test_applied_kinds_replace_each_other(layer: Any, taken: list[tuple[int, ...]]) -> None:
    x, calls = torch.randn(2, 17, 64), []
    for kind in (PACKED, "fused", PACKED, "plain"):
        AttentionKernel().apply(built_of(layer), kind)
        under_autocast(layer, x)
        calls.append(len(taken))
    AttentionKernel().apply(built_of(layer), "fused")
    assert calls == [1, 1, 2, 2]


def test_packed_is_rejected_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(packed, "_check_kernels", none_here)
    vit = create_model("test_vit", num_classes=3)
    built = built_of(vit, Precision(BF16, CPU), SPEED=[f"+{PACKED}"], DATA=TWO_IMAGES)
    with pytest.raises(UserError, match=r"SPEED \+packed does not support this GPU.*use fused, plain"):
        race_attention(built)
    assert not any(isinstance(module, PackedAttention) for module in vit.modules())
    with pytest.raises(UserError, match=r"packed: cpu supports only fused and plain; leave it out"):
        attention_by_rule(built)


def test_amp_lists_with_torchs_operator_exclude_packed() -> None:
    vit, packed_attention, listed = create_model("test_vit", num_classes=3), [f"+{PACKED}"], [TORCHS_OPERATOR]
    amp, kept = {"CUSTOM_BLACK_LIST": listed}, {"attention": PACKED}
    with pytest.raises(UserError, match=r"packed: AMP's lists, which affect .* name scaled_dot"):
        attention_by_rule(built_of(vit, OnGpu(), SPEED=packed_attention, AMP=amp))
    assert attention_by_rule(built_of(vit, OnGpu(), kept, AMP=amp)) is None, "another kind has to be found"
    assert attention_by_rule(built_of(vit, OnGpu(), kept)) is None, "it has to be tried on this GPU"
    with pytest.raises(UserError, match="no effect on softmax"):
        attention_by_rule(built_of(vit, OnGpu(), SPEED=packed_attention, AMP={"CUSTOM_BLACK_LIST": ["softmax"]}))


@pytest.mark.parametrize("there", [True, False])
def test_resumed_run_keeps_packed_where_its_kernels_work(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Another GPU may have too little memory on its chip."""

    def try_kernels(*_: Any) -> None:
        if not there:
            raise RuntimeError("out of resources")

    monkeypatch.setattr(packed, "_check_kernels", try_kernels)
    monkeypatch.setattr(packed, "supports_call", lambda *_: True)
    monkeypatch.setattr(packed, "packed_attention", lambda qkv, _heads: (qkv[..., : qkv.shape[2] // 3] * 1.0, None))
    monkeypatch.setattr(attention_race, "_time_by_events", lambda work: work() or 1.0)
    vit = create_model("test_vit", num_classes=3)
    found = race_attention(built_of(vit, Precision(BF16, CPU), {"attention": PACKED}, DATA=TWO_IMAGES))
    assert (found.value, found.why == "as before the resume") == ((PACKED, True) if there else ("fused", False))


def test_race_times_packed_kernels_without_fallback(
    layer: Any, taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 17, 64)
    with (
        pytest.raises(RuntimeError, match=r"has no kernel for torch\.float16"),
        packed_only(layer, 17, torch.float16, CPU),
    ):
        pass
    monkeypatch.setattr(packed, "_check_kernels", lambda *_: None)
    with packed_only(layer, 17, torch.bfloat16, CPU):
        under_autocast(layer, x)
        with pytest.raises(RuntimeError, match=r"no kernel for .* torch\.float32"):
            layer(x)
        with pytest.raises(RuntimeError, match="no kernel for dropout or a mask"):
            under_autocast(layer, x, is_causal=True)
    assert taken == [(2, 17, 192)]
    assert type(layer) is TimmAttention
    under_autocast(layer, x)
    assert len(taken) == 1


def test_failing_or_wrong_kernels_exclude_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(packed, "self_test", fail)
    with pytest.raises(RuntimeError, match="does not run here: no compiler"):
        packed._check_kernels(17, 64, torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(kernels, "packed_attention", lambda qkv, heads: (qkv[..., : 64 * heads] * 1.0, None))
    with pytest.raises(RuntimeError, match="relative error"):
        kernels.self_test(CPU, torch.bfloat16, 17, 64)
