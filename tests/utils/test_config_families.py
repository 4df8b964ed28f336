"""MODEL.TYPE chooses the defaults of settings that are not set, as each of PaddleViT's models has a config.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT
from utils.config import Loaded, format_config, load_config
from utils.config.keys import default_of, settings, value_of
from utils.errors import UserError

# BR-IDL/PaddleViT 5ac7d89d4fd0e3235d055ff15d5b1b1315499d70, image_classification/{ViT,DeiT,SwinTransformer}/config.py;
# CROP_SCALE is that of their datasets.py. Where theirs has no such key, the value is "off" here.
# Those that differ from ViT's defaults; ViT's are in tests/cli/test_defaults.py.
BOTH: dict[str, Any] = {
    "DATA.IMAGENET_MEAN": (0.485, 0.456, 0.406),
    "DATA.IMAGENET_STD": (0.229, 0.224, 0.225),
    "DATA.CROP_SCALE": (0.08, 1.0),
    "TRAIN.SMOOTHING": 0.1,
    "TRAIN.COLOR_JITTER": 0.4,
    "TRAIN.RAND_AUGMENT": True,
    "TRAIN.MIXUP_ALPHA": 0.8,
    "TRAIN.CUTMIX_ALPHA": 1.0,
    "TRAIN.RANDOM_ERASE_PROB": 0.25,
    "TRAIN.WEIGHT_DECAY": 0.05,
    "TRAIN.BASE_LR": 5e-4,
    "TRAIN.LINEAR_SCALED_LR": 512,
}
PADDLEVIT: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {**BOTH, "MODEL.NAME": "deit_base_patch16_224", "TRAIN.WARMUP_EPOCHS": 5, "TRAIN.MODEL_EMA": True},
    "swin": {
        **BOTH,
        "DATA.CROP_PCT": 0.9,
        "MODEL.NAME": "swin_tiny_patch4_window7_224",
        "MODEL.DROPPATH": 0.1,
        "TRAIN.WARMUP_EPOCHS": 20,
        "TRAIN.WARMUP_START_LR": 5e-7,
        "TRAIN.END_LR": 5e-6,
        "TRAIN.GRAD_CLIP": 5.0,
    },
}


def given(*, cfg: Path | None = None, **words: str) -> Loaded:
    return load_config(str(cfg) if cfg else None, words={key.replace("__", "."): value for key, value in words.items()})


@pytest.mark.parametrize("family", PADDLEVIT)
def test_family_has_paddlevits_defaults(family: str) -> None:
    loaded = given(MODEL__TYPE=family)
    expected = PADDLEVIT[family]
    changed = {key for key in settings() if value_of(loaded.config, key) != default_of(key)}
    assert {key: value_of(loaded.config, key) for key in changed - {"MODEL.TYPE"}} == expected
    assert {key for key, source in loaded.sources.items() if source == f"default ({family})"} == set(expected)


@pytest.mark.parametrize(
    ("family", "name", "numbers"),
    [
        ("mae", "vit_base_patch16_224", {"SAVE_FREQ": 1, "REPORT_FREQ": 100, "VALIDATE_FREQ": 100, "SEED": 0}),
        ("mobileone", "mobileone_s0", {"SAVE_FREQ": 1, "REPORT_FREQ": 20, "VALIDATE_FREQ": 1, "SEED": 0}),
        ("mobilevit", "mobilevit_s", {"SAVE_FREQ": 10, "REPORT_FREQ": 20, "VALIDATE_FREQ": 1, "SEED": 0}),
        ("levit", "levit_128", {"SAVE_FREQ": 10, "REPORT_FREQ": 20, "VALIDATE_FREQ": 1, "SEED": 42}),
    ],
)
def test_frequencies_and_seed_are_paddlevits(family: str, name: str, numbers: dict[str, int]) -> None:
    config = given(MODEL__TYPE=family, MODEL__NAME=name).config
    assert {key: value_of(config, key) for key in numbers} == numbers
    layers, magnitude = config.TRAIN.RAND_AUGMENT_LAYERS, config.TRAIN.RAND_AUGMENT_MAGNITUDE
    assert (layers, magnitude) == ((9, 5) if family == "mae" else (2, 9))


@pytest.mark.parametrize("word", ["resnet", "EfficientNet", "vit"])
def test_other_types_have_the_defaults_of_vit(word: str) -> None:
    loaded = given(MODEL__TYPE=word, SEED="1")
    assert set(loaded.sources.values()) == {"default", "command line"}
    assert loaded.config.TRAIN.BASE_LR == 3e-3
    assert loaded.notes == ()


def test_type_is_read_from_every_layer(tmp_path: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "file.yaml"
    base.write_text("MODEL: {TYPE: Swin}\nTRAIN: {WEIGHT_DECAY: 0.2}\n")
    file.write_text("BASE: [base.yaml]\nTRAIN: {END_LR: 0.0}\n")
    train = given(cfg=file).config.TRAIN
    assert (train.GRAD_CLIP, train.WEIGHT_DECAY, train.END_LR) == (5.0, 0.2, 0.0)
    file.write_text("BASE: [base.yaml]\nMODEL: {TYPE: deit}\n")
    assert given(cfg=file).config.TRAIN.GRAD_CLIP is None
    assert given(cfg=file).config.TRAIN.MODEL_EMA is True
    assert given(cfg=file, MODEL__TYPE="vit").config.TRAIN.MODEL_EMA is False
    assert given(cfg=file, MODEL__TYPE="vit").config.TRAIN.WEIGHT_DECAY == 0.2


def test_swin_file_of_paddlevit_gets_its_family_defaults(tmp_path: Path) -> None:
    """It sets sizes, DROPPATH and CROP_PCT; everything else is a default of its family."""
    file = tmp_path / "swin_base.yaml"
    sizes = "EMBED_DIM: 128\n  STAGE_DEPTHS: [2, 2, 18, 2]\n  NUM_HEADS: [4, 8, 16, 32]\n  WINDOW_SIZE: 7\n"
    name = "swin_base_patch4_window7_224"
    file.write_text(f"DATA: {{CROP_PCT: 0.9}}\nMODEL:\n  TYPE: swin\n  NAME: {name}\n  DROPPATH: 0.5\n  {sizes}")
    loaded = given(cfg=file)
    expected = PADDLEVIT["swin"] | {"MODEL.NAME": name, "MODEL.DROPPATH": 0.5}
    assert {key: value_of(loaded.config, key) for key in expected} == expected
    (note,) = loaded.notes
    assert note.startswith(f"MODEL.TYPE swin ({file}:3): defaults of this family: DATA.IMAGENET_MEAN [0.485, 0.456")
    assert "TRAIN.BASE_LR 0.0005" in note
    assert "DROPPATH" not in note
    assert loaded.warnings == ()
    (line,) = [line for line in format_config(loaded).splitlines() if "WARMUP_START_LR" in line]
    assert line.endswith("# default (swin)")


def test_deit_without_a_teacher_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "deit.yaml"
    file.write_text("MODEL: {TYPE: deit}\n")
    assert "TRAIN.DISTILLATION_TYPE is not set, so there is no teacher" in given(cfg=file).notes[1]
    file.write_text("MODEL: {TYPE: deit}\nTRAIN: {DISTILLATION_TYPE: 'none'}\n")
    assert len(given(cfg=file).notes) == 1


def test_grey_images_keep_the_mean_of_vit() -> None:
    loaded = given(MODEL__TYPE="swin", DATA__IMAGE_CHANNELS="1")
    assert loaded.config.DATA.IMAGENET_MEAN == (0.5, 0.5, 0.5)
    assert loaded.sources["DATA.IMAGENET_STD"] == "default"


def test_conflict_with_a_family_default_names_it() -> None:
    with pytest.raises(UserError, match=r"choose one of them \(TRAIN.RAND_AUGMENT: default \(deit\)\)"):
        given(MODEL__TYPE="deit", TRAIN__AUGMENT="trivial")
    notes = given(MODEL__TYPE="swin", TRAIN__AUTO_AUGMENT="true").notes
    assert notes[-1].endswith("AUTO_AUGMENT has no effect with TRAIN.RAND_AUGMENT (TRAIN.RAND_AUGMENT: default (swin))")


PAPERS = {
    "swin_tiny_patch4_window7_224": PADDLEVIT["swin"] | {"DATA.BATCH_SIZE": 128, "MODEL.DROPPATH": 0.2},
    "swin_small_patch4_window7_224": PADDLEVIT["swin"] | {"DATA.BATCH_SIZE": 128, "MODEL.DROPPATH": 0.3},
    "swin_base_patch4_window7_224": PADDLEVIT["swin"] | {"DATA.BATCH_SIZE": 128, "MODEL.DROPPATH": 0.5},
    **{
        f"deit_{size}_patch16_224": PADDLEVIT["deit"]
        | {"MODEL.DROPPATH": 0.1, "TRAIN.END_LR": 1e-5, "DATA.REPEATED_AUGMENT": 3, "TRAIN.DISTILLATION_TYPE": kind}
        for size, kind in (("tiny", None), ("small", None), ("base", None), ("base_distilled", "hard"))
    },
}


@pytest.mark.parametrize("name", PAPERS)
def test_recipe_has_the_settings_of_the_paper(name: str) -> None:
    loaded = given(cfg=ROOT / f"configs/{name}.yaml")
    expected = PAPERS[name] | {"MODEL.NAME": name}
    assert {key: value_of(loaded.config, key) for key in expected} == expected
    assert loaded.warnings == ()
