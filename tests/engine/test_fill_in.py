"""Settings that the data and the weights give, where the user set none."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data.config import resolve_data_config

from engine.inputs.batches import Inputs
from engine.preflight import fill_in
from models.build import sizes_in
from tests.program import save_image
from utils.config import Loaded, load_config
from utils.errors import UserError
from vitamp.sizes import ImageSize

DEIT = "deit_small_patch16_224.fb_in1k"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resolved(**words: str) -> Loaded:
    words = {"DATA.DATASET": "digits"} | {key.replace("__", "."): value for key, value in words.items()}
    return fill_in(load_config(None, words=words))


def test_a_name_of_timm_brings_its_preprocessing() -> None:
    loaded = resolved(MODEL__PRETRAINED=DEIT)
    data = loaded.config.DATA
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD, data.CROP_PCT, data.IMAGE_SIZE) == (MEAN, STD, 0.9, 224)
    assert loaded.sources["DATA.CROP_PCT"] == f"timm's {DEIT}"
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(Inputs(data)(pixels), expected, atol=1e-6)


def test_a_recipe_takes_the_weights_of_the_model_that_is_named(tmp_path: Path) -> None:
    """Unless weights are named, too, or the recipe's are of this model."""
    (tmp_path / "recipe.yaml").write_text(f"MODEL: {{PRETRAINED: {DEIT}}}\nDATA: {{DATASET: digits}}\n")

    def found(**words: str) -> Loaded:
        return fill_in(load_config(str(tmp_path / "recipe.yaml"), words={f"MODEL.{key}": words[key] for key in words}))

    other = found(NAME="resnet18")
    assert other.config.MODEL.PRETRAINED == "resnet18.a1_in1k"
    note = f"MODEL.PRETRAINED resnet18.a1_in1k: timm's own weights of MODEL.NAME, in place of the recipe's {DEIT}"
    assert note in other.notes
    assert found(NAME="deit_small_patch16_224").config.MODEL.PRETRAINED == DEIT
    assert found(NAME="resnet18", PRETRAINED=DEIT).config.MODEL.PRETRAINED == DEIT


def test_a_set_value_is_kept_with_one_warning() -> None:
    words = {"MODEL__PRETRAINED": DEIT, "DATA__IMAGENET_MEAN": "0.5", "DATA__CROP_PCT": "1", "DATA__IMAGE_SIZE": "192"}
    loaded = resolved(**words)
    data = loaded.config.DATA
    assert (data.IMAGENET_MEAN, data.CROP_PCT, data.IMAGE_SIZE) == ((0.5,), 1.0, 192)
    (warning,) = loaded.warnings
    assert "DATA.IMAGENET_MEAN [0.5] in place of [0.485, 0.456, 0.406] (command line)" in warning
    assert "DATA.CROP_PCT 1.0 in place of 0.9 (command line)" in warning
    assert f"other preprocessing than that of timm's {DEIT} may cost accuracy" in warning
    assert f"DATA.IMAGE_SIZE 192 in place of 224 (command line), the size of timm's {DEIT}" in loaded.notes
    equal = resolved(MODEL__PRETRAINED="vit_base_patch16_224.augreg_in21k", DATA__IMAGENET_MEAN="0.5")
    assert not equal.warnings


OF_MODEL = {
    "tf_efficientnet_lite0": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", 0.875, "center"),
    "resnet18": (MEAN, STD, "bicubic", 0.95, "center"),
    "vit_tiny_patch16_224": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", 0.9, "center"),
}
INPUTS = ("IMAGENET_MEAN", "IMAGENET_STD", "INTERPOLATION", "CROP_PCT", "CROP_MODE")


def of_recipe(cfg: str | Path, weights: Path, **words: str) -> Loaded:
    """An evaluation of these weights by this recipe."""
    save_file({"a": torch.zeros(1)}, weights)
    given = {"DATA__DATASET": "digits", "EVAL": "true", "MODEL__PRETRAINED": f"{weights}", **words}
    return fill_in(load_config(str(cfg), words={key.replace("__", "."): value for key, value in given.items()}))


@pytest.mark.parametrize("name", OF_MODEL)
@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        ("resnet50", True),
        ("vit_base_patch16_224", True),
        ("small_images", True),
        ("vit_digits", True),
        ("finetune", False),
        ("swin_tiny_patch4_window7_224", False),
    ],
)
def test_another_models_weights_bring_their_preprocessing(tmp_path: Path, recipe: str, own: bool, name: str) -> None:
    """`own`: the recipe has preprocessing of its own, which is for its model."""
    file = tmp_path / "mine.safetensors"
    loaded = of_recipe(recipe, file, MODEL__NAME=name)
    data = loaded.config.DATA
    mean, std, *others = OF_MODEL[name]
    if data.IMAGE_CHANNELS == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)
    assert [getattr(data, key) for key in INPUTS] == [mean, std, *others]
    where = f"timm's {name} (MODEL.NAME; {file} does not say its own)"
    assert {loaded.sources[f"DATA.{key}"] for key in INPUTS} == {where}
    (line,) = [note for note in loaded.notes if note.startswith(f"Preprocessing of {where}")]
    assert bool(re.search(r"That of configs/\w+\.yaml:\d+, for \w+, is not used", line)) == own
    assert "may cost accuracy" not in "\n".join((*loaded.notes, *loaded.warnings))


def test_preprocessing_of_a_recipe_counts_for_its_own_model_and_for_unknown_weights(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    same = of_recipe("resnet50", file, MODEL__NAME="resnet50")
    assert (same.config.DATA.INTERPOLATION, same.config.DATA.CROP_PCT) == ("bilinear", 0.875)
    (line,) = [note for note in same.notes if "may cost accuracy" in note]
    assert re.search(r"INTERPOLATION bilinear in place of bicubic \(configs/resnet50.yaml:\d+\)", line)
    assert not same.warnings
    unknown = of_recipe("small_images", file, MODEL__NAME="mine", DATA__IMAGE_SIZE="32")
    assert unknown.config.DATA.CROP_PCT == 1.0
    assert any("is unknown; this run uses DATA.IMAGE_SIZE 32, DATA.CROP_PCT 1.0" in one for one in unknown.warnings)
    scratch = fill_in(load_config("resnet50", words={"DATA.DATASET": "digits", "MODEL.NAME": "tf_efficientnet_lite0"}))
    assert scratch.config.DATA.IMAGENET_MEAN == MEAN, "without weights, the recipe's"


def test_a_file_of_the_users_own_counts_but_not_the_recipe_below_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    base = Path("configs/resnet50.yaml").resolve()
    mine.write_text(f"BASE: [{base}]\nMODEL: {{NAME: tf_efficientnet_lite0}}\nDATA: {{CROP_PCT: 1.0}}\n")
    loaded = of_recipe(mine, tmp_path / "mine.safetensors")
    assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.CROP_PCT) == ((0.5, 0.5, 0.5), 1.0)
    (warning,) = loaded.warnings
    assert f"DATA.CROP_PCT 1.0 in place of 0.875 ({mine}:3)" in warning
    assert "IMAGENET_MEAN" not in warning


def test_grey_images_get_the_mean_of_the_colours_of_another_models_weights(tmp_path: Path) -> None:
    loaded = of_recipe("resnet50", tmp_path / "mine.safetensors", MODEL__NAME="resnet18", DATA__IMAGE_CHANNELS="1")
    (mean,) = loaded.config.DATA.IMAGENET_MEAN
    assert mean == sum(MEAN) / 3


def test_files_bring_what_is_written_in_them_or_beside_them(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1)}
    fields = {"image_size": 64, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.7}
    save_file(tensors, tmp_path / "header.safetensors", metadata={"input": json.dumps(fields)})
    run = tmp_path / "step-1"
    run.mkdir()
    save_file(tensors, run / "model.safetensors")
    (run / "meta.json").write_text(json.dumps({"input": fields}))
    for place in (tmp_path / "header.safetensors", run, run / "model.safetensors"):
        data = resolved(MODEL__PRETRAINED=str(place)).config.DATA
        assert (data.IMAGE_SIZE, data.IMAGENET_MEAN, data.CROP_PCT) == (64, (0.1, 0.2, 0.3), 0.7)
    (run / "meta.json").write_text(json.dumps({"input": {**fields, "crop": "none", "crop_mode": "center"}}))
    data = resolved(MODEL__PRETRAINED=str(run)).config.DATA
    assert (data.CROP_MODE, data.CROP_PCT) == ("squash", 1.0), "its run squeezed whole images"
    save_file(tensors, tmp_path / f"{DEIT}.safetensors")
    assert resolved(MODEL__PRETRAINED=str(tmp_path / f"{DEIT}.safetensors")).config.DATA.IMAGENET_MEAN == MEAN


@pytest.mark.parametrize(
    "name", ["tf_efficientnet_lite0", "resnet50", "vit_base_patch16_224", "convnext_tiny", "tf_efficientnet_b0_ns"]
)
def test_weights_that_say_nothing_get_the_preprocessing_of_timms_model(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    loaded = resolved(MODEL__PRETRAINED=str(file), MODEL__NAME=name, EVAL="true", MODEL__TYPE=name.partition("_")[0])
    cfg, data = timm.get_pretrained_cfg(name.replace("_ns", ".ns_jft_in1k")), loaded.config.DATA
    assert cfg is not None
    theirs = resolve_data_config({"model": name}, cfg.to_dict())
    assert (theirs["mean"], theirs["std"]) == (data.IMAGENET_MEAN, data.IMAGENET_STD)
    assert (theirs["crop_pct"], theirs["crop_mode"]) == (data.CROP_PCT, data.CROP_MODE)
    assert (theirs["interpolation"], theirs["input_size"][1]) == (data.INTERPOLATION, data.IMAGE_SIZE)
    assert f"Preprocessing of timm's {name} (MODEL.NAME; {file} does not say its own)" in "\n".join(loaded.notes)
    assert not loaded.warnings


def test_weights_of_a_sibling_with_another_mean_get_one_line(tmp_path: Path) -> None:
    mine, tf = (tmp_path / f"{name}.safetensors" for name in ("mine", "tf_efficientnet_lite0"))
    for file in (mine, tf):
        save_file({"a": torch.zeros(1)}, file)
    at = {"EVAL": "true", "MODEL__TYPE": "efficientnet"}
    unsure = resolved(MODEL__PRETRAINED=str(mine), MODEL__NAME="efficientnet_lite0", **at)
    weights = "tf_efficientnet_lite0.in1k"
    line = f"If the weights are of {weights}, add -model {weights}, for another mean and std"
    assert line in unsure.notes
    sized = resolved(MODEL__PRETRAINED=str(mine), MODEL__NAME="efficientnet_lite0", DATA__IMAGE_SIZE="32", **at).notes
    assert "DATA.IMAGE_SIZE 32 in place of 224 (command line), the size of timm's efficientnet_lite0" in sized
    assert "\n".join(sized).count("does not say its own") == 1
    sure = resolved(MODEL__PRETRAINED=str(mine), MODEL__NAME=weights, **at)
    assert sure.config.DATA.IMAGENET_MEAN == (0.5, 0.5, 0.5)
    assert "If the weights are" not in "\n".join(sure.notes)
    said = resolved(MODEL__PRETRAINED=str(tf), MODEL__NAME="efficientnet_lite0", **at).notes
    assert "weights of tf_efficientnet_lite0 need another mean and std than efficientnet_lite0's" in "\n".join(said)
    same = resolved(MODEL__PRETRAINED=str(tf), MODEL__NAME="tf_efficientnet_lite0", **at)
    assert "another mean" not in "\n".join(same.notes)


def test_weights_of_a_model_unknown_to_timm_are_warned_of_in_evaluation_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    sizes = {"MODEL__NAME": "mine", "MODEL__EMBED_DIM": "64", "MODEL__NUM_HEADS": "2"}
    for evaluated in ("true", "false"):
        said = resolved(MODEL__PRETRAINED=str(file), EVAL=evaluated, **sizes).warnings
        words = "mine.safetensors: the preprocessing of its training images is unknown; this run uses DATA.IMAGE_SIZE"
        assert any(words in warning for warning in said)


def test_damaged_preprocessing_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "meta.json").write_text('{"input": {"mean": "grey"}}')
    with pytest.raises(UserError, match=r"meta\.json: damaged, mean"):
        resolved(MODEL__PRETRAINED=str(tmp_path))
    (tmp_path / "meta.json").write_text('{"input": {"mean": [0.1, 0.2]}}')
    with pytest.raises(UserError, match=r"meta\.json: DATA\.IMAGENET_MEAN: \[0\.1, 0\.2\] has 2 numbers"):
        resolved(MODEL__PRETRAINED=str(tmp_path))


def of_images(folder: Path, *sizes: tuple[int, int], **words: str) -> Loaded:
    """Image size and patch size `auto`, for two classes of images of these sizes."""
    for number, size in enumerate(2 * sizes):
        for label in range(2):
            save_image(folder / "images" / f"class_{label}" / f"{number}.png", seed=number, size=size)
    auto = {"DATA.IMAGE_SIZE": "auto", "MODEL.PATCH_SIZE": "auto", "DATA.DATA_PATH": str(folder / "images")}
    return fill_in(load_config(None, words=auto | {key.replace("__", "."): value for key, value in words.items()}))


def sizes_of(loaded: Loaded) -> tuple[ImageSize, int | None]:
    return loaded.config.DATA.IMAGE_SIZE, loaded.config.MODEL.PATCH_SIZE


@pytest.mark.parametrize(
    ("side", "size", "patch"), [(20, 32, 4), (37, 40, 5), (45, 48, 6), (64, 64, 8), (90, 88, 8), (95, 96, 8)]
)
def test_auto_sizes_are_those_of_the_images(tmp_path: Path, side: int, size: int, patch: int) -> None:
    loaded = of_images(tmp_path, (side, side + 30))
    assert sizes_of(loaded) == (size, patch)
    said = "\n".join(loaded.notes)
    assert f"DATA.IMAGE_SIZE {size}: the median image of imagefolder" in said
    assert f"has {side} pixels (shorter side)" in said
    assert f"MODEL.PATCH_SIZE {patch}: {size // patch} x {size // patch} patches" in said


def test_auto_image_size_is_a_median_a_multiple_of_the_patch_and_at_most_96(tmp_path: Path) -> None:
    one_large = of_images(tmp_path / "a", (32, 32), (34, 33), (900, 900))
    assert sizes_of(one_large) == (32, 4)
    assert sizes_of(of_images(tmp_path / "b", (50, 50), MODEL__PATCH_SIZE="7")) == (49, 7)
    assert sizes_of(of_images(tmp_path / "c", (50, 50), MODEL__PATCH_SIZE="null")) == (48, None), "of a timm model"
    large = of_images(tmp_path / "d", (300, 200))
    assert sizes_of(large) == (96, 8)
    assert "auto chooses at most 96" in "\n".join(large.notes)


def test_a_given_image_size_gets_a_patch_that_divides_it(tmp_path: Path) -> None:
    assert sizes_of(of_images(tmp_path, (48, 48), DATA__IMAGE_SIZE="28")) == (28, 4)
    with pytest.raises(UserError, match=r"PATCH_SIZE auto: no patch of 4 to 8 .* 37\. .* -image_size 40"):
        of_images(tmp_path, (48, 48), DATA__IMAGE_SIZE="37")


def test_auto_image_size_is_that_of_pretrained_weights(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", metadata={"input": json.dumps({"image_size": 64})})
    loaded = of_images(tmp_path, (40, 40), MODEL__PRETRAINED=str(tmp_path / "a.safetensors"))
    assert sizes_of(loaded) == (64, 8)
    growing = {"TRAIN__SIZE_SCHEDULE": "[[0, 32], [0.5, 64]]"}
    assert resolved(MODEL__PRETRAINED=str(tmp_path / "a.safetensors"), **growing).config.DATA.IMAGE_SIZE == 64


def test_a_resumed_run_keeps_its_auto_sizes(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("DATA: {IMAGE_SIZE: 64}\nMODEL: {PATCH_SIZE: 4}\n")
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert sizes_of(of_images(tmp_path, (40, 40), MODEL__RESUME=str(tmp_path / "run"))) == (64, 4)


def test_a_typed_name_that_timm_lacks_is_doubted_beside_the_sizes_of_a_recipe(tiny: Path) -> None:
    said = fill_in(load_config(str(tiny), words={"MODEL.NAME": "vit_tny"})).warnings
    assert "timm has no model vit_tny" in said[-1]
    assert "Did you mean vit_tiny_patch16_224, " in said[-1]
    (known,) = fill_in(load_config(str(tiny), words={"MODEL.NAME": "vit_tiny_patch16_224"})).warnings
    assert "this is not timm's vit_tiny_patch16_224, but a model of the recipe's sizes" in known
    own = dict.fromkeys(re.findall(r"(MODEL\.\w+)=null", known), "null") | {"DATA.IMAGE_SIZE": "224"}
    assert known.endswith(f"add {' '.join(f'{key}=null' for key in list(own)[:-1])} -image_size 224.")
    model = fill_in(load_config(str(tiny), words=own | {"MODEL.NAME": "vit_tiny_patch16_224"})).config.MODEL
    assert sizes_in(model)["EMBED_DIM"] == 192, "timm's model, as the warning promises"
    for words in ({}, {"MODEL.NAME": "vit_tny", "MODEL.DEPTH": "1"}):
        assert fill_in(load_config(str(tiny), words=words)).warnings == (), "whoever types a size means a label"


def test_a_fraction_for_validation_without_effect_is_named(tmp_path: Path) -> None:
    for place in ("train/a/1", "train/b/2", "test/a/3", "test/b/4"):
        save_image(tmp_path / f"{place}.png", seed=1)
    for folder, warned in (("", 1), ("/train", 0)):
        words = {"DATA.DATA_PATH": f"{tmp_path}{folder}", "DATA.VAL_FRACTION": "0.5"}
        said = fill_in(load_config(None, words=words)).warnings
        assert sum("own validation split; DATA.KEEP_TEST=true makes one of train" in one for one in said) == warned
        said = fill_in(load_config(None, words={**words, "DATA.KEEP_TEST": "true"})).warnings
        assert sum(one.startswith("DATA.KEEP_TEST has no effect") for one in said) == 1 - warned
        assert not any("VAL_FRACTION" in one for one in said)
