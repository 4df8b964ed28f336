"""MODEL settings that no model can have are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from models.build import build_model, check_model
from utils.config.model import ModelConfig
from utils.errors import UserError


def refusal(image_size: int = 224, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_model(ModelConfig(**settings), image_size, 3)
    with pytest.raises(UserError) as again:
        build_model(ModelConfig(**settings), image_size, 3)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NAME": "resnet50", "EMBED_DIM": 768}, ["MODEL.EMBED_DIM 768", "ResNet has no such size"]),
        ({"NAME": "resnet50", "ATTENTION_DROPOUT": 0.1}, ["MODEL.ATTENTION_DROPOUT 0.1", "ResNet"]),
        ({"NAME": "vgg11", "DROPPATH": 0.1}, ["MODEL.DROPPATH 0.1", "VGG"]),
        ({"WINDOW_SIZE": 7}, ["MODEL.WINDOW_SIZE 7", "VisionTransformer"]),
        ({"STAGE_DEPTHS": [2, 2]}, ["MODEL.STAGE_DEPTHS [2, 2]", "VisionTransformer"]),
        ({"NUM_HEADS": [3, 6]}, ["MODEL.NUM_HEADS [3, 6]", "one number"]),
        ({"TYPE": "swin", "NAME": "swin", "DEPTH": 12}, ["MODEL.DEPTH 12", "SwinTransformer"]),
        ({"TYPE": "swin", "NAME": "swin", "NUM_HEADS": 3}, ["MODEL.NUM_HEADS 3", "one number per stage"]),
        ({"TYPE": "swin", "NAME": "swin", "NUM_HEADS": [3, 6]}, ["NUM_HEADS [3, 6]", "STAGE_DEPTHS [2, 2, 6, 2]"]),
        (
            {"TYPE": "swin", "NAME": "swin", "NUM_HEADS": [3, 5, 12, 24]},
            ["MODEL.NUM_HEADS[1] 5", "192", "heads that divides it"],
        ),
        ({"TYPE": "swin"}, ["MODEL.TYPE swin", "MODEL.NAME vit_base_patch16_224", "VisionTransformer"]),
        ({"TYPE": "deit", "NAME": "resnet50"}, ["MODEL.TYPE deit", "ResNet"]),
        ({"NAME": "vit_bas_patch16_224"}, ["'vit_bas_patch16_224'", "Did you mean vit_base_patch16_224?"]),
        ({"NAME": "vit_tiny"}, ["'vit_tiny'", "Did you mean vit_tiny_patch16_224, ", " or "]),
        (
            {"TYPE": "cnn", "NAME": "resnet5O", "EMBED_DIM": 8},
            ["MODEL.TYPE: 'cnn' cannot be built from sizes (MODEL.EMBED_DIM, ...)", "'resnet5O' is not"],
        ),
        ({"NAME": "vit_base_patch16_224.wrong"}, ["no tag 'wrong'", "augreg_in21k"]),
        ({"NAME": "beit_base_patch16_224", "EMBED_DIM": 769}, ["MODEL.EMBED_DIM 769", "768"]),
    ],
)
def test_unsupported_model_settings_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    said = refusal(**settings)
    assert all(word in said for word in words), said


def test_contradicting_sizes_are_refused_with_possible_ones() -> None:
    said = refusal(230, EMBED_DIM=100, NUM_HEADS=7)
    assert "DATA.IMAGE_SIZE 230 is not divisible by MODEL.PATCH_SIZE 16" in said
    assert "IMAGE_SIZE 224 or 240" in said
    assert "MODEL.EMBED_DIM 100 is not divisible by MODEL.NUM_HEADS 7" in said


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "swinv2_tiny_window8_256"])
def test_other_patch_models_need_divisible_image_sizes(name: str) -> None:
    said = refusal(225, NAME=name)
    assert "DATA.IMAGE_SIZE 225" in said
    assert "or another PATCH_SIZE" not in said  # these models do not accept it


@pytest.mark.parametrize(("name", "size"), [("maxvit_tiny_tf_224", 100), ("inception_v3", 32), ("vgg11", 16)])
def test_unsupported_image_size_is_refused_before_training(name: str, size: int) -> None:
    assert f"DATA.IMAGE_SIZE {size}: {name} does not support images of this size" in refusal(size, NAME=name)
