"""Saved settings load back equal, show their sources, and can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.config import Config, Loaded, config_hash, differences, format_config, load_config, to_yaml
from utils.config.keys import settings

UNUSUAL = {
    "DATA.IMAGENET_MEAN": "[0.1, 0.2, 0.3]",
    "DATA.CROP_RATIO": "[0.1, 3.3333333333333335]",
    "TRAIN.BASE_LR": "1.2345678901234567e-07",
    "TRAIN.NUM_EPOCHS": "3",
    "TRAIN.OPTIMIZER.BETAS": "(0.8, 0.95)",
    "TRAIN.LR_SCHEDULER.MILESTONES": "1, 2",
    "TRAIN.LINEAR_SCALED_LR": "true",
    "TRAIN.CUTMIX_MINMAX": "[0.2, 0.8]",
    "MODEL.NUM_HEADS": "[3, 6]",
    "AMP": "true",
    "AMP.CUSTOM_WHITE_LIST": "[softmax]",
    "AMP.FP32_MODULES": "blocks.11.*",
    "MAX_TIME": "12:00:00",
}
TRICKY_TEXT = [
    "007",
    "1e5",
    "0x1F",
    "yes",
    "# no comment",
    "a: b",
    "- x",
    "[a",
    "ä → 日本 🙂",
    "two\nlines",
    " x ",
    "'q' \"Q\"",
    "&a",
]


def through_a_file(config: Config, folder: Path) -> Loaded:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return load_config(str(path))


def test_saved_settings_load_back_equal(tmp_path: Path) -> None:
    config = load_config(None, None, UNUSUAL).config
    again = through_a_file(config, tmp_path).config
    assert again == config
    assert differences(config, again) == []
    assert config_hash(config) == config_hash(again)
    assert to_yaml(again) == to_yaml(config)


def test_saved_defaults_load_back_equal_without_notes(tmp_path: Path) -> None:
    loaded = through_a_file(Config(), tmp_path)
    assert loaded.config == Config()
    assert config_hash(loaded.config) == config_hash(Config())
    assert loaded.notes == ()
    assert "default" not in loaded.sources.values()


@pytest.mark.parametrize("text", TRICKY_TEXT)
def test_any_text_loads_back_equal(tmp_path: Path, text: str) -> None:
    config = load_config(None, {"TAG": (text, "-tag")}).config
    assert text == config.TAG
    assert through_a_file(config, tmp_path).config == config
    assert to_yaml(config).count("\n") == to_yaml(Config()).count("\n")


def test_saved_settings_include_those_of_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("SEED: 9\n")
    (tmp_path / "run.yaml").write_text("BASE: [base.yaml]\n")
    config = load_config(str(tmp_path / "run.yaml")).config
    (tmp_path / "elsewhere").mkdir()
    assert through_a_file(config, tmp_path / "elsewhere").config.SEED == 9


def test_every_setting_is_shown_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("TRAIN:\n  BASE_LR: 1e-3\n")
    flags = {"DATA.BATCH_SIZE": ("8", "-batch_size")}
    loaded = load_config(str(path), flags, {"TAG": "two words"})
    shown = format_config(loaded)
    lines = [line.split() for line in shown.splitlines()]
    assert ["BASE_LR:", "0.001", "#", f"{path}:2"] in lines
    assert ["BATCH_SIZE:", "8", "#", "-batch_size"] in lines
    assert ["TAG:", "two", "words", "#", "command", "line"] in lines
    assert ["SEED:", "0", "#", "default"] in lines
    assert sum("#" in line for line in lines) == len(settings())
    path.write_text(shown)
    assert load_config(str(path)).config == loaded.config
    words = {"DATA.DATA_PATH": "https://me:secret@example.org/a.tar"}
    assert "DATA_PATH: https://***@example.org/a.tar " in format_config(load_config(str(path), None, words))


def test_differences_name_key_and_both_values() -> None:
    old = Config()
    new = load_config(None, None, {"TRAIN.BASE_LR": "1e-3", "TRAIN.OPTIMIZER.BETAS": "[0.9, 0.98]", "AMP": "on"}).config
    assert differences(old, new) == [
        "TRAIN.BASE_LR: 0.003 -> 0.001",
        "TRAIN.OPTIMIZER.BETAS: null -> [0.9, 0.98]",
        "AMP.ENABLED: false -> true",
    ]
    assert config_hash(old) != config_hash(new)


@pytest.mark.parametrize(
    ("before", "now", "shown"), [("null", 16, False), ("8", 16, False), ("null", 4, True), ("4", 16, True)]
)
def test_batch_of_validation_that_follows_the_batch_is_no_change_of_its_own(before: str, now: int, shown: bool) -> None:
    old = load_config(None, words={"DATA.BATCH_SIZE": "8", "DATA.BATCH_SIZE_EVAL": before}).config
    new = load_config(None, words={"DATA.BATCH_SIZE": "16", "DATA.BATCH_SIZE_EVAL": str(now)}).config
    assert differences(old, new) == [
        "DATA.BATCH_SIZE: 8 -> 16",
        *[f"DATA.BATCH_SIZE_EVAL: {before} -> {now}"] * shown,
    ]
