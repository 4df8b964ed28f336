"""MODEL.NEW_CLASSIFIER: a new classifier on weights that have one, with other and with equally many classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.build import build_model
from models.parts import classifiers
from models.weights.fit import load_pretrained
from tests.models.test_model_weights import augreg
from utils.config.model import ModelConfig

SWIN: dict[str, Any] = {"PATCH_SIZE": 4, "EMBED_DIM": 16, "STAGE_DEPTHS": [1, 1], "NUM_HEADS": [2, 4], "WINDOW_SIZE": 4}
VIT: dict[str, Any] = {"EMBED_DIM": 16, "DEPTH": 1, "NUM_HEADS": 2, "PATCH_SIZE": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {"NAME": "tiny", **VIT},
    "deit": {"TYPE": "deit", "NAME": "deit_tiny_distilled_patch16_224", **VIT},
    "swin": {"TYPE": "swin", "NAME": "tiny", **SWIN},
    "resnet": {"TYPE": "resnet", "NAME": "test_resnet"},
}


def build(seed: int, family: str, classes: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(ModelConfig(**FAMILIES[family], NUM_CLASSES=classes, FREEZE=("backbone",)), 32, 3)


@pytest.mark.parametrize(("classes", "asked"), [(5, True), (7, False), (7, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_classifier_keeps_the_models_own(tmp_path: Path, family: str, classes: int, asked: bool) -> None:
    donor = build(0, family, 5)
    for tensor in donor.state_dict().values():
        if tensor.is_floating_point():
            nn.init.normal_(tensor)
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    ours, untouched = build(1, family, classes), build(1, family, classes)
    said = load_pretrained(ours, str(tmp_path / "w.safetensors"), family, new_classifier=asked)
    heads = classifiers(ours)
    assert len(heads) == (2 if family == "deit" else 1)
    for name, tensor in ours.state_dict().items():
        fresh = name.startswith(heads)
        expected = (untouched if fresh else donor).state_dict()[name]
        assert torch.equal(tensor, expected), name
    assert all(weight.requires_grad is name.startswith(heads) for name, weight in ours.named_parameters())
    for head in heads:
        assert (
            f"{head} left as freshly initialised"
            if asked
            else f"{head} freshly initialised (5 classes in the file, 7 in the model"
        ) in said


def test_new_classifier_with_npz_weights(tmp_path: Path) -> None:
    ours, donor = build(1, "vit", 5), build(0, "vit", 5)
    np.savez(tmp_path / "w.npz", **augreg(donor))  # pyright: ignore[reportArgumentType]
    fresh = ours.state_dict()["head.weight"].clone()
    said = load_pretrained(ours, str(tmp_path / "w.npz"), "vit", new_classifier=True)
    assert torch.equal(ours.state_dict()["head.weight"], fresh)
    assert torch.equal(ours.state_dict()["cls_token"], donor.state_dict()["cls_token"])
    assert "head left as freshly initialised" in said
    load_pretrained(ours, str(tmp_path / "w.npz"), "vit")
    assert torch.equal(ours.state_dict()["head.weight"], donor.state_dict()["head.weight"])
