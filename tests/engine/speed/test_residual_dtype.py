"""TRAIN.RESIDUAL_DTYPE: the precision of what blocks hand on to one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.speed.residual_dtype import cast_residual_stream, casts_residual_stream
from tests.engine.small import BF16, CPU, OFF, build, train
from utils.config import AmpConfig
from utils.errors import UserError


def stream_of(model: nn.Module, autocast: bool = True) -> set[torch.dtype]:
    """What comes out of blocks, and what the attention and the MLP inside them give to be added."""
    seen: set[torch.dtype] = set()
    hooks = [block.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype)) for block in model.blocks]  # type: ignore[union-attr]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(1, 3, 160, 160))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_residual_stream_is_fp32_unless_set_to_autocast(layer_scale: float | None) -> None:
    model = create_model("test_vit", num_classes=3, init_values=layer_scale)
    assert stream_of(model) == {torch.float32}
    precision = Precision(BF16, CPU)
    assert casts_residual_stream("autocast", model, precision)
    assert not casts_residual_stream("fp32", model, precision)
    cast_residual_stream(model, precision)
    assert stream_of(model) == {torch.bfloat16}
    assert stream_of(model, autocast=False) == {torch.float32}, "a validation in fp32 stays one"


def test_residual_dtype_applies_to_model_and_ema(tiny: Path) -> None:
    ready = build(
        tiny, AMP__ENABLED="true", AMP__DTYPE="bf16", TRAIN__RESIDUAL_DTYPE="autocast", TRAIN__MODEL_EMA="true"
    )
    assert ready.parts.ema is not None
    for model in (ready.model, ready.parts.ema.module):
        seen: list[torch.dtype] = []

        def note(_block: nn.Module, _inputs: Any, out: Tensor, seen: list[torch.dtype] = seen) -> None:
            seen.append(out.dtype)

        model.get_submodule("blocks.0").register_forward_hook(note)
        with torch.no_grad(), ready.precision.autocast():
            model(torch.randn(2, 1, 8, 8))
        assert seen == [torch.bfloat16]
    train(ready, 2)
    assert "residual stream" in ready.tuning.words()


@pytest.mark.parametrize("amp", [OFF, AmpConfig(ENABLED=True, DTYPE="bf16", LEVEL="O2")])
def test_residual_dtype_has_no_effect_without_autocast(amp: AmpConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vitamp")
    assert not casts_residual_stream("autocast", create_model("test_vit"), Precision(amp, CPU))
    assert "RESIDUAL_DTYPE autocast has no effect" in caplog.text


def test_residual_dtype_is_rejected_for_models_without_blocks() -> None:
    with pytest.raises(UserError, match=r"TRAIN\.RESIDUAL_DTYPE autocast: Linear"):
        casts_residual_stream("autocast", nn.Linear(2, 2), Precision(BF16, CPU))
