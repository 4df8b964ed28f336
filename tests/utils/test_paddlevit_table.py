"""The table of PaddleViT's families says what timm's models are, and their files become settings of vitamp."""

import inspect
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import yaml

from models.build import build_without_weights, check_model, timm_call
from models.parts import count_parameters
from tests.program import ROOT, Vitamp
from tests.refused import refusal
from utils.config import Loaded, ModelConfig, load_config
from utils.config.keys import settings
from utils.config.paddlevit import families
from utils.errors import UserError

FILES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/utils/paddlevit_files.yaml").read_text(encoding="utf-8"))
FOLDERS = sorted({row["file"].partition("/")[0] for row in FILES})
MODELS = {name: family for family in families().values() for name in family.models}
ARGUMENTS = {
    "DOWNSAMPLES": "downsamples",
    "MIXER.DEPTH": "num_blocks",
    "CNN.ACTIVATION": "act_layer",
    "LINEAR": "linear",
    "USE_POS": "use_pos_embed",
    "LAYER_SCALE_INIT_VALUE": "layer_scale_init_values",
}
"""MODEL key -> argument of timm's constructor, where the name differs by more than a plural"""
NOT_ARGUMENTS = {
    *("DISTILL", "IMG_SIZE", "USE_CONV", "ATTN_RATIO", "OUTLOOK_ATTENTION"),
    *("pit NUM_HEADS", "poolformer MLP_RATIOS", "poolformer DOWNSAMPLES", "levit PATCH_SIZE", "pvtv2 PATCH_SIZE"),
}
"""Keys that timm's constructor has no argument of that meaning for, or another name in one family"""


def load(folder: Path, text: str, **words: str) -> Loaded:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config(str(folder / "run.yaml"), words={key.replace("__", "."): word for key, word in words.items()})


def error(folder: Path, text: str, **words: str) -> str:
    return refusal(lambda: load(folder, text, **words)).replace(f"{folder}/", "")


def timm_arguments(name: str) -> dict[str, Any]:
    """What timm gives a model's constructor, with the constructor's defaults."""
    entry, seen = timm.models.model_entrypoint(name), {}

    def build(kind: type, *_: Any, **arguments: Any) -> None:
        for base in kind.__mro__:
            for key, parameter in inspect.signature(base.__init__).parameters.items():
                seen.setdefault(key, parameter.default)
        seen.update(arguments)

    with mock.patch.object(sys.modules[entry.__module__], "build_model_with_cfg", build):
        entry()
    return seen


def plain(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__.casefold()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.casefold() if isinstance(value, str) else value


def argument_of(key: str, arguments: dict[str, Any]) -> Any:
    base = key.rpartition(".")[2].casefold()
    names = [ARGUMENTS.get(key, ""), base, f"{base}s", base.removesuffix("s"), base.removeprefix("stage_") + "s"]
    return next((arguments[name] for name in names if name in arguments), None)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("mobile") and "halo" not in name])
def test_sizes_in_the_table_are_those_of_timms_model(name: str) -> None:
    arguments, word = timm_arguments(name), next(word for word, one in families().items() if one is MODELS[name])
    arguments["layers"] = arguments.get("layers", arguments.get("depths"))
    compared = 0
    for key, value in MODELS[name].models[name].items():
        has = argument_of(key, arguments)
        if key in NOT_ARGUMENTS or f"{word} {key}" in NOT_ARGUMENTS:
            continue
        if isinstance(value, list) and isinstance(has, int | float):
            has = [has] * len(value)  # timm gives one number for all stages
        if word == "poolformer" and key == "EMBED_DIMS":
            has = arguments["dims"]
        assert plain(has) == plain(value), f"{name}: MODEL.{key}"
        compared += 1
    assert compared >= 2 or not MODELS[name].models[name]


def test_defaults_of_the_table_are_settings(tmp_path: Path) -> None:
    for word, family in [(word, one) for word, one in families().items() if one.models]:
        assert set(family.defaults) <= set(settings())
        loaded = load(tmp_path, f"MODEL: {{TYPE: {word}, NAME: {next(iter(family.models))}}}")
        chosen = {key for key, source in loaded.sources.items() if source == f"default ({word})"}
        assert chosen == set(family.defaults)
        assert loaded.config.TRAIN.END_LR < 1, "a number, not text"


@pytest.mark.parametrize(
    ("word", "name", "timms"),
    [
        ("BEiT", "beit_base_patch16_224_finetune", "beit_base_patch16_224"),
        ("ConvMixer", "convmixer_1024_20", "convmixer_1024_20_ks9_p14"),
        ("CrossViT", "crossvit_vit_15_dagger_384", "crossvit_15_dagger_408"),
        ("halo", "halonet_50ts", "halonet50ts"),
        ("levit", "levie_128s", "levit_128s"),
        ("Mixer", "mixer_base_patch16_224", "mixer_b16_224"),
        ("GatedMLP", "gmlp_s16_224", "gmlp_s16_224"),
        ("PiT", "pit_xs_distilled", "pit_xs_distilled_224"),
        ("PVTv2", "pvtv2_b2_linear", "pvt_v2_b2_li"),
        ("coat_lite", "coat_lite_mini", "coat_lite_mini"),
        ("convnext", "convnext_atto", "convnext_atto"),
    ],
)
def test_name_becomes_timms(word: str, name: str, timms: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, f"MODEL: {{TYPE: {word}, NAME: {name}}}")
    assert timms == loaded.config.MODEL.NAME
    assert any(f"MODEL.NAME {name} is timm's {timms}" in note for note in loaded.notes) == (name != timms)


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_of_every_year_name_timms_model(folder: str, tmp_path: Path) -> None:
    for row in [row for row in FILES if row["file"].startswith(f"{folder}/")]:
        text = yaml.safe_dump(row["settings"])
        if "refused" in row:
            assert row["refused"] in error(tmp_path, text), row
        else:
            assert row["built"][0] == load(tmp_path, text).config.MODEL.NAME, row


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_files_of_every_year_build_their_class_and_weights(folder: str, tmp_path: Path) -> None:
    built: dict[str, list[Any]] = {}
    for row in [row for row in FILES if row["file"].startswith(f"{folder}/") and "built" in row]:
        config = load(tmp_path, yaml.safe_dump(row["settings"])).config
        key = f"{config.MODEL}, {config.DATA.IMAGE_SIZE}"
        if key not in built:
            module = build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, 3)
            built[key] = [config.MODEL.NAME, type(module).__name__, count_parameters(module)[0]]
        assert built[key] == row["built"], row


def test_name_of_other_sizes_gives_way_to_the_sizes(tmp_path: Path) -> None:
    sizes = "DEPTHS: [3, 3, 27, 3], DIMS: [192, 384, 768, 1536]"
    loaded = load(tmp_path, f"MODEL: {{TYPE: convnext, NAME: convnext_tiny, {sizes}}}")
    assert loaded.config.MODEL.NAME == "convnext_large"
    words = "is taken for convnext_tiny: it has the file's MODEL.DEPTHS [3, 3, 27, 3], MODEL.DIMS"
    assert f"timm's convnext_large {words}" in loaded.notes[0]


@pytest.mark.parametrize(("kind", "title"), [("T2T-ViT", "T2T-ViT"), ("shuffle", "Shuffle"), ("FF_Only", "FF-only")])
def test_family_that_timm_lacks_is_refused_in_one_sentence(kind: str, title: str, tmp_path: Path) -> None:
    text = f"MODEL: {{TYPE: {kind}, NAME: its_14, EMBED_DIM: 384, DEPTH: 14, NUM_HEADS: 6, TOKEN_TYPE: performer}}"
    for words in ({}, {"MODEL__TYPE": "vit"}):
        message = error(tmp_path, text, **words)
        assert message.startswith(f"run.yaml:1: timm has no {title}")
        assert "-use FILE -model NAME" in message
    own = load(tmp_path, text, MODEL__NAME="t2t_vit_14")
    assert (own.config.MODEL.EMBED_DIM, own.config.MODEL.TYPE) == (None, "vit")


def test_absent_families_are_not_timms() -> None:
    assert not [word for word in families() if not families()[word].models and timm.list_models(f"{word}_*")]


def test_file_of_a_distilled_deit_builds_it(tmp_path: Path) -> None:
    text = "MODEL: {TYPE: deit, NAME: deit_tiny_patch16_224, EMBED_DIM: 192}\nTRAIN: {DISTILLATION_TYPE: 'hard'}\n"
    loaded = load(tmp_path, text)
    assert loaded.config.MODEL.NAME == "deit_tiny_distilled_patch16_224"
    assert "with token and classifier for TRAIN.DISTILLATION_TYPE" in loaded.notes[0]
    for plain in (text.replace(", EMBED_DIM: 192", ""), text.replace("hard", "none")):
        assert load(tmp_path, plain).config.MODEL.NAME == "deit_tiny_patch16_224"


def test_the_width_of_an_mlp_is_kept(tmp_path: Path) -> None:
    text = "MODEL: {TYPE: vit, NAME: own, TRANS: {HIDDEN_SIZE: 100, MLP_DIM: 113, NUM_LAYERS: 1, NUM_HEADS: 2}}"
    config = load(tmp_path, text).config
    model = build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, 3)
    assert model.get_submodule("blocks.0.mlp.fc1").out_features == 113


CAIT = "MODEL:\n  TYPE: cait\n  NAME: cait_xxs24_224\n  EMBED_DIM: 192\n  DEPTH: 24\n  INIT_VALUES: 1e-6\n"


def test_equal_sizes_are_accepted_in_one_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, CAIT)
    assert loaded.notes[0] == "MODEL.NAME cait_xxs24_224; the file restates its sizes (EMBED_DIM, DEPTH)"
    assert loaded.config.MODEL.EMBED_DIM is None
    assert loaded.config.MODEL.INIT_VALUES == 1e-6
    assert loaded.config.TRAIN.BASE_LR == 5e-4
    nested = "MODEL: {TYPE: Mixer, NAME: mixer_base_patch16_224, MIXER: {PATCH_SIZE: 16, EMBED_DIM: 768.0}}"
    assert "restates its sizes (MIXER.PATCH_SIZE, MIXER.EMBED_DIM)" in load(tmp_path, nested).notes[0]
    volo = "MODEL: {TYPE: volo, NAME: volo_d1_224, TRANS: {LAYERS: [4, 4, 8, 2], QKV_BIAS: False}}"
    assert "restates its sizes (LAYERS, QKV_BIAS)" in load(tmp_path, volo).notes[0]


def test_other_sizes_are_refused_with_both_values(tmp_path: Path) -> None:
    assert error(tmp_path, CAIT.replace("192", "200")) == (
        "run.yaml:4: MODEL.EMBED_DIM 200 (timm's: 192): MODEL.NAME cait_xxs24_224 is timm's cait_xxs24_224, whose "
        "sizes cannot be changed; leave the keys out, or name another model"
    )
    typed = error(tmp_path, CAIT, MODEL__NAME="cait_s24_224")
    assert "run.yaml:4: MODEL.EMBED_DIM 192 (timm's: 384): MODEL.NAME cait_s24_224 is timm's" in typed
    assert "MODEL.NAME is not set; timm has coat_tiny" in error(tmp_path, "MODEL: {TYPE: coat}")


def test_keys_of_other_families_stay_unknown(tmp_path: Path) -> None:
    text = "MODEL:\n  TYPE: cait\n  NAME: cait_xxs24_224\n  SERIAL_DEPTHS: [2, 2]\n  MIXER: {DEPTH: 12}\n"
    message = error(tmp_path, text)
    assert "run.yaml:2: MODEL.TYPE cait is not one of vit," in message
    assert message.endswith("leave out MODEL.TYPE, MODEL.SERIAL_DEPTHS, MODEL.MIXER.DEPTH")


def test_image_size_of_crossvit_is_the_one_that_the_model_computes_with(tmp_path: Path) -> None:
    text = "DATA: {IMAGE_SIZE: 224}\nMODEL: {TYPE: CrossViT, NAME: crossvit_vit_9_224, IMG_SIZE: [240, 224]}"
    loaded = load(tmp_path, text)
    assert (loaded.config.MODEL.NAME, loaded.config.DATA.IMAGE_SIZE) == ("crossvit_9_240", 240)
    assert "images of 240 pixels, the size that timm's crossvit_9_240 takes" in loaded.notes[0]
    assert load(tmp_path, text, DATA__IMAGE_SIZE="480").config.DATA.IMAGE_SIZE == 480


@pytest.mark.slow
def test_paddlevit_file_runs_from_the_command_line(vitamp: Vitamp, tmp_path: Path) -> None:
    """A file of XCiT, with a key that has another name here; wrong sizes exit with 2."""
    file = tmp_path / "xcit.yaml"
    file.write_text(
        "DATA: {IMAGE_SIZE: 32, DATASET: digits, IMAGE_CHANNELS: 1, BATCH_SIZE: 4}\nMODEL: {TYPE: xcit, NAME: "
        "xcit_nano_12_p16_224, PATCH_SIZE: 16, EMBED_DIM: 128, DEPTH: 12, NUM_HEADS: 4, ETA: 0.5, TOKENS_NORM: False, "
        "NUM_CLASSES: 10}\nTHREADS: 1\nDEVICE: cpu\n"
    )
    done = vitamp("-cfg", file, "-dry_run", code=0)
    assert "MODEL.NAME xcit_nano_12_p16_224; the file restates its sizes (PATCH_SIZE, EMBED_DIM, " in done.text
    refused = vitamp("-cfg", file, "-print_config", "MODEL.DEPTH=13", code=2)
    assert "MODEL.DEPTH 13 (timm's: 12)" in refused.text


def test_initial_layer_scale_reaches_the_model() -> None:
    kind = {"TYPE": "cait", "NAME": "cait_xxs24_224", "INIT_VALUES": 0.5}
    assert timm_call(ModelConfig.model_validate(kind), 224, 3)[1]["init_values"] == 0.5
    with pytest.raises(UserError, match=r"MODEL.INIT_VALUES 0.5: ResNet takes no initial value of layer scale"):
        check_model(ModelConfig.model_validate(kind | {"NAME": "resnet18"}), 224, 3)
