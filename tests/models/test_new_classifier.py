"""MODEL.NEW_CLASSIFIER: a new classifier on weights that have one, with other and with equally many classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models import build_model, classifiers, load_pretrained
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


def test_classifier_with_equal_classes_is_loaded_by_default(tmp_path: Path) -> None:
    donor = build(0, "vit", 5)
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    ours = build(1, "vit", 5)
    load_pretrained(ours, str(tmp_path / "w.safetensors"), "vit")
    assert torch.equal(ours.state_dict()["head.weight"], donor.state_dict()["head.weight"])


def test_new_classifier_with_npz_weights(tmp_path: Path) -> None:
    ours = build(1, "vit", 5)
    rng = np.random.default_rng(0)
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, 16),
        "embedding/kernel": (8, 8, 3, 16),
        "embedding/bias": (16,),
        "head/kernel": (16, 5),
        "head/bias": (5,),
        "Transformer/posembed_input/pos_embedding": (1, 17, 16),
        "Transformer/encoder_norm/scale": (16,),
        "Transformer/encoder_norm/bias": (16,),
        **{f"{block}/LayerNorm_{nth}/{what}": (16,) for nth in (0, 2) for what in ("scale", "bias")},
        **{f"{attention}/{what}/kernel": (16, 2, 8) for what in ("query", "key", "value")},
        **{f"{attention}/{what}/bias": (2, 8) for what in ("query", "key", "value")},
        f"{attention}/out/kernel": (2, 8, 16),
        f"{attention}/out/bias": (16,),
        f"{block}/MlpBlock_3/Dense_0/kernel": (16, 64),
        f"{block}/MlpBlock_3/Dense_0/bias": (64,),
        f"{block}/MlpBlock_3/Dense_1/kernel": (64, 16),
        f"{block}/MlpBlock_3/Dense_1/bias": (16,),
    }
    arrays: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    fresh = ours.state_dict()["head.weight"].clone()
    said = load_pretrained(ours, str(tmp_path / "w.npz"), "vit", new_classifier=True)
    assert torch.equal(ours.state_dict()["head.weight"], fresh)
    assert np.array_equal(ours.state_dict()["cls_token"].numpy(), arrays["cls"])
    assert "head left as freshly initialised" in said
    load_pretrained(ours, str(tmp_path / "w.npz"), "vit")
    assert np.array_equal(ours.state_dict()["head.weight"].numpy(), arrays["head/kernel"].T)
