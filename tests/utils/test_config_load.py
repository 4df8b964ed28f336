"""load_config reads layers, older names, and all forms of values; saved settings load back equal."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.program import ROOT
from tests.refused import refusal
from utils.config import Config, config_hash, differences, format_config, load_config, to_yaml
from utils.config.keys import settings, value_of
from utils.errors import UserError


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def load(folder: Path, text: str) -> Config:
    return load_config(write(folder, text)).config


def test_without_settings_all_are_defaults(tmp_path: Path) -> None:
    for text in ("", "# only a comment\n", "DATA:\nTRAIN:\n    OPTIMIZER:\nAMP:\n"):
        assert load(tmp_path, text) == Config()
    loaded = load_config()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.notes == ()


def test_later_layers_override_earlier_ones_and_are_the_source(tmp_path: Path) -> None:
    one = "TRAIN:\n  BASE_LR: 1\n  END_LR: 1\n  WEIGHT_DECAY: 1\n  SMOOTHING: 0.5\nSEED: 1\n"
    write(tmp_path, one, "base/one.yaml")
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


@pytest.mark.parametrize("place", ["file", "command line"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("DATA.IMAGENET_MEAN", "(0.485, 0.456, 0.406)", (0.485, 0.456, 0.406)),
        ("DATA.IMAGENET_STD", "[0.2, 2e-1, 0.3]", (0.2, 0.2, 0.3)),
        ("MODEL.NUM_HEADS", "12", 12),
        ("MODEL.DROPOUT", "0", 0.0),
        ("TRAIN.BASE_LR", "3e-3", 0.003),
        ("TRAIN.GRAD_CLIP", "null", None),
        ("TRAIN.CUTMIX_MINMAX", "'None'", None),
        ("TRAIN.DISTILLATION_TYPE", "none", None),
        ("TRAIN.LINEAR_SCALED_LR", "512", 512.0),
        ("TRAIN.MODEL_EMA", "yes", True),
        ("TRAIN.OPTIMIZER.BETAS", "(0.9, 0.95)", (0.9, 0.95)),
        ("TRAIN.LR_SCHEDULER.MILESTONES", '"30, 60, 90"', (30, 60, 90)),
        ("TRAIN.LR_SCHEDULER.NAME", "WarmupCosine", "warmupcosine"),
        ("AMP.CUSTOM_WHITE_LIST", '"softmax, gelu"', ("softmax", "gelu")),
        ("AMP.CUSTOM_BLACK_LIST", "[linear]", ("linear",)),
        ("SAVE", "'quoted'", "quoted"),
    ],
)
def test_text_gets_the_type_of_its_setting(tmp_path: Path, place: str, key: str, text: str, value: object) -> None:
    """PyYAML leaves most of these as text."""
    keys = "\n".join(f"{' ' * depth}{part}:" for depth, part in enumerate(key.split(".")))
    config = load(tmp_path, f"{keys} {text}\n") if place == "file" else load_config(words={key: text}).config
    found = value_of(config, key)
    assert (found, type(found)) == (value, type(value))


def test_text_settings_keep_their_text(tmp_path: Path) -> None:
    config = load(tmp_path, "TAG: 007\nMAX_TIME: 12:00:00\nSAVE: on\nOUTPUT: (1)\nDATA: {DATA_PATH: 2024-01-01}\n")
    assert (config.TAG, config.MAX_TIME, config.SAVE, config.OUTPUT) == ("007", "12:00:00", "on", "(1)")
    assert config.DATA.DATA_PATH == "2024-01-01"


def test_older_nesting_and_names_are_read(tmp_path: Path) -> None:
    sizes = "PATCH_SIZE: 4, EMBED_DIM: 96, STAGE_DEPTHS: [2, 2, 6, 2], NUM_HEADS: [3, 6, 12, 24], IN_CHANNELS: 1"
    config = load(tmp_path, f"MODEL:\n  TYPE: ViT\n  TRANS:\n    WINDOW_SIZE: 7\n    ENCODER: {{{sizes}}}\n")
    model = config.MODEL
    assert (model.TYPE, model.PATCH_SIZE, model.EMBED_DIM, model.WINDOW_SIZE) == ("vit", 4, 96, 7)
    assert (model.NUM_HEADS, model.STAGE_DEPTHS) == ((3, 6, 12, 24), (2, 2, 6, 2))
    assert config.DATA.IMAGE_CHANNELS == 1


def test_keys_of_paddlevit_that_change_nothing_are_dropped(tmp_path: Path) -> None:
    text = "ATTN_HEAD_SIZE: null, QK_SCALE: None, APE: False, PATCH_NORM: True, NORM_PIX_LOSS: True"
    assert load(tmp_path, f"LOCAL_RANK: 0\nMODEL: {{{text}}}\n") == Config()
    for wrong in ("APE: true", "QK_SCALE: 0.2", "ATTN_HEAD_SIZE: 32", "PATCH_NORM: false", "NORM_PIX_LOSS: false"):
        with pytest.raises(UserError, match=f"1: MODEL.{wrong.replace(':', '')} is not possible: .*; leave the key"):
            load(tmp_path, f"MODEL: {{{wrong}}}\n")


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


def test_key_value_words_keep_what_yaml_would_cut_or_refuse() -> None:
    words = {"TAG": "lr: 3 #2", "OUTPUT": "run #3", "DATA.DATA_PATH": "[odd", "MODEL.TRANS.DEPTH": "4"}
    config = load_config(words={**words, "AMP.CUSTOM_WHITE_LIST": "softmax, gelu"}).config
    assert (config.TAG, config.OUTPUT, config.DATA.DATA_PATH) == ("lr: 3 #2", "run #3", "[odd")
    assert (config.MODEL.DEPTH, config.AMP.CUSTOM_WHITE_LIST) == (4, ("softmax", "gelu"))


def test_long_warmup_is_clipped_with_a_note(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "TRAIN: {NUM_EPOCHS: 10}\n"))
    assert loaded.config.TRAIN.WARMUP_EPOCHS == 32, "a resume may lengthen the run"
    assert len(loaded.notes) == 1
    assert "TRAIN.WARMUP_EPOCHS 32 is more than TRAIN.NUM_EPOCHS 10: clipped to 10" in loaded.notes[0]
    for epochs in (0, 32):
        assert load_config(write(tmp_path, f"TRAIN: {{NUM_EPOCHS: {epochs}}}\n")).notes == ()


SHORT = {"TRAIN.NUM_EPOCHS": ("12", "-epochs")}


@pytest.mark.parametrize(
    ("text", "flags", "words", "warmup"),
    [
        ("TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 10}", SHORT, {}, 0.6),
        ("TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 10}", {}, {"TRAIN.NUM_EPOCHS": "12"}, 0.6),
        ("TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 10}", SHORT, {"TRAIN.WARMUP_EPOCHS": "3"}, 3),
        ("TRAIN: {NUM_EPOCHS: 12, WARMUP_EPOCHS: 10}", SHORT, {}, 10),
        ("TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 0}", SHORT, {}, 0),
        ("TRAIN: {WARMUP_EPOCHS: 1}", SHORT, {}, 1),
        ("TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 10}", {}, {"TRAIN.NUM_EPOCHS": "0"}, 10),
        ("BASE: base.yaml\nTRAIN: {NUM_EPOCHS: 12, WARMUP_EPOCHS: 5}", {}, {}, 5),
        ("BASE: base.yaml\nTRAIN: {NUM_EPOCHS: 12}", {}, {}, 10),
        ("MODEL: {TYPE: swin}", {"TRAIN.NUM_EPOCHS": ("30", "-epochs")}, {}, 2),
        ("", {"TRAIN.NUM_EPOCHS": ("75", "-epochs")}, {}, 8),
    ],
)
def test_epochs_of_the_command_line_keep_the_recipes_proportion_of_warmup(
    tmp_path: Path, text: str, flags: dict[str, tuple[str, str]], words: dict[str, str], warmup: float
) -> None:
    write(tmp_path, "TRAIN: {NUM_EPOCHS: 200, WARMUP_EPOCHS: 10}\n", "base.yaml")
    loaded = load_config(write(tmp_path, f"{text}\n"), flags, words)
    assert warmup == loaded.config.TRAIN.WARMUP_EPOCHS
    by = "-epochs" if flags else "command line"
    changed = loaded.sources["TRAIN.WARMUP_EPOCHS"] == f"{by}, in proportion"
    assert changed == (warmup in (0.6, 2, 8))
    assert any("in proportion to TRAIN.NUM_EPOCHS" in note and f"({by})" in note for note in loaded.notes) == changed


def test_settings_of_own_code_stay_where_another_layer_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("USE: [focal.py, focal.gamma=1.5, focal.alpha=2]\n")
    found = load_config(str(tmp_path / "run.yaml"), {"USE": ("mine.py", "-use")}, {"focal.gamma": "3"})
    assert found.config.USE == ("mine.py", "focal.gamma=3", "focal.alpha=2")
    assert found.sources["USE"] == "-use"


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
TRICKY_TEXT = ["007", "1e5", "yes", "# none", "a: b", "- x", "[a", "ä → 日本", "two\nlines", " x ", "'q' \"Q\"", "&a"]


def test_saved_settings_load_back_equal(tmp_path: Path) -> None:
    config = load_config(None, None, UNUSUAL).config
    again = load(tmp_path, to_yaml(config))
    assert again == config
    assert differences(config, again) == []
    assert config_hash(config) == config_hash(again)
    assert to_yaml(again) == to_yaml(config)
    loaded = load_config(write(tmp_path, to_yaml(Config())))
    assert (loaded.config, loaded.notes) == (Config(), ())
    assert "default" not in loaded.sources.values()


@pytest.mark.parametrize("text", TRICKY_TEXT)
def test_any_text_loads_back_equal(tmp_path: Path, text: str) -> None:
    config = load_config(None, {"TAG": (text, "-tag")}).config
    assert text == config.TAG
    assert load(tmp_path, to_yaml(config)) == config
    assert to_yaml(config).count("\n") == to_yaml(Config()).count("\n")


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


@pytest.mark.parametrize(("before", "now", "shown"), [("null", 16, 0), ("8", 16, 0), ("null", 4, 1), ("4", 16, 1)])
def test_batch_of_validation_that_follows_the_batch_is_no_difference(before: str, now: int, shown: int) -> None:
    old = load_config(None, words={"DATA.BATCH_SIZE": "8", "DATA.BATCH_SIZE_EVAL": before}).config
    new = load_config(None, words={"DATA.BATCH_SIZE": "16", "DATA.BATCH_SIZE_EVAL": str(now)}).config
    assert len(differences(old, new)) == 1 + shown


SCALED = "TRAIN:\n  BASE_LR: 0.003\n  LINEAR_SCALED_LR: 4096\n"


def test_typed_rate_scaled_by_a_file_or_a_family_is_warned_about(tmp_path: Path) -> None:
    recipe = write(tmp_path, SCALED)
    (line,) = load_config(recipe, words={"TRAIN.BASE_LR": "1e-3"}).warnings
    assert line.startswith("TRAIN.BASE_LR 0.001 (command line): multiplied by (global batch / 4096), because ")
    assert f"TRAIN.LINEAR_SCALED_LR is 4096 ({recipe}:3)" in line
    assert "Set TRAIN.LINEAR_SCALED_LR=null to train at the given learning rate" in line
    (line,) = load_config(recipe, words={"TRAIN.WARMUP_START_LR": "1e-5", "TRAIN.END_LR": "1e-6"}).warnings
    assert "TRAIN.WARMUP_START_LR 1.0e-05 (command line), TRAIN.END_LR 1.0e-06 (command line): multiplied" in line
    (line,) = load_config(None, {"TRAIN.BASE_LR": ("1e-3", "-lr")}, {"MODEL.TYPE": "swin"}).warnings
    assert "TRAIN.LINEAR_SCALED_LR is 512 (default (swin))" in line


@pytest.mark.parametrize("words", [{}, {"BASE_LR": "1e-3", "LINEAR_SCALED_LR": "null"}, {"LINEAR_SCALED_LR": "512"}])
def test_expected_scaling_gives_no_warning(tmp_path: Path, words: dict[str, str]) -> None:
    typed = {f"TRAIN.{key}": value for key, value in words.items()}
    assert load_config(write(tmp_path, SCALED), words=typed).warnings == ()


def test_mean_of_pixels_up_to_255_is_warned_about() -> None:
    (line,) = load_config(None, words={"DATA.IMAGENET_MEAN": "[123.7, 116.3, 103.5]"}).warnings
    assert "divide mean and std by 255" in line


def test_setting_too_high_beside_one_on_the_command_line_is_warned_about() -> None:
    for recipe, key, value, high in (
        ("caltech256_resnet50", "BASE_LR", "3e-5", "END_LR 0.0001"),
        ("resnet50", "BASE_LR", "1e-4", "WARMUP_START_LR 0.001"),
        ("resnet50", "NUM_EPOCHS", "30", "LR_SCHEDULER.MILESTONES [30, 60, 80]"),
        ("resnet50", "WARMUP_EPOCHS", "30", "WARMUP_EPOCHS 30.0"),
        ("vit_digits_16_drop25", "NUM_EPOCHS", "4", "TOKEN_DROP_TAIL 4"),
    ):
        (line,) = load_config(recipe, words={f"TRAIN.{key}": value, "TRAIN.LINEAR_SCALED_LR": "null"}).warnings
        assert line.startswith(f"TRAIN.{high} (")


def test_name_finds_the_recipe_and_its_base_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "configs" / "vit_base_patch16_224.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit_base_patch16_224").mkdir()  # such as the folder of a run
    by_name = load_config("vit_base_patch16_224")
    assert by_name.config == load_config(str(path)).config
    assert by_name.notes[0] == f"-cfg vit_base_patch16_224: {path}, a recipe that comes with vitamp"
    assert any("_vit_imagenet.yaml" in source for source in by_name.sources.values()), "BASE"
    (tmp_path / "vit_digits").write_text("SEED: 7\n")
    assert load_config("vit_digits").sources["SEED"] == "vit_digits:1", "a file comes first"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ("vit_bas_patch16_224", "no such file, and no recipe of this name. Did you mean vit_base_p"),
        ("qqq", f"no recipe of this name. The recipes are in {ROOT / 'configs'}; {ROOT / 'docs/recipes.md'} describes"),
        ("_finetune", "-cfg _finetune: no such file, and no recipe"),
        ("configs/vit_digits.yaml", "no such file. Did you mean -cfg vit_digits, a recipe that comes with vitamp?"),
        ("gone/vit_digits", "No such file or directory. The folder gone does not exist either."),
    ],
)
def test_unknown_recipe_is_refused(cfg: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(load_config, cfg)


def test_reference_follows_the_settings() -> None:
    command = [sys.executable, "bench/make_config_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert [key for key in settings() if f"\n| `{key}` | " not in page] == []
    assert "| `AMP.LEVEL` | O0, O1, O2, NAIVE or O3 | `O1` |" in page
