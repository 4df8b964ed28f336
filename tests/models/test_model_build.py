"""MODEL settings give the right timm model with the right rates, or are refused before anything is built."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from models.build import build_model, build_without_weights, check_model, describe
from models.parts import count_parameters
from tests import refused
from utils.config.model import ModelConfig

BASE_SIZES = {"PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12, "NUM_HEADS": 12, "MLP_RATIO": 4.0, "QKV_BIAS": True}
TINY_VIT = {"NAME": "tiny", "EMBED_DIM": 16, "DEPTH": 2, "NUM_HEADS": 2, "PATCH_SIZE": 8, "NUM_CLASSES": 5}
SWIN_SIZES = {"PATCH_SIZE": 4, "EMBED_DIM": 16, "STAGE_DEPTHS": [1, 2], "NUM_HEADS": [2, 4], "WINDOW_SIZE": 4}
TINY_SWIN = {"TYPE": "swin", "NAME": "tiny", **SWIN_SIZES, "NUM_CLASSES": 5}
SWIN_384 = {"TYPE": "swin", "EMBED_DIM": 128, "WINDOW_SIZE": 12}


def build(image_size: int = 32, channels: int = 3, **settings: Any) -> nn.Module:
    return build_model(ModelConfig(**settings), image_size, channels)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def test_vit_b16_equals_timms_in_parameters_and_output() -> None:
    ours = build(224, TYPE="vit", NAME="vit_base_patch16_224", **BASE_SIZES).eval()
    theirs = timm.create_model("vit_base_patch16_224").eval()
    assert count_parameters(ours) == (86_567_656, 86_567_656)
    assert shapes(ours) == shapes(theirs)
    ours.load_state_dict(theirs.state_dict())
    image = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "size", "timm_name"),
    [
        ({"TYPE": "deit", "NAME": "deit_base_patch16_384", **BASE_SIZES}, 384, None),
        ({"TYPE": "deit", "NAME": "deit_base_distilled_patch16_224", "DEPTH": 12}, 224, None),
        ({"TYPE": "deit", "NAME": "deit"}, 224, "deit_base_patch16_224"),
        ({"TYPE": "vit", "NAME": "vit"}, 224, "vit_base_patch16_224"),
        ({"TYPE": "swin", "NAME": "swin"}, 224, "swin_tiny_patch4_window7_224"),
        ({"NAME": "swin_base_patch4_window12_384_21k_1k", **SWIN_384}, 384, "swin_base_patch4_window12_384"),
        ({"TYPE": "swin", "NAME": "swin_large_patch4_window7_224", "NUM_HEADS": [6, 12, 24, 48]}, 224, None),
        ({"TYPE": "RegNet", "NAME": "regnety_160"}, 224, None),
        ({"NAME": "resnet50"}, 224, None),
        ({"NAME": "vit_base_patch16_224.augreg_in21k"}, 224, "vit_base_patch16_224"),
    ],
)
def test_recipe_names_give_timms_models(settings: dict[str, Any], size: int, timm_name: str | None) -> None:
    with torch.device("meta"):
        ours, theirs = build(size, **settings), timm.create_model(timm_name or settings["NAME"])
    assert shapes(ours) == shapes(theirs)


def test_weights_are_drawn_as_timm_draws_them() -> None:
    torch.manual_seed(3)
    ours = build(**TINY_VIT)
    torch.manual_seed(3)
    theirs = timm.create_model(
        "vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


def test_image_size_channels_and_classes_reach_timm() -> None:
    vit = build(64, channels=1, **TINY_VIT)
    assert vit(torch.rand(1, 1, 64, 64)).shape == (1, 5)
    assert shapes(vit)["pos_embed"] == (1, 65, 16)
    swin = build(64, channels=1, **TINY_SWIN)
    assert swin(torch.rand(1, 1, 64, 64)).shape == (1, 5)
    resnet = build(64, channels=1, NAME="resnet10t", NUM_CLASSES=7)
    assert resnet(torch.rand(2, 1, 64, 64)).shape == (2, 7)


def test_edited_sizes_make_the_name_a_label_in_the_log(said: pytest.LogCaptureFixture) -> None:
    edited = build(224, NAME="vit_tiny_patch16_224", DEPTH=3, QKV_BIAS=False, NUM_HEADS=3)
    assert len(edited.blocks) == 3  # pyright: ignore
    assert "blocks.0.attn.qkv.bias" not in shapes(edited)
    for text in ("differs from timm's model of that name", "DEPTH 3 (timm's: 12)", "QKV_BIAS false (timm's: true)"):
        assert text in said.text
    assert "NUM_HEADS" not in said.text  # given, but not edited
    said.clear()
    build(224, NAME="vit_tiny_patch16_224", NUM_HEADS=3)
    assert "differs" not in said.text
    assert "vit_tiny_patch16_224" in said.text
    said.clear()
    build(**TINY_VIT)
    assert "label" not in said.text, "a name of one's own, whose sizes are in the banner"


def test_swin_sizes_are_built() -> None:
    swin = build(32, **{**TINY_SWIN, "MLP_RATIO": 2.0})
    blocks = [block for stage in swin.layers for block in stage.blocks]  # pyright: ignore
    assert [block.attn.num_heads for block in blocks] == [2, 4, 4]
    assert [block.window_size for block in blocks] == [(4, 4)] * 3
    assert [block.mlp.fc1.out_features for block in blocks] == [32, 64, 64]


def dropouts(module: nn.Module) -> dict[str, float]:
    return {name: part.p for name, part in module.named_modules() if isinstance(part, nn.Dropout)}


def test_vit_rates_reach_the_modules() -> None:
    vit = build(DROPOUT=0.1, ATTENTION_DROPOUT=0.2, DROPPATH=0.3, **TINY_VIT)
    rates = dropouts(vit)
    assert rates["pos_drop"] == rates["blocks.1.attn.proj_drop"] == rates["blocks.1.mlp.drop2"] == 0.1
    assert rates["blocks.0.attn.attn_drop"] == 0.2
    assert rates["head_drop"] == 0.0  # PaddleViT has none before the classifier
    assert vit.blocks[1].drop_path1.drop_prob == pytest.approx(0.3)  # pyright: ignore
    assert isinstance(vit.blocks[0].drop_path1, nn.Identity)  # pyright: ignore


def test_swin_rates_reach_the_modules_and_zero_means_zero(said: pytest.LogCaptureFixture) -> None:
    swin = build(DROPOUT=0.1, ATTENTION_DROPOUT=0.2, DROPPATH=0.3, **TINY_SWIN)
    assert "has no dropout after the patch embedding" in said.text
    rates = dropouts(swin)
    assert rates["layers.0.blocks.0.attn.proj_drop"] == rates["layers.1.blocks.1.mlp.drop1"] == 0.1
    assert rates["layers.0.blocks.0.attn.attn_drop"] == 0.2
    assert swin.layers[1].blocks[1].drop_path1.drop_prob == pytest.approx(0.3)  # pyright: ignore
    # By default, timm's Swin has a drop path of 0.1, and its EfficientFormerV2-S one of 0.02.
    for without in (build(**TINY_SWIN), build_without_weights(ModelConfig(NAME="efficientformerv2_s2"), 224, 3)):
        assert not [part for part in without.modules() if getattr(part, "drop_prob", 0)]


def test_rates_of_other_models_reach_the_modules() -> None:
    resnet = build(NAME="resnet10t", DROPOUT=0.1, DROPPATH=0.2)
    assert resnet.drop_rate == 0.1
    for model in (resnet, build_without_weights(ModelConfig(NAME="naflexvit_base_patch16_gap", DROPPATH=0.2), 224, 3)):
        assert max(getattr(part, "drop_prob", 0) or 0 for part in model.modules()) == pytest.approx(0.2)


def test_describe_names_sizes_and_parameters() -> None:
    vit = build(**TINY_VIT)
    total = sum(p.numel() for p in vit.parameters())
    assert describe(vit) == (
        f"tiny (VisionTransformer, patch 8, width 16, depth 2, heads 2), {total:,} parameters (all trainable)"
    )
    for parameter in vit.blocks.parameters():  # pyright: ignore
        parameter.requires_grad = False
    trained = count_parameters(vit)[1]
    assert trained < total
    assert f"({trained:,} trainable, {100 * trained / total:.1f} %)" in describe(vit)
    assert "depths [1, 2], heads [2, 4]" in describe(build(**TINY_SWIN))
    assert "vit_base_patch16_224" not in describe(nn.Linear(2, 2))


def refusal(image_size: int = 224, **settings: Any) -> str:
    said = refused.refusal(check_model, ModelConfig(**settings), image_size, 3)
    assert refused.refusal(build_model, ModelConfig(**settings), image_size, 3) == said
    return said


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
            ["NUM_HEADS[1] 5", "192", "heads that divides"],
        ),
        ({"TYPE": "swin"}, ["MODEL.TYPE swin", "MODEL.NAME vit_base_patch16_224", "VisionTransformer"]),
        ({"TYPE": "deit", "NAME": "resnet50"}, ["MODEL.TYPE deit", "ResNet"]),
        ({"TYPE": "swinn", "NAME": "s", "DEPTH": 1}, ["only vit, deit, swin, mae can: set TYPE", "Did you mean swin?"]),
        ({"NAME": "vit_tiny"}, ["'vit_tiny'", "Did you mean vit_tiny_patch16_224, ", " or "]),
        (
            {"TYPE": "cnn", "NAME": "resnet5O", "EMBED_DIM": 8},
            ["'cnn' cannot be built from sizes", "'resnet5O' is not"],
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
