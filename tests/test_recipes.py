"""Every recipe loads, says how it is run, and builds the model its name promises."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.lint import for_each
from utils.config import Config, ModelConfig, load_config
from utils.config.kinds import AUTO

if TYPE_CHECKING:
    from torch import nn

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("_"))
SHOWN_LESS = {f"vit_digits_16{how}" for how in ("", "_drop25", "_drop50", "_growing")}
OWN_SIZES = {
    "vit_digits",
    "vit_cifar10",
    "vit_cifar10_small",
    "vit_synthetic",
    "fleet_amp",
    "paddle_amp",
    "vit_digits_distilled",
    "small_images",
    "mae_small_images",
    "mae_vit_base",
    "mae_vit_large",
    *SHOWN_LESS,
}
TIMM_SIZES = [name for name in RECIPES if name not in OWN_SIZES]

# Width, depth and heads of the ViT paper's sizes (Ti is AugReg's); patch and image size stand in the name.
WIDTHS = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
PADDLEVIT_SIZES = [
    "vit_tiny_patch16",
    *(f"vit_{size}_patch{patch}" for size in ("small", "base", "large") for patch in (16, 32)),
]
VITS = [f"{name}_{side}" for name in PADDLEVIT_SIZES for side in (224, 384)] + ["vit_huge_patch14_224"]


def header(name: str) -> str:
    """The comment that opens a recipe."""
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def settings(name: str) -> Config:
    return load_config(str(CONFIGS / f"{name}.yaml")).config


@for_each(RECIPES)
def test_the_command_line_in_a_recipe_names_that_recipe(name: str) -> None:
    line = re.search(r"Run:\s*(.+)", header(name))
    assert line is not None
    words = shlex.split(line[1])
    assert words[0] == "python"
    assert words[1] in {"main_single_gpu.py", "main_multi_gpu.py"}
    assert words[words.index("-cfg") + 1] == f"configs/{name}.yaml"
    assert "-amp" in words
    loaded = load_config(str(CONFIGS / f"{name}.yaml"))
    files = loaded.config.DATA.DATASET in {"imagenet2012", "cifar10", "caltech101", "caltech256"}
    assert ("-data_path" in words) == files
    assert not [line for line in (*loaded.notes, *loaded.warnings) if "no effect" in line or "too high" in line]


def test_the_list_of_recipes_is_complete() -> None:
    text = (CONFIGS.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(\.\./configs/(\w+)\.yaml\)", text)) == RECIPES


@for_each(VITS)
def test_a_vit_has_the_sizes_its_name_says_and_trains_as_its_kind_does(name: str) -> None:
    found = re.fullmatch(r"vit_(\w+)_patch(\d+)_(\d+)", name)
    assert found is not None
    width, depth, heads = WIDTHS[found[1]]
    model = settings(name).MODEL.model_dump(exclude_none=True)
    sizes = {"PATCH_SIZE": int(found[2]), "EMBED_DIM": width, "DEPTH": depth, "NUM_HEADS": heads}
    expected = {"TYPE": "vit", "NAME": name, "NUM_CLASSES": 1000, **sizes, "MLP_RATIO": 4.0, "QKV_BIAS": True}
    assert {key: model.get(key) for key in expected} == expected
    assert int(found[3]) == settings(name).DATA.IMAGE_SIZE
    train = settings(name).TRAIN
    scratch, tuning = (300, 3e-3, 0.3, "AdamW", 1.0), (8, 0.01, 0.0, "SGD", 1.0)
    rates = (train.NUM_EPOCHS, train.BASE_LR, train.WEIGHT_DECAY, train.OPTIMIZER.NAME, train.GRAD_CLIP)
    assert rates == (tuning if found[3] == "384" else scratch)


@pytest.mark.slow
@for_each(TIMM_SIZES)
def test_a_recipe_builds_timms_model_of_its_name(name: str) -> None:
    import timm
    import torch

    ours, parameters = built(name)
    model = settings(name).MODEL
    named = name.startswith(("caltech", "finetune", "linear_probe"))
    timms = model.NAME if named else name
    with torch.device("meta"):
        # Some of timm's names stand for weights without a classifier: the number of classes has to be said.
        theirs = timm.create_model(timms, num_classes=classes_of(model) if named else 1000)
    assert ours == shapes(theirs)
    assert f"{parameters:,} parameters" in header(name)


def test_linear_probe_minimises_plain_cross_entropy() -> None:
    train = settings("linear_probe_vit_base").TRAIN
    assert {train.SMOOTHING, train.WEIGHT_DECAY, train.MIXUP_ALPHA, train.CUTMIX_ALPHA} == {0.0}


def test_four_precisions_of_one_training_differ_in_their_amp_lines_only() -> None:
    names = [f"caltech101_vit_{how}" for how in ("fp32", "torch_amp", "naive", "apex_o1")]
    written = [yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")) for name in names]
    loaded = [settings(name).model_dump() for name in names]
    assert len({str(one.pop("AMP")) for one in written}) == 4
    assert len({str(one.pop("AMP")) for one in loaded}) == 4
    assert all(one == written[0] for one in written)
    assert all(one == loaded[0] for one in loaded)


@pytest.mark.slow
@for_each(RECIPES)
def test_the_list_of_recipes_has_the_right_parameter_counts(name: str) -> None:
    text = (CONFIGS.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"[`{name}`](../configs/{name}.yaml) | {built(name)[1]:,} |" in text


@cache
def built(name: str) -> tuple[dict[str, tuple[int, ...]], int]:
    """Names and shapes in the state dict of a recipe's model, and its number of parameters.

    `auto` is 1000 classes, images of 48x48 and patches of 6x6.
    """
    import torch

    from models.build import build_model
    from models.parts import count_parameters

    config = settings(name)
    with torch.device("meta"):
        patch = 6 if config.MODEL.PATCH_SIZE == AUTO else config.MODEL.PATCH_SIZE
        sized = config.MODEL.changed(NUM_CLASSES=classes_of(config.MODEL), PATCH_SIZE=patch)
        side = 48 if config.DATA.IMAGE_SIZE == AUTO else config.DATA.IMAGE_SIZE
        model = build_model(sized, side, config.DATA.IMAGE_CHANNELS)
    return shapes(model), count_parameters(model)[0]


def classes_of(model: ModelConfig) -> int:
    return 1000 if model.NUM_CLASSES == AUTO else model.NUM_CLASSES


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}
