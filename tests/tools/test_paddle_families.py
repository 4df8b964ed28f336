"""Weights of PaddleViT's other families: converted by the rules, timm's models compute what PaddleViT's computed.

Each file of paddle_logits has the names and shapes of the tensors of one of PaddleViT's models, and what it computed in
PaddlePaddle 3.3 with the weights and images that `weights_of` and `images_of` make again here.
"""

from __future__ import annotations

import itertools
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
import yaml
from torch import nn

from models.weights.fit import load_pretrained
from models.weights.paddle_names import all_rules, convert, rules_of
from tests.tools.paddle_files import Arrays, Tool, tool_of, write
from utils.config.paddlevit import families
from utils.errors import UserError

CASES = Path(__file__).with_name("paddle_logits")
LARGE = ("halonet", "halonet_silu", "levit_192", "mobileone_branches", "mobileone_se", "pvtv2", "regnet")
NAMES = [
    pytest.param(file.stem, marks=pytest.mark.slow) if file.stem in LARGE else file.stem
    for file in sorted(CASES.glob("*.yaml"))
]
VARIED = ("halonet", "levit", "mobile", "regnet")
"""Models that timm does not build in other sizes"""


def case_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CASES / f"{name}.yaml").read_text(encoding="utf-8"))


def rows_of(case: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape, and whether it is a table of whole numbers; `[0-2]` in a name are three names."""
    for line in case["tensors"].splitlines():
        name, shape, *whole = line.split()
        sides = tuple(int(side) for side in shape.split("x"))
        pieces = re.split(r"\[(\d+)-(\d+)\]", name)
        ranges = [range(int(a), int(b) + 1) for a, b in zip(pieces[1::3], pieces[2::3], strict=True)]
        for numbers in itertools.product(*ranges):
            yield (
                "".join(map(str, [*itertools.chain(*zip(pieces[::3], numbers, strict=False)), pieces[-1]])),
                sides,
                bool(whole),
            )


def weights_of(case: dict[str, Any]) -> Arrays:
    """Random values that depend on the name; those that timm shares are equal."""
    arrays: Arrays = {}
    for name, shape, whole in rows_of(case):
        if whole:
            arrays[name] = np.zeros(shape, np.int64)
            continue
        rng = np.random.RandomState(zlib.crc32(re.sub(r"\.mlp[34]\.", ".mlp2.", name).encode()) & 0x7FFFFFFF)
        kind = name.rpartition(".")[2]
        if kind == "_variance":
            values = rng.uniform(0.5, 1.5, shape)
        elif kind == "weight" and len(shape) == 1:
            values = (1 + 0.2 * rng.randn(*shape)) * case.get("norms", 1)
        elif kind == "weight":
            values = rng.randn(*shape) / np.sqrt(shape[0] if len(shape) == 2 else np.prod(shape[1:]))
        else:
            values = 0.3 * rng.randn(*shape)
        arrays[name] = values.astype("float32")
    return arrays


def images_of(case: dict[str, Any]) -> torch.Tensor:
    size = case["image"]
    return torch.from_numpy(np.random.RandomState(0).randn(2, 3, size, size).astype("float32"))


def built(case: dict[str, Any]) -> nn.Module:
    """timm's model in the sizes of the case: its entry point takes few of them, its class all."""
    name, arguments, classes = case["model"], case.get("arguments", {}), case.get("classes", 7)
    if any(word in name for word in VARIED):
        return timm.create_model(name, num_classes=classes)
    entry, made = timm.models.model_entrypoint(name), []

    def build(kind: Any, _variant: str, _pretrained: bool = False, **given: Any) -> None:
        own = {key: value for key, value in given.items() if not key.startswith(("pretrained_", "feature_cfg"))}
        made.append(kind(**{**own, **arguments, "num_classes": classes}))

    with mock.patch.object(sys.modules[entry.__module__], "build_model_with_cfg", build):
        entry()
    return made[0]


@pytest.mark.parametrize("name", NAMES)
def test_converted_weights_compute_what_paddlevit_computes(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    model = built(case).eval()
    file = write(tmp_path / "weights.pdparams", weights_of(case))
    load_pretrained(model, str(file), case["model"])
    with torch.no_grad():
        logits = model(images_of(case))
    found = logits[:, : len(case["logits"][0])].numpy()
    np.testing.assert_allclose(found, case["logits"], atol=1e-4 * max(1, np.abs(case["logits"]).max()))
    assert abs(found[0] - found[1]).max() > 1e-3, "the images matter"


def test_every_family_of_timm_converts_or_says_why_not() -> None:
    """Besides BEiT and the others in paddle_logits, none is left out."""
    rules = {one.family: one for one in all_rules()}
    for word, family in families().items():
        names = {other for other, one in families().items() if one.title == family.title}
        assert names & rules.keys(), f"{word}: no rules"
    named = [rules_of([name for name, *_ in rows_of(case_of(file.stem))]) for file in CASES.glob("*.yaml")]
    checked = {one.family for one in named if one}
    assert checked == {word for word, one in rules.items() if not one.refused}
    assert {word for word, one in rules.items() if one.refused} == {"mobilevit", "poolformer"}


def test_families_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    numbers = np.ones((2, 2), np.float32)
    for name, said in (
        (
            "mvit_block_1.transformer.norm.weight",
            "PaddleViT's MobileViT cannot be converted: its attention has 8 heads",
        ),
        ("network.0.0.layer_scale_1", "PaddleViT's PoolFormer cannot be converted: it normalises the feature map"),
    ):
        file = write(tmp_path / "weights.pdparams", {name: numbers})
        with pytest.raises(UserError, match=said):
            load_pretrained(nn.Linear(1, 1), str(file), "any")


def test_trained_weights_that_timm_shares_are_refused() -> None:
    arrays = weights_of(case_of("coat"))
    arrays["parallel_blocks.0.mlp3.fc1.bias"] = arrays["parallel_blocks.0.mlp3.fc1.bias"] + 1
    with pytest.raises(UserError, match=r"mlp3\.fc1\.bias differs from parallel_blocks\.0\.mlp2\.fc1\.bias"):
        convert(arrays)


def test_export_finds_the_model_and_counts_what_does_not_match(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tool: Tool = tool_of(capsys)
    arrays = weights_of(case_of("pvtv2"))
    code, said = tool(write(tmp_path / "mine.pdparams", arrays))
    assert code == 0, said
    assert "timm's pvt_v2_b0 has its tensors" in said
    assert "MODEL.TYPE=pvtv2 MODEL.NAME=pvt_v2_b0 DATA.IMAGE_SIZE=224" in said
    model = timm.create_model("pvt_v2_b0", num_classes=7, checkpoint_path=str(tmp_path / "mine.safetensors"))
    assert torch.equal(model.state_dict()["stages.3.norm.weight"], torch.from_numpy(arrays["norm4.weight"]))

    del arrays["norm4.weight"]
    arrays["extra.weight"] = np.ones(3, np.float32)
    code, said = tool(write(tmp_path / "less.pdparams", arrays), "-name", "pvt_v2_b0")
    assert code == 1
    assert "2 of 178 tensors do not match this model (extra.weight, stages.3.norm.weight): nothing was written" in said
    assert not (tmp_path / "less.safetensors").exists()
