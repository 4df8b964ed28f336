"""load_config reads layers, older names, and all forms of values."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from utils.config import Config, load_config
from utils.errors import UserError


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def load(folder: Path, text: str) -> Config:
    return load_config(write(folder, text)).config


def test_without_arguments_all_settings_are_defaults() -> None:
    loaded = load_config()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.notes == ()


def test_empty_file_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Config()
    assert load(tmp_path, "# only a comment\n") == Config()
    assert load(tmp_path, "DATA:\nTRAIN:\n    OPTIMIZER:\nAMP:\n") == Config()


def test_later_layers_override_earlier_ones_and_are_the_source(tmp_path: Path) -> None:
    write(
        tmp_path, "TRAIN:\n  BASE_LR: 1\n  END_LR: 1\n  WEIGHT_DECAY: 1\n  SMOOTHING: 0.5\nSEED: 1\n", "base/one.yaml"
    )
    write(tmp_path, "TRAIN:\n  END_LR: 2\n  WEIGHT_DECAY: 2\n  SMOOTHING: 0.25\n", "base/two.yaml")
    cfg = write(tmp_path, "BASE: [base/one.yaml, base/two.yaml, '']\nTRAIN:\n  WEIGHT_DECAY: 3\n  SMOOTHING: 0.125\n")
    loaded = load_config(cfg, {"TRAIN.SMOOTHING": ("0.3", "-flag"), "SEED": ("4", "-flag")}, {"SEED": "5"})
    train = loaded.config.TRAIN
    assert (train.BASE_LR, train.END_LR, train.WEIGHT_DECAY, train.SMOOTHING, loaded.config.SEED) == (1, 2, 3, 0.3, 5)
    assert loaded.sources["TRAIN.BASE_LR"] == f"{tmp_path}/base/one.yaml:2"
    assert loaded.sources["TRAIN.END_LR"] == f"{tmp_path}/base/two.yaml:2"
    assert loaded.sources["TRAIN.WEIGHT_DECAY"] == f"{cfg}:3"
    assert loaded.sources["TRAIN.SMOOTHING"] == "-flag"
    assert loaded.sources["SEED"] == "command line"
    assert loaded.sources["TRAIN.GRAD_CLIP"] == "default"


def test_base_is_relative_to_its_file(tmp_path: Path) -> None:
    write(tmp_path, "SEED: 7\n", "a/b/deep.yaml")
    write(tmp_path, "BASE: b/deep.yaml\n", "a/middle.yaml")
    assert load(tmp_path, "BASE: ['a/middle.yaml']\n").SEED == 7


def test_shared_base_is_allowed_and_circular_base_refused(tmp_path: Path) -> None:
    write(tmp_path, "SEED: 3\n", "root.yaml")
    write(tmp_path, "BASE: [root.yaml]\n", "left.yaml")
    write(tmp_path, "BASE: [root.yaml]\n", "right.yaml")
    assert load(tmp_path, "BASE: [left.yaml, right.yaml]\n").SEED == 3
    write(tmp_path, "BASE: [run.yaml]\n", "root.yaml")
    with pytest.raises(UserError, match=r"run\.yaml: BASE leads back"):
        load(tmp_path, "BASE: [left.yaml]\n")


def test_values_that_yaml_leaves_as_text_get_their_type(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """\
        DATA:
            IMAGENET_MEAN: (0.485, 0.456, 0.406)
            IMAGENET_STD: [0.2, 2e-1, 0.3]
        MODEL: {QK_SCALE: None, NUM_HEADS: 12, DROPOUT: 0}
        TRAIN:
            BASE_LR: 3e-3
            WARMUP_START_LR: 1e-6
            GRAD_CLIP: null
            LINEAR_SCALED_LR: 512
            CUTMIX_MINMAX: 'None'
            DISTILLATION_TYPE: none
            OPTIMIZER:
                BETAS: (0.9, 0.95)
            LR_SCHEDULER: {MILESTONES: "30, 60, 90", NAME: WarmupCosine}
        """,
    )
    assert config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)
    assert config.DATA.IMAGENET_STD == (0.2, 0.2, 0.3)
    assert config.MODEL.NUM_HEADS == 12
    assert (config.TRAIN.BASE_LR, config.TRAIN.WARMUP_START_LR) == (0.003, 1e-6)
    assert config.TRAIN.LINEAR_SCALED_LR == 512
    assert not isinstance(config.TRAIN.LINEAR_SCALED_LR, bool)
    assert config.TRAIN.DISTILLATION_TYPE is None
    assert config.TRAIN.OPTIMIZER.BETAS == (0.9, 0.95)
    assert config.TRAIN.LR_SCHEDULER.MILESTONES == (30, 60, 90)
    assert config.TRAIN.LR_SCHEDULER.NAME == "warmupcosine"


def test_text_settings_keep_their_text(tmp_path: Path) -> None:
    config = load(tmp_path, "TAG: 007\nMAX_TIME: 12:00:00\nSAVE: on\nOUTPUT: (1)\nDATA: {DATA_PATH: 2024-01-01}\n")
    assert (config.TAG, config.MAX_TIME, config.SAVE, config.OUTPUT) == ("007", "12:00:00", "on", "(1)")
    assert config.DATA.DATA_PATH == "2024-01-01"


def test_older_nesting_and_names_are_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """\
        MODEL:
            TYPE: ViT
            DROP_PATH: 0.1
            TRANS:
                PATCH_SIZE: 32
                HIDDEN_SIZE: 384
                MLP_DIM: 1152
                NUM_HEADS: 6
                NUM_LAYERS: 8
                QKV_BIAS: true
                IN_CHANNELS: 1
        """,
    )
    model = config.MODEL
    assert (model.TYPE, model.DROPPATH, model.PATCH_SIZE, model.EMBED_DIM) == ("vit", 0.1, 32, 384)
    assert (model.MLP_RATIO, model.NUM_HEADS, model.DEPTH, model.QKV_BIAS) == (3.0, 6, 8, True)
    assert config.DATA.IMAGE_CHANNELS == 1


def test_older_swin_file_is_read(tmp_path: Path) -> None:
    text = "MODEL:\n  TRANS: {NUM_HEADS: [3, 6, 12, 24], STAGE_DEPTHS: [2, 2, 6, 2], WINDOW_SIZE: 7, APE: no}\n"
    model = load(tmp_path, text).MODEL
    assert (model.NUM_HEADS, model.STAGE_DEPTHS, model.WINDOW_SIZE) == (
        (3, 6, 12, 24),
        (2, 2, 6, 2),
        7,
    )


def test_amp_is_a_value_or_a_section_in_any_layer(tmp_path: Path) -> None:
    assert load(tmp_path, "AMP: true\n").AMP.ENABLED is True
    assert load(tmp_path, "AMP: off\n").AMP.ENABLED is False
    write(tmp_path, "AMP: True\n", "base.yaml")
    amp = load(tmp_path, "BASE: [base.yaml]\nAMP: {DTYPE: bf16, INIT_LOSS_SCALING: 32768}\n").AMP
    assert (amp.ENABLED, amp.DTYPE, amp.INIT_LOSS_SCALING) == (True, "bf16", 32768)
    write(tmp_path, "AMP: {ENABLED: true, DTYPE: bf16}\n", "base.yaml")
    amp = load(tmp_path, "BASE: [base.yaml]\nAMP: false\n").AMP
    assert (amp.ENABLED, amp.DTYPE) == (False, "bf16")
    assert load_config(words={"AMP": "true"}).config.AMP.ENABLED is True


def test_key_value_words_take_scalars_lists_and_text() -> None:
    config = load_config(
        words={
            "TRAIN.BASE_LR": "1e-4",
            "TRAIN.OPTIMIZER.BETAS": "[0.9, 0.98]",
            "TRAIN.LR_SCHEDULER.MILESTONES": "(1, 2)",
            "TRAIN.GRAD_CLIP": "None",
            "TRAIN.MODEL_EMA": "yes",
            "AMP.CUSTOM_WHITE_LIST": "softmax, gelu",
            "AMP.CUSTOM_BLACK_LIST": "[linear]",
            "TAG": "lr: 3 #2",
            "SAVE": "'quoted'",
            "OUTPUT": "run #3",
            "DATA.DATA_PATH": "[odd",
            "MODEL.TRANS.DEPTH": "4",
        }
    ).config
    assert config.TRAIN.BASE_LR == 1e-4
    assert config.TRAIN.OPTIMIZER.BETAS == (0.9, 0.98)
    assert config.TRAIN.LR_SCHEDULER.MILESTONES == (1, 2)
    assert config.TRAIN.GRAD_CLIP is None
    assert config.TRAIN.MODEL_EMA is True
    assert config.AMP.CUSTOM_WHITE_LIST == ("softmax", "gelu")
    assert config.AMP.CUSTOM_BLACK_LIST == ("linear",)
    assert (config.TAG, config.SAVE, config.DATA.DATA_PATH) == ("lr: 3 #2", "quoted", "[odd")
    assert config.OUTPUT == "run #3"
    assert config.MODEL.DEPTH == 4


def test_long_warmup_is_clipped_with_a_note() -> None:
    loaded = load_config(words={"TRAIN.NUM_EPOCHS": "10"})
    assert loaded.config.TRAIN.WARMUP_EPOCHS == 32, "a resume may lengthen the run"
    assert len(loaded.notes) == 1
    assert "TRAIN.WARMUP_EPOCHS 32 is more than TRAIN.NUM_EPOCHS 10: clipped to 10" in loaded.notes[0]
    assert load_config(words={"TRAIN.NUM_EPOCHS": "32"}).notes == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("LOCAL_RANK: 1\n", ""),
        ("MODEL: {ATTN_HEAD_SIZE: 64, QK_SCALE: 0.125, APE: no, PATCH_NORM: None}\n", ""),
        ("MODEL: {EMBED_DIM: 96, NUM_HEADS: 3, TRANS: {ATTN_HEAD_SIZE: 32}}\n", ""),
        ("MODEL: {TYPE: swin, QK_SCALE: 0.17677669, PATCH_NORM: true}\n", ""),
        ("MODEL: {ATTN_HEAD_SIZE: 32}\n", ":1: MODEL.ATTN_HEAD_SIZE 32: the model has 64 (EMBED_DIM / NUM_HEADS)"),
        ("MODEL: {QK_SCALE: 0.2}\n", ":1: MODEL.QK_SCALE 0.2: the model has 0.125 (that of the width of a head)"),
        ("MODEL: {TYPE: swin, APE: true}\n", ":1: MODEL.APE true: the model has false, which cannot be changed"),
        ("MODEL: {TYPE: swin, PATCH_NORM: 0}\n", ":1: MODEL.PATCH_NORM 0: the model has true, which cannot be"),
    ],
)
def test_keys_of_paddlevit_with_one_value_are_checked_and_dropped(tmp_path: Path, text: str, problem: str) -> None:
    cfg = write(tmp_path, text)
    if not problem:
        assert not any("APE" in key or "LOCAL" in key for key in load_config(cfg).sources)
        return
    with pytest.raises(UserError) as refused:
        load_config(cfg)
    assert problem in str(refused.value)


def test_settings_of_own_code_stay_where_another_layer_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("USE: [focal.py, focal.gamma=1.5, focal.alpha=2]\n")
    found = load_config(str(tmp_path / "run.yaml"), {"USE": ("mine.py", "-use")}, {"focal.gamma": "3"})
    assert found.config.USE == ("mine.py", "focal.gamma=3", "focal.alpha=2")
    assert found.sources["USE"] == "-use"
