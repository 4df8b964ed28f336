"""The table of -print_amp: what it says is what the modules really had."""

from __future__ import annotations

import re

import torch
from small_vit import batch, small_vit
from torch import Tensor, nn

from engine.amp.low_precision import force_fp32
from engine.amp.print_amp import amp_table


def table(model: nn.Module, images: Tensor | None = None, amp: bool = True) -> dict[str, list[str]]:
    """Module -> class, parameters, inputs, outputs, operations."""

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            model(batch()[0] if images is None else images)

    lines = amp_table(model, forward).splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines if not line.startswith("*")]
    assert rows[0] == ["module", "class", "parameters", "inputs", "outputs", "operations"]
    return {row[0]: row[1:] for row in rows[1:]}


def test_table_of_a_vit_under_autocast() -> None:
    rows = table(small_vit())
    assert rows["(model)"] == ["VisionTransformer", "fp32", "fp32", "bf16", "add fp32"]
    assert rows["patch_embed.proj"] == ["Conv2d", "fp32", "fp32", "bf16", "conv2d bf16"]
    assert rows["blocks.0-1.attn"] == ["Attention", "fp32", "fp32", "bf16", "mul bf16, matmul bf16, softmax bf16"]
    assert rows["blocks.0-1.mlp.fc1"] == ["Linear", "fp32", "fp32", "bf16", "linear bf16"]
    assert rows["norm"] == ["LayerNorm", "fp32", "fp32", "fp32", "layer_norm fp32"]


def test_table_shows_fused_attention_as_one_operation() -> None:
    assert table(small_vit(fused=True))["blocks.0-1.attn"][-1] == "scaled_dot_product_attention bf16"


def test_table_marks_forced_modules_and_does_not_merge_them() -> None:
    model = small_vit()
    force_fp32(model, ["blocks.1", "head"], "cpu")
    rows = table(model)
    assert rows["blocks.0.mlp.fc1"][-1] == "linear bf16"
    assert rows["blocks.1"][2] == "fp32*"
    assert rows["blocks.1.mlp.fc1"][-1] == "linear fp32"
    assert rows["head"] == ["Linear", "fp32", "fp32*", "fp32", "linear fp32"]


def test_table_merges_equal_rows_that_are_not_adjacent() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) if n % 2 else nn.GELU() for n in range(6)), nn.Identity())
    rows = table(model, torch.rand(2, 4))
    assert rows["0"] == ["GELU", "-", "fp32", "fp32", "gelu fp32"]
    assert rows["1"] == ["Linear", "fp32", "fp32", "bf16", "linear bf16"]
    assert rows["2,4"] == ["GELU", "-", "bf16", "bf16", "gelu bf16"]
    assert rows["3,5"] == ["Linear", "fp32", "bf16", "bf16", "linear bf16"]
    assert "6" not in rows
