"""Modules kept in fp32: the right ones, in every way a model is run, and only those."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_vit import aot, batch, small_vit, step
from torch import nn

from engine.amp.low_precision import force_fp32, forced_modules

ALL = ["patch_embed", "blocks.*", "norm", "head"]


def output_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """What each module gave in one forward pass under autocast."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        return lambda _module, _args, output: seen.update({name: output.dtype})

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()[0])
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        (["head"], ["head"]),
        (["blocks.1"], ["blocks.1"]),
        (["blocks.*.attn"], ["blocks.0.attn", "blocks.1.attn"]),
        (["blocks.1.mlp.fc?"], ["blocks.1.mlp.fc1", "blocks.1.mlp.fc2"]),
        (["blocks.[1-9]", "blocks.1.mlp"], ["blocks.1"]),
        (["LayerNorm"], [f"{block}.norm{n}" for block in ("blocks.0", "blocks.1") for n in (1, 2)] + ["norm"]),
        (["Attention", "head"], ["blocks.0.attn", "blocks.1.attn", "head"]),
        # Sequential: checkpointing calls its members, not itself.
        (["blocks"], ["blocks.0", "blocks.1"]),
    ],
)
def test_patterns_force_the_outermost_matching_modules(patterns: list[str], taken: list[str]) -> None:
    model = small_vit()
    assert force_fp32(model, patterns, "cpu") == taken
    assert forced_modules(model) == taken


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_forcing_all_modules_equals_fp32_bit_for_bit(checkpointing: bool, compiled: bool) -> None:
    fp32 = step(small_vit(), amp=False)
    assert not step(small_vit()).equals(fp32)
    model = small_vit(checkpointing=checkpointing)
    force_fp32(model, ALL, "cpu")
    assert step(model, aot(model) if compiled else None).equals(fp32)


@pytest.mark.slow
def test_compiled_model_can_force_more_modules_during_training() -> None:
    model = small_vit()
    forward = aot(model)
    assert step(model, forward).equals(step(small_vit()))
    assert force_fp32(model, ["blocks.1.mlp"], "cpu") == ["blocks.1.mlp"]
    assert force_fp32(model, ["blocks.1.mlp"], "cpu") == []
    assert force_fp32(model, ["blocks.1.mlp.fc1"], "cpu") == []
    eager = small_vit()
    force_fp32(eager, ["blocks.1.mlp"], "cpu")
    assert step(model, forward).equals(step(eager))
    assert force_fp32(model, ["blocks", "blocks.1.mlp.fc1"], "cpu") == ["blocks.0", "blocks.1"]
    force_fp32(model, ALL, "cpu")
    assert step(model, forward).equals(step(small_vit(), amp=False))


def test_deep_copy_is_forced_and_uses_its_own_weights() -> None:
    model = small_vit().eval()
    force_fp32(model, ["head"], "cpu")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
    assert forced_modules(twin) == ["head"]
    assert output_dtypes(twin)["head"] is torch.float32
    assert twin(batch()[0]).abs().sum() > 0
    assert model(batch()[0]).abs().sum() == 0


def test_keyword_and_nested_inputs_are_cast() -> None:
    class Pair(nn.Module):
        def forward(self, both: list[torch.Tensor], *, scale: torch.Tensor, count: torch.Tensor) -> tuple[Any, ...]:
            return both[0].dtype, both[1].dtype, scale.dtype, count.dtype

    model = nn.ModuleDict({"pair": Pair()})
    force_fp32(model, ["pair"], "cpu")
    half = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        seen = model["pair"]([half, half], scale=half.half(), count=torch.ones(2, dtype=torch.int64))
    assert seen == (torch.float32,) * 3 + (torch.int64,)
