"""Models of images that are not square: as timm builds them, and with weights of other shapes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import nn

from models.build import build_model, check_model
from models.weights.fit import load_pretrained
from tests.models.test_model_weights import augreg
from utils.config import load_config
from utils.config.model import ModelConfig
from utils.errors import UserError
from vitamp.sizes import ImageSize, sides

VIT, DEIT, CAIT = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "cait_xxs24_224"
SWIN, EVA, BEIT = "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"
SAME_PATCHES = 112, 448
"""With 196 patches of 16 x 16, as images of 224 x 224"""


def model_of(name: str, size: ImageSize, depth: int | None = None, classes: int = 5) -> Any:
    torch.manual_seed(0)
    model = build_model(ModelConfig(NAME=name, NUM_CLASSES=classes, DEPTH=depth), size, 3).eval()
    for key, weight in model.named_parameters():
        if "pos" in key:
            nn.init.normal_(weight)
    return model


def saved(model: nn.Module, size: ImageSize | None, file: Path) -> Path:
    """Its weights, with what a run says of the images; None: nothing is said."""
    save_file(model.state_dict(), file, metadata={"input": json.dumps({"image_size": size})} if size else None)
    return file


def positions(name: str, trained: ImageSize | None, now: ImageSize, file: Path) -> tuple[Any, Any]:
    """The position embedding for `now` of a model for `trained`: as it is loaded, and as timm resamples it."""
    model, ours = model_of(name, trained or 224, 1), model_of(name, now, 1)
    nn.init.zeros_(ours.pos_embed)
    load_pretrained(ours, str(saved(model, trained, file)), name)
    old, new = ([side // 16 for side in sides(size)] for size in (trained or 224, now))
    return ours.pos_embed, resample_abs_pos_embed(model.pos_embed, new, old, model.num_prefix_tokens)


@pytest.mark.parametrize("name", [VIT, DEIT, SWIN, EVA, "convnext_atto", CAIT])
def test_logits_of_rectangles_equal_timms(name: str, tmp_path: Path) -> None:
    """With weights that were trained on squares; CaiT's, which timm cannot resize, on images of the same shape."""
    size, trained = (224, 448), (224, 448) if name == CAIT else 224
    file = saved(model_of(name, trained), trained, tmp_path / "a.safetensors")
    ours = model_of(name, size)
    load_pretrained(ours, str(file), name)
    arguments = {} if name == "convnext_atto" else {"img_size": size}
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file), "num_classes": 5}}
    theirs = timm.create_model(name, num_classes=5, **arguments, **own)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.eval()(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("trained", "now"),
    [(SAME_PATCHES, SAME_PATCHES[::-1]), (SAME_PATCHES, 224), ((224, 448), 448), (None, SAME_PATCHES)],
)
@pytest.mark.parametrize("name", [VIT, DEIT])
def test_positions_are_resized_between_shapes(
    name: str, trained: ImageSize | None, now: ImageSize, tmp_path: Path
) -> None:
    ours, expected = positions(name, trained, now, tmp_path / "a.safetensors")
    assert torch.equal(ours, expected)


def test_positions_of_npz_files_are_resized_to_as_many_patches(tmp_path: Path) -> None:
    donor, ours = model_of(VIT, 224, 1), model_of(VIT, SAME_PATCHES, 1)
    np.savez(tmp_path / "a.npz", **augreg(donor))  # pyright: ignore[reportArgumentType]
    said = load_pretrained(ours, str(tmp_path / "a.npz"), VIT)
    assert "pos_embed resized to 7 x 28 patches" in said
    assert torch.equal(ours.pos_embed, resample_abs_pos_embed(donor.pos_embed, [7, 28], [14, 14]))


def test_weights_that_timm_cannot_resize_are_refused_at_as_many_patches(tmp_path: Path) -> None:
    for name in (CAIT, "mixer_s16_224"):
        file = saved(model_of(name, 224), None, tmp_path / f"{name}.safetensors")
        with pytest.raises(UserError, match=r"use the DATA\.IMAGE_SIZE of the weights"):
            load_pretrained(model_of(name, SAME_PATCHES), str(file), name)


def test_a_table_of_a_rectangle_is_not_taken_for_that_of_a_square(tmp_path: Path) -> None:
    size = (80, 208)  # 5 x 13 patches, whose table has 9 x 25 = 15 x 15 distances
    model = model_of(BEIT, size)
    nn.init.normal_(table := model.blocks[0].attn.relative_position_bias_table)
    load_pretrained(ours := model_of(BEIT, size), str(saved(model, size, tmp_path / "a.safetensors")), BEIT)
    assert torch.equal(ours.blocks[0].attn.relative_position_bias_table, table)


@pytest.mark.parametrize(
    ("name", "size", "possible"),
    [
        (VIT, (100, 448), "possible: IMAGE_SIZE [96, 448] or [112, 448], or another PATCH_SIZE"),
        (SWIN, (222, 448), "possible: IMAGE_SIZE [220, 448] or [224, 448], or another PATCH_SIZE"),
        ("maxvit_tiny_tf_224", (100, 300), "[100, 300]: .*; possible: IMAGE_SIZE [96, 288]"),
        ("nest_tiny", (224, 448), "Model only handles square inputs; possible: IMAGE_SIZE 224"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest(name: str, size: ImageSize, possible: str) -> None:
    with pytest.raises(UserError, match=possible.replace("[", r"\[")):
        check_model(ModelConfig(NAME=name), size, 3)


@pytest.mark.parametrize("text", ["32,64", "32x64", "[32, 64]", "(32, 64)"])
def test_sizes_are_read_as_people_write_them(text: str) -> None:
    data = load_config(None, words={"DATA.IMAGE_SIZE": text}).config.DATA
    assert data.IMAGE_SIZE == (32, 64)
    assert load_config(None, words={"DATA.IMAGE_SIZE": text.replace("64", "32")}).config.DATA.IMAGE_SIZE == 32


@pytest.mark.parametrize("text", ["1,2,3", "0,64", "64,x", "auto,64"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"expected whole number >= 1, \[height, width\] or auto, got"):
        load_config(None, words={"DATA.IMAGE_SIZE": text})
