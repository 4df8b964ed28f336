"""Errors in settings name the place, the key, the value, and what is expected."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from utils.config import load_config
from utils.errors import UserError


def error_of(cfg: Path | str | None = None, **words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(
            None if cfg is None else str(cfg), None, {key.replace("__", "."): text for key, text in words.items()}
        )
    return str(caught.value)


def file_error(folder: Path, text: str) -> str:
    """The error for a file with this content, without the folder's name."""
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return error_of(folder / "run.yaml").replace(f"{folder}/", "")


def test_all_errors_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    lines = file_error(
        tmp_path,
        "DATA:\n  BATCH_SIZE: 0\n  IMAGESIZE: 224\nTRAIN:\n  BASE_LR: fast\n"
        "  OPTIMISER:\n    NAME: SGD\nBATCH_SIZE: 3\n",
    ).splitlines()
    assert lines[0] == "5 settings are wrong:"
    assert sorted(line.strip() for line in lines[1:]) == [
        "run.yaml:2: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 0.",
        "run.yaml:3: unknown key DATA.IMAGESIZE. Did you mean DATA.IMAGE_SIZE?",
        "run.yaml:5: TRAIN.BASE_LR: expected number >= 0, got fast.",
        "run.yaml:6: unknown key TRAIN.OPTIMISER. Did you mean TRAIN.OPTIMIZER?",
        "run.yaml:8: unknown key BATCH_SIZE. Did you mean DATA.BATCH_SIZE?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "LOG_STYLE: flet\n",
            "run.yaml:1: LOG_STYLE: expected auto, paddlevit or fleet, got flet. Did you mean fleet?",
        ),
        ("DATA: {IMAGE_CHANNELS: 2}\n", "run.yaml:1: DATA.IMAGE_CHANNELS: expected 1 or 3, got 2."),
        ("DATA: {BATCH_SIZE: true}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got true."),
        ("DATA: {BATCH_SIZE: 2.5}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 2.5."),
        (
            "DATA:\n  BATCH_SIZE:\n",
            "run.yaml:2: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got no value; leave the key out",
        ),
        ("DATA: {BATCH_SIZE: {A: 1}}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got a section"),
        (
            "MODEL: {NUM_HEADS: [3, x]}\n",
            "MODEL.NUM_HEADS: expected whole number >= 1, list of whole numbers >= 1 or null, got [3, x].",
        ),
        (
            "TRAIN: {OPTIMIZER: {BETAS: (0.9)}}\n",
            "TRAIN.OPTIMIZER.BETAS: expected list of two numbers or null, got (0.9).",
        ),
        ("TRAIN: {WEIGHT_DECAY: .nan}\n", "TRAIN.WEIGHT_DECAY: expected number >= 0, got .nan."),
        ("TRAIN: {WEIGHT_DECAY: nan}\n", "TRAIN.WEIGHT_DECAY: expected number >= 0, got nan."),
        (
            "TRAIN: {LINEAR_SCALED_LR: 0.0}\n",
            "TRAIN.LINEAR_SCALED_LR: expected number > 0, true, false or null, got 0.0.",
        ),
        ("AMP: maybe\n", "run.yaml:1: AMP.ENABLED: expected true or false, got maybe."),
        ("TRAIN: 3\n", "run.yaml:1: TRAIN is a section, not a setting. Its keys: LAST_EPOCH, NUM_EPOCHS,"),
        ("data:\n  batch_size: 3\n", "run.yaml:1: unknown key data. Did you mean DATA?"),
        ("SEED: 1\nSEED: 2\n", "run.yaml:2: SEED was already set in line 1"),
        ("DATA:\n  FLIP: 0\n  FLIP: 0\n", "run.yaml:3: DATA.FLIP was already set in line 2"),
        ("MODEL:\n  DEPTH: 3\n  TRANS: {DEPTH: 4}\n", "run.yaml:3: MODEL.DEPTH is set twice: "),
        ("MODEL: {TRANS: {HYBRID: false}}\n", "run.yaml:1: unknown key MODEL.TRANS.HYBRID."),
        ("MODEL: {TRANS: {MLP_DIM: 3072}}\n", "run.yaml:1: MODEL.MLP_DIM needs MODEL.EMBED_DIM in the same file"),
        ("- a\n- b\n", "run.yaml:1: expected `KEY: value` lines"),
        ("SEED: 1\nTAG: [a\n", "run.yaml:3: not valid YAML: expected ',' or ']'"),
        ("SEED: 1\n---\nSEED: 2\n", "run.yaml:2: not valid YAML: but found another document"),
        ("[1]: 2\n", "run.yaml:1: a key must be a plain word"),
        ("a: &a {}\n<<: *a\n", "run.yaml:2: `<<` is not supported; build on other files with BASE"),
        ("BASE: {a: b}\n", "run.yaml:1: BASE takes a list of files"),
        (
            "TAG: !!python/object/apply:os.system ['exit 1']\n",
            "run.yaml:1: the tag tag:yaml.org,2002:python/object/apply",
        ),
    ],
)
def test_error_in_a_file_is_described(tmp_path: Path, text: str, message: str) -> None:
    assert message in file_error(tmp_path, text)


def test_foreign_type_is_reported_with_its_keys(tmp_path: Path) -> None:
    """A file of a model that vitamp does not build: its keys are no misspelt keys of ours."""
    keys = "MODEL: {TYPE: Sequencer, DEPTH: 24, DEPTH_TOKEN_ONLY: 2}\nDATA: {FMAP_SIZE: 14}\n"
    message = file_error(tmp_path, f"{keys}TRAIN: {{NUM_EPOCH: 3}}\n")
    first, second = [line.strip() for line in message.splitlines()[1:]]
    assert first == (
        "run.yaml:1: MODEL.TYPE sequencer is not one of vit, deit, swin, mae, nor a family of docs/migrating.md. To "
        "train a model of timm instead, set MODEL.NAME (-list_models '*sequencer*' lists names) and leave out "
        "MODEL.DEPTH_TOKEN_ONLY, DATA.FMAP_SIZE"
    )
    assert second == "run.yaml:3: unknown key TRAIN.NUM_EPOCH. Did you mean TRAIN.NUM_EPOCHS?"
    ours = file_error(tmp_path, keys.replace("Sequencer", "ViT"))
    assert "unknown key MODEL.DEPTH_TOKEN_ONLY. Did you mean MODEL.DEPTH?" in ours


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vit_base.yaml").touch()
    assert error_of(tmp_path / "vit_bse.yaml") == (
        f"{tmp_path}/vit_bse.yaml: no such file. Did you mean {tmp_path}/vit_base.yaml?"
    )
    assert "The folder" in error_of(tmp_path / "none/x.yaml")
    assert "is a folder" in error_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"TAG: \xb0\xff\n")
    assert "not a YAML text file in UTF-8" in error_of(tmp_path / "binary.yaml")
    if os.geteuid():
        (tmp_path / "vit_base.yaml").chmod(0)
        assert "cannot be read" in error_of(tmp_path / "vit_base.yaml")


def test_missing_base_is_named(tmp_path: Path) -> None:
    assert file_error(tmp_path, "BASE: [gone.yaml]\n") == "gone.yaml: no such file."


def test_yaml_bombs_are_refused_at_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    start = time.process_time()  # of this process: other programs must not make the test fail
    assert "unknown key a11" in file_error(tmp_path, bomb)
    assert "TRAIN.OPTIMIZER.BETAS" in file_error(tmp_path, "TRAIN: {OPTIMIZER: {BETAS: &a [*a]}}\n")
    assert "nested too deeply" in file_error(tmp_path, "[" * 50_000)
    assert "FLIP" in file_error(tmp_path, f"DATA: {{FLIP: '{'(' * 5000}{')' * 5000}'}}\n")
    assert time.process_time() - start < 5


def test_error_in_key_value_words_is_described() -> None:
    assert error_of(TRAIN__BASELR="1") == "command line: unknown key TRAIN.BASELR. Did you mean TRAIN.BASE_LR?"
    assert error_of(BASE_LR="1") == "command line: unknown key BASE_LR. Did you mean TRAIN.BASE_LR?"
    assert error_of(NAME="x").endswith("unknown key NAME. Did you mean MODEL.NAME?"), "the outermost of several"
    assert "TRAIN is a section" in error_of(TRAIN="3")
    assert "BASE belongs in a YAML file" in error_of(BASE="x.yaml")
    assert "command line: SEED: expected whole number, got x." in error_of(SEED="x")


def test_invalid_flag_that_sets_two_keys_is_reported_once() -> None:
    flags = {"DATA.BATCH_SIZE": ("0", "-batch_size"), "DATA.BATCH_SIZE_EVAL": ("0", "-batch_size")}
    with pytest.raises(UserError) as caught:
        load_config(None, flags)
    assert str(caught.value) == "-batch_size: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 0."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"DATA.IMAGE_SIZE": "225", "MODEL.PATCH_SIZE": "16"},
            "225 is not divisible by MODEL.PATCH_SIZE 16; nearest: 224 or 240",
        ),
        ({"MODEL.EMBED_DIM": "768", "MODEL.NUM_HEADS": "7"}, "7 does not divide MODEL.EMBED_DIM 768; nearest: 6 or 8"),
        ({"DATA.IMAGENET_MEAN": "[1, 2]"}, "DATA.IMAGENET_MEAN: [1.0, 2.0] has 2 numbers"),
        (
            {"DATA.IMAGENET_STD": "[0.1, 0.2, 0.3]", "DATA.IMAGE_CHANNELS": "1"},
            "DATA.IMAGENET_STD: [0.1, 0.2, 0.3] has 3",
        ),
        ({"DATA.IMAGENET_STD": "0"}, "DATA.IMAGENET_STD: [0.0] must be above 0"),
        ({"DATA.CROP_SCALE": "[0.5, 0.2]"}, "DATA.CROP_SCALE: [0.5, 0.2] must be"),
        ({"DATA.CROP_SCALE": "[0, 1]"}, "DATA.CROP_SCALE: [0.0, 1.0] must be"),
        ({"DATA.CROP_SCALE": "[0.5, 1.1]"}, "DATA.CROP_SCALE: [0.5, 1.1] must be"),
        ({"DATA.CROP_RATIO": "[2, 1]"}, "DATA.CROP_RATIO: [2.0, 1.0] must be"),
        (
            {"MODEL.FREEZE": "backbone", "MODEL.UNFREEZE_EPOCH": "3", "TRAIN.NUM_EPOCHS": "2"},
            "MODEL.UNFREEZE_EPOCH: 3 is after the last epoch, TRAIN.NUM_EPOCHS 2; give 2 or less",
        ),
        (
            {"MODEL.FREEZE": "backbone", "MODEL.UNFREEZE_EPOCH": "1"},
            "1 leaves no epoch in which MODEL.FREEZE has an effect; give 2 or more",
        ),
        (
            {"DATA.MULTI_LABEL": "true", "TRAIN.SMOOTHING": "0.1", "TRAIN.BCE_TARGET_THRESH": "0.01"},
            "BCE_TARGET_THRESH: 0.01 makes all targets equal: TRAIN.SMOOTHING 0.1 turns 0 and 1 into 0.05 and 0.95",
        ),
        ({"AMP.DECR_RATIO": "1"}, "AMP.DECR_RATIO: expected number > 0 and < 1, got 1"),
        ({"AMP.DECR_EVERY_N_NAN_OR_INF": "0"}, "AMP.DECR_EVERY_N_NAN_OR_INF: expected whole number >= 1, got 0"),
        ({"TRAIN.TOKEN_DROP": "1"}, "TRAIN.TOKEN_DROP: expected number >= 0 and < 1, got 1"),
        ({"TRAIN.TOKEN_DROP": "-0.1"}, "TRAIN.TOKEN_DROP: expected number >= 0 and < 1, got -0.1"),
        ({"TRAIN.TOKEN_DROP": "0.5", "TRAIN.TOKEN_DROP_TAIL": "300"}, "TRAIN.TOKEN_DROP_TAIL: 300 leaves no epoch"),
        *(
            ({"DATA.IMAGE_SIZE": "64", "MODEL.PATCH_SIZE": "16", "TRAIN.SIZE_SCHEDULE": sizes}, message)
            for sizes, message in (
                ("[[0,40],[0.5,64]]", "TRAIN.SIZE_SCHEDULE: [40]: not divisible by MODEL.PATCH_SIZE 16"),
                ("[[0.1,32],[0.5,64]]", "the first start must be 0"),
                ("[[0,32],[300,64]]", "below TRAIN.NUM_EPOCHS 300"),
                ("[[0,32],[0,64]]", "each later start above the previous one"),
                ("[[0,32]]", "ends with size 32; it must end with DATA.IMAGE_SIZE 64"),
                ("[[0,32,64]]", "list of lists of two numbers"),
                ("32", "list of lists of two numbers"),
            )
        ),
        ({"MAX_TIME": "90"}, "MAX_TIME: 90 is not a time above 0 in the form HH:MM:SS"),
        ({"MAX_TIME": "1:60:00"}, "MAX_TIME: 1:60:00 is not a time"),
        ({"MAX_TIME": "00:00:00"}, "MAX_TIME: 00:00:00 is not a time"),
        ({"TRAIN.LAST_EPOCH": "5", "TRAIN.NUM_EPOCHS": "5"}, "TRAIN.LAST_EPOCH: 5 leaves no epoch"),
        ({"TRAIN.OPTIMIZER.BETAS": "[0.9, 1]"}, "TRAIN.OPTIMIZER.BETAS: [0.9, 1.0] must both be"),
        ({"TRAIN.CUTMIX_MINMAX": "[0.8, 0.2]"}, "TRAIN.CUTMIX_MINMAX: [0.8, 0.2] must be the smallest and the largest"),
        ({"TRAIN.CUTMIX_MINMAX": "[0.2, 1.2]"}, "TRAIN.CUTMIX_MINMAX: [0.2, 1.2] must be"),
        (
            {"TRAIN.CUTMIX_MINMAX": "[0.3, 0.35]", "DATA.IMAGE_SIZE": "8"},
            "at least one pixel apart (DATA.IMAGE_SIZE 8)",
        ),
        (
            {"TRAIN.RAND_AUGMENT_MAGNITUDE": "11"},
            "TRAIN.RAND_AUGMENT_MAGNITUDE: expected number >= 0 and <= 10, got 11",
        ),
    ],
)
def test_conflicting_settings_are_refused(words: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, None, words)
    assert message in str(caught.value)
    assert str(caught.value).startswith("command line: ")


@pytest.mark.parametrize(
    "words",
    [
        {"DATA.IMAGE_CHANNELS": "1"},
        {"DATA.IMAGE_CHANNELS": "1", "DATA.IMAGENET_MEAN": "0.1", "DATA.IMAGENET_STD": "0.3"},
        {"DATA.IMAGENET_MEAN": "0"},
        {"MODEL.EMBED_DIM": "768", "MODEL.NUM_HEADS": "8", "MODEL.ATTN_HEAD_SIZE": "96"},
        {"MODEL.EMBED_DIM": "96", "MODEL.NUM_HEADS": "[3, 6, 12, 24]"},
        {"MAX_TIME": "100:00:00"},
        {"DATA.BATCH_SIZE": "3", "TRAIN.MIXUP_ALPHA": "0.8", "TRAIN.MIXUP_MODE": "pair"},
        {"TRAIN.CUTMIX_MINMAX": "[0, 1]", "DATA.IMAGE_SIZE": "8"},
        {"DATA.CROP_SCALE": "[1, 1]", "DATA.CROP_RATIO": "[1, 1]"},
    ],
)
def test_compatible_settings_are_accepted(words: dict[str, str]) -> None:
    load_config(None, None, words)


def test_conflicts_are_reported_together_with_their_places(tmp_path: Path) -> None:
    text = file_error(tmp_path, "MAX_TIME: never\nDATA: {CROP_RATIO: [2, 1]}\n")
    assert text.splitlines()[0] == "2 settings are wrong:"
    assert "  run.yaml:1: MAX_TIME: never is not" in text
    assert "  run.yaml:2: DATA.CROP_RATIO: [2.0, 1.0] must" in text
