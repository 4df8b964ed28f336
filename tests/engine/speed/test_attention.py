"""Kernels of attention: who decides how attention is computed, and the race that decides it on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import create_model
from torch import nn

import engine.speed.attention_race as attention_race
from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from engine.speed.attention import AttentionKernel, attention_by_rule
from engine.speed.attention_kinds import attention_layers
from engine.speed.attention_race import first_call, race, race_attention, winner
from engine.speed.speedup import BuiltModel, Choice
from engine.speed.tuning import speed_up
from tests.engine.small import BF16, CPU, OFF, build, built_of, chosen, train
from utils.config import AmpConfig, load_config
from utils.distributed.world import ALONE
from utils.errors import UserError

TWO_IMAGES = {"BATCH_SIZE": 2, "IMAGE_SIZE": 160}


class OnGpu:
    """As much of a precision as a decision asks for."""

    device, level, name = torch.device("cuda", 0), "O1", "bf16"


def kinds_of(model: nn.Module) -> set[str]:
    return {"fused" if layer.fused_attn else "plain" for layer in attention_layers(model)}


def raced_on_cpu(model: nn.Module, wanted: str, amp: AmpConfig = OFF) -> BuiltModel:
    return built_of(
        model,
        Precision(amp, CPU),
        SPEED=[{"plain": "-fused", "auto": "auto"}.get(wanted, f"+{wanted}")],
        DATA=TWO_IMAGES,
    )


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SPEED": "+flash"}, "cpu supports only fused and plain"),
        ({"SPEED": "+fused", "AMP__CUSTOM_BLACK_LIST": "softmax"}, "no effect on softmax"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, settings: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(tiny, **settings)


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
        amp = config.model_copy(update={"AMP": precision})
        choices, words_of_it = speed_up(amp, ready.model, inputs, Precision(precision, CPU), ALONE, ready.choices)
        assert choices["attention"] == kind
        assert f"attention {kind} ({words})" in words_of_it


@pytest.mark.parametrize(("kept", "kind"), [(None, None), ("cudnn", "cudnn")])
def test_gpu_times_kinds_unless_resumed(vit: nn.Module, kept: str | None, kind: str | None) -> None:
    found = attention_by_rule(built_of(vit, OnGpu(), {"attention": kept} if kept else {}))
    assert (found and found.value) == kind
    flash = built_of(vit, OnGpu(), SPEED=["+flash"])
    assert attention_by_rule(flash) is None, "it is tried whether there is such a one"
    listed = attention_by_rule(built_of(vit, OnGpu(), AMP={"CUSTOM_BLACK_LIST": ["bmm"]}))
    assert listed is not None
    assert listed.value == "plain"


@pytest.mark.parametrize(("deterministic", "races"), [(True, 0), (False, 1)])
def test_deterministic_run_does_not_time_kinds(
    vit: nn.Module, monkeypatch: pytest.MonkeyPatch, deterministic: bool, races: int
) -> None:
    raced: list[Choice] = []
    monkeypatch.setattr(attention_race, "race_attention", lambda _: raced.append(Choice("flash")) or raced[0])
    found = chosen(AttentionKernel, built_of(vit, OnGpu(), DETERMINISTIC=deterministic, DATA=TWO_IMAGES))
    assert (len(raced), found.value) == (races, "flash" if races else "fused")


def test_race_uses_the_models_call_and_has_no_side_effects(vit: nn.Module) -> None:
    images, before = torch.randn(2, 3, 160, 160), torch.get_rng_state()
    call = first_call(vit.train(), images, Precision(BF16, CPU))
    assert call.layer is vit.get_submodule("blocks.0.attn")
    assert call.inputs[0].shape[0] == 2
    assert call.tokens == 101
    for kind in ("fused", "plain"):
        call.run(kind)
    assert vit.training
    assert not any(layer._forward_pre_hooks for layer in attention_layers(vit))
    assert all(parameter.grad is None for parameter in vit.parameters())
    race_attention(raced_on_cpu(vit, "plain", BF16))
    assert torch.equal(torch.get_rng_state(), before)


def test_race_includes_only_kinds_that_work(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no kernel of cuDNN's, and torch says so as it does on a GPU that lacks one."""
    raced: list[str] = []
    monkeypatch.setattr(attention_race, "_time_by_events", lambda work: work() or 1.0)
    monkeypatch.setattr(
        attention_race, "race", lambda run, kinds, clock: raced.extend(kinds) or race(run, kinds, clock)
    )
    race_attention(raced_on_cpu(vit, "auto"))
    assert "fused" in raced
    assert "cudnn" not in raced
    assert "plain" not in raced, "101 tokens: its matrices may not fit where a batch was found to"
    with pytest.raises(UserError, match=r"SPEED \+cudnn does not support this GPU.*use fused, plain"):
        race_attention(raced_on_cpu(vit, "cudnn"))


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
    AttentionKernel().apply(built_of(vit), "plain")
    assert flags.flash_sdp_enabled()
    assert kinds_of(vit) == {"plain"}
    assert torch._C._get_sdp_priority_order() == own  # pyright: ignore[reportAttributeAccessIssue]
