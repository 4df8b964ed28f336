"""Who decides how attention is computed, the race that decides it on a GPU, and the layers and calls packed is for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers.attention import Attention as TimmAttention
from timm.models import create_model
from torch import Tensor, nn

import engine.speed.attention_race as attention_race
import engine.speed.kernels.attention as kernels
import engine.speed.packed_attention as packed
from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from engine.speed.attention_race import first_call, race, race_attention, winner
from engine.speed.kernels.attention import supports
from engine.speed.packed_attention import PackedAttention, can_be_packed, packed_only
from engine.speed.speedup import PACKED, BuiltModel, Choice, attention_layers
from engine.speed.tuning import AttentionKernel, attention_by_rule, speed_up
from tests.engine.small import BF16, CPU, OFF, build, built_of, chosen, train
from tests.engine.speed.exact_attention import apart, exact_attention
from utils.config import AmpConfig, load_config
from utils.distributed.world import ALONE
from utils.errors import UserError

TWO_IMAGES = {"BATCH_SIZE": 2, "IMAGE_SIZE": 160}
ON_GPU = SimpleNamespace(device=torch.device("cuda", 0), level="O1", name="bf16")
"""As much of a precision as a decision asks for."""


def kinds_of(model: nn.Module) -> set[str]:
    return {"fused" if layer.fused_attn else "plain" for layer in attention_layers(model)}


def on_cpu(model: nn.Module, wanted: str, amp: AmpConfig = OFF, kept: dict[str, str] | None = None) -> BuiltModel:
    return built_of(model, Precision(amp, CPU), kept, SPEED=[wanted], DATA=TWO_IMAGES)


@pytest.fixture(autouse=True)
def torchs_own_choice():
    yield
    AttentionKernel().apply(built_of(nn.Identity()), "fused")


@pytest.fixture
def vit() -> nn.Module:
    return create_model("test_vit", num_classes=3, drop_rate=0.1)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "fused"),
        ({"AMP__ENABLED": "true", "AMP__DTYPE": "bf16"}, "plain"),
        ({"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__LEVEL": "O2"}, "plain"),
        ({"SPEED": "-fused"}, "plain"),
        ({"SPEED": "+fused", "AMP__ENABLED": "true", "AMP__DTYPE": "bf16"}, "fused"),
        ({"AMP__CUSTOM_BLACK_LIST": "softmax"}, "plain"),
    ],
)
def test_cpu_uses_a_rule_unless_a_kind_is_given(tiny: Path, settings: dict[str, str], kind: str) -> None:
    ready = build(tiny, **settings)
    assert ready.choices["attention"] == kind
    computing = ready.parts.forward  # a half-precision copy where there is one
    assert kinds_of(computing) == {kind}
    calls: list[int] = []
    seen = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or seen(*a, **k)
    try:
        train(ready, 1)
    finally:
        F.scaled_dot_product_attention = seen
    assert bool(calls) == (kind == "fused")


def test_model_without_timm_attention_has_no_choice() -> None:
    model = create_model("test_resnet", num_classes=3)
    with pytest.raises(UserError, match="has no attention layer whose kernel"):
        attention_by_rule(built_of(model, SPEED=["+fused"]))
    found = attention_by_rule(built_of(model))
    assert found is not None
    assert found.value == "the model's own"


def test_resumed_run_with_another_precision_decides_again(tiny: Path) -> None:
    ready = build(tiny, SPEED="-fused")
    config, inputs = load_config(str(tiny)).config, Inputs(load_config(str(tiny)).config.DATA)
    for precision, kind, words in ((OFF, "plain", "as before the resume"), (BF16, "plain", "half precision on a CPU")):
        amp = config.changed(AMP=precision)
        choices, words_of_it = speed_up(amp, ready.model, inputs, Precision(precision, CPU), ALONE, ready.choices)
        assert choices["attention"] == kind
        assert f"attention {kind} ({words})" in words_of_it


def test_gpu_times_kinds_unless_resumed(vit: nn.Module) -> None:
    assert attention_by_rule(built_of(vit, ON_GPU)) is None
    kept = attention_by_rule(built_of(vit, ON_GPU, {"attention": "cudnn"}))
    assert kept is not None
    assert kept.value == "cudnn"
    flash = built_of(vit, ON_GPU, SPEED=["+flash"])
    assert attention_by_rule(flash) is None, "it is tried whether there is such a one"
    listed = attention_by_rule(built_of(vit, ON_GPU, AMP={"CUSTOM_BLACK_LIST": ["bmm"]}))
    assert listed is not None
    assert listed.value == "plain"


@pytest.mark.parametrize(("deterministic", "races"), [(True, 0), (False, 1)])
def test_deterministic_run_does_not_time_kinds(
    vit: nn.Module, monkeypatch: pytest.MonkeyPatch, deterministic: bool, races: int
) -> None:
    raced: list[Choice] = []
    monkeypatch.setattr(attention_race, "race_attention", lambda _: raced.append(Choice("flash")) or raced[0])
    found = chosen(AttentionKernel, built_of(vit, ON_GPU, DETERMINISTIC=deterministic, DATA=TWO_IMAGES))
    assert (len(raced), found.value) == (races, "flash" if races else "fused")


def test_race_uses_the_models_call_and_has_no_side_effects(vit: nn.Module) -> None:
    images, before = torch.randn(2, 3, 160, 160), torch.get_rng_state()
    call = first_call(vit.train(), images, Precision(BF16, CPU))
    assert call.layer is vit.get_submodule("blocks.0.attn")
    assert call.inputs[0].shape[0] == 2
    assert call.tokens == 101
    for kind in ("fused", "plain"):
        call.run(kind)
    call.left_out = built_of(vit, SPEED=["-flash"]).left_out
    with call._only_kind("fused"):
        assert not torch.backends.cuda.flash_sdp_enabled(), "as it will train"
    assert built_of(vit, SPEED=["plain", "+fused"]).left_out == [], "torch's choice"
    assert vit.training
    assert not any(layer._forward_pre_hooks for layer in attention_layers(vit))
    assert all(parameter.grad is None for parameter in vit.parameters())
    race_attention(on_cpu(vit, "-fused", BF16))
    assert torch.equal(torch.get_rng_state(), before)


def test_race_includes_only_kinds_that_work(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no kernel of cuDNN's, and torch says so as it does on a GPU that lacks one."""
    raced: list[str] = []
    monkeypatch.setattr(attention_race, "_time_by_events", lambda work: work() or 1.0)
    monkeypatch.setattr(
        attention_race, "race", lambda run, kinds, clock: raced.extend(kinds) or race(run, kinds, clock)
    )
    race_attention(on_cpu(vit, "auto"))
    assert "fused" in raced
    assert "cudnn" not in raced
    assert "plain" not in raced, "101 tokens: its matrices may not fit where a batch was found to"
    with pytest.raises(UserError, match=r"SPEED \+cudnn does not support this GPU.*use fused, plain"):
        race_attention(on_cpu(vit, "+cudnn"))


def test_race_alternates_kinds_and_uses_medians() -> None:
    turns: list[str] = []
    seconds = {"fused": 2.0, "plain": 1.0, "flash": 1.5}

    def clock(work: Any) -> float:
        work()
        slow_once = 100.0 if turns.count(turns[-1]) == 4 else 0.0
        return seconds[turns[-1]] + slow_once

    assert race(turns.append, list(seconds), clock) == seconds
    assert turns[:6] == ["fused", "plain", "flash"] * 2


@pytest.mark.parametrize(
    ("seconds", "kind", "words"),
    [
        ({"fused": 1.31, "plain": 1.0}, "plain", "1.31x as fast as fused"),
        ({"fused": 1.01, "flash": 1.0}, "fused", "torch's choice"),
        ({"flash": 1.0}, "flash", "the fastest that works"),
    ],
)
def test_winner_must_be_faster_by_a_margin(seconds: dict[str, float], kind: str, words: str) -> None:
    found = winner(seconds)
    assert found.value == kind
    assert words in found.why


def test_apply_attention_sets_and_resets_torchs_backends(vit: nn.Module) -> None:
    flags = torch.backends.cuda
    own = torch._C._get_sdp_priority_order()  # pyright: ignore[reportAttributeAccessIssue]
    AttentionKernel().apply(built_of(vit), "efficient")
    assert flags.mem_efficient_sdp_enabled()
    assert flags.math_sdp_enabled()
    assert not flags.flash_sdp_enabled()
    assert kinds_of(vit) == {"fused"}
    AttentionKernel().apply(built_of(vit, SPEED=["-flash"]), "fused")
    assert flags.mem_efficient_sdp_enabled()
    assert flags.cudnn_sdp_enabled()
    assert not flags.flash_sdp_enabled(), "left out of torch's own choice, too"
    AttentionKernel().apply(built_of(vit), "plain")
    assert flags.flash_sdp_enabled()
    assert kinds_of(vit) == {"plain"}
    assert torch._C._get_sdp_priority_order() == own  # pyright: ignore[reportAttributeAccessIssue]


# ---- packed


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


def failing(*_: Any) -> None:
    raise RuntimeError("out of resources\nand more")


def test_packed_is_rejected_without_kernels(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_check_kernels", failing)
    built = on_cpu(vit, "+packed", BF16)
    with pytest.raises(UserError, match=r"SPEED \+packed does not support this GPU.*use fused, plain"):
        race_attention(built)
    assert not any(isinstance(module, PackedAttention) for module in vit.modules())
    with pytest.raises(UserError, match=r"packed: cpu supports only fused and plain; leave it out"):
        attention_by_rule(built)


def test_amp_lists_with_torchs_operator_exclude_packed(vit: nn.Module) -> None:
    amp, kept = {"CUSTOM_BLACK_LIST": ["scaled_dot_product_attention"]}, {"attention": PACKED}
    with pytest.raises(UserError, match=r"packed: AMP's lists, which affect .* name scaled_dot"):
        attention_by_rule(built_of(vit, ON_GPU, SPEED=["+packed"], AMP=amp))
    assert attention_by_rule(built_of(vit, ON_GPU, kept, AMP=amp)) is None, "another kind has to be found"
    assert attention_by_rule(built_of(vit, ON_GPU, kept)) is None, "it has to be tried on this GPU"
    for kind in ("packed", "fused"):
        with pytest.raises(UserError, match="no effect on softmax"):
            attention_by_rule(built_of(vit, ON_GPU, SPEED=[f"+{kind}"], AMP={"CUSTOM_BLACK_LIST": ["softmax"]}))


@pytest.mark.parametrize("there", [True, False])
def test_resumed_run_keeps_packed_where_its_kernels_work(
    vit: nn.Module, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Another GPU may have too little memory on its chip."""
    monkeypatch.setattr(packed, "_check_kernels", failing if not there else lambda *_: None)
    monkeypatch.setattr(packed, "supports_call", lambda *_: True)
    monkeypatch.setattr(packed, "packed_attention", lambda qkv, _heads: (qkv[..., : qkv.shape[2] // 3] * 1.0, None))
    monkeypatch.setattr(attention_race, "_time_by_events", lambda work: work() or 1.0)
    found = race_attention(on_cpu(vit, "auto", BF16, {"attention": PACKED}))
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
    def no_compiler(*_: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(packed, "self_test", no_compiler)
    with pytest.raises(RuntimeError, match="does not run here: no compiler"):
        packed._check_kernels(17, 64, torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(kernels, "packed_attention", lambda qkv, heads: (qkv[..., : 64 * heads] * 1.0, None))
    with pytest.raises(RuntimeError, match="relative error"):
        kernels.self_test(CPU, torch.bfloat16, 17, 64)
