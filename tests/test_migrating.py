"""What docs/migrating.md and docs/amp.md say of other programs, checked where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim._optim_factory import create_optimizer_v2, get_optimizer_info
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torchvision.transforms import RandomErasing, RandomResizedCrop

from engine.inputs.mixup import build_batch_transform
from engine.optim.build import build_optimizer
from engine.optim.ema import Ema
from engine.task.one import OneLabel
from models import build_model
from tests.documents import blocks, commands
from tests.program import Result
from utils.cli import parse
from utils.config import Config, ModelConfig, OptimizerConfig, TrainConfig, load_config
from utils.config.keys import default_of

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def row_of(flag: str, program: str = "timm") -> str:
    """The row of a flag in a program's table on the page."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ") if part.startswith(f"{program}'s ")]
    return next(line for line in section.splitlines() if line.startswith(f"| `{flag}`"))


def defaults(name: str) -> dict[str, Any]:
    settings = TrainConfig(OPTIMIZER=OptimizerConfig(NAME=name))
    return build_optimizer(nn.Linear(2, 2), settings, 0.1, CPU).defaults


def test_timms_sgd_is_our_nesterov() -> None:
    theirs = create_optimizer_v2(nn.Linear(2, 2), "sgd", 0.1).defaults
    assert (theirs["nesterov"], theirs["momentum"]) == (True, 0.9)
    assert defaults("nesterov")["nesterov"] is True
    assert defaults("SGD")["nesterov"] is False
    assert "which is `nesterov` here" in row_of("--opt")


def test_torchvisions_rmsprop_differs_from_ours_in_eps_alone() -> None:
    """Its train.py gives RMSprop momentum 0.9, alpha 0.9 and eps 0.0316."""
    assert get_optimizer_info("rmsprop").defaults == {"alpha": 0.9}
    ours = defaults("RMSProp")
    assert (ours["momentum"], ours["alpha"]) == (0.9, 0.9)
    assert ours["eps"] != 0.0316
    assert "`rmsprop` is `RMSProp` with `TRAIN.OPTIMIZER.EPS=0.0316`" in row_of("--opt", "torchvision")


def test_timms_drop_acts_before_the_classifier_only() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", drop_rate=0.5)
    active = [name for name, m in vit.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    assert active == ["head_drop"]
    sizes = ModelConfig(NAME="a", DROPOUT=0.5, EMBED_DIM=8, NUM_HEADS=2, DEPTH=1)
    ours = build_model(sizes, 32, 3)
    acting = {name for name, m in ours.named_modules() if isinstance(m, nn.Dropout) and m.p > 0}
    assert "head_drop" not in acting
    assert {"pos_drop", "blocks.0.attn.proj_drop", "blocks.0.mlp.drop1"} <= acting
    assert "no setting is equal to timm's" in row_of("--drop")


def test_the_two_warm_ups_of_an_ema() -> None:
    theirs = ModelEmaV3(nn.Linear(1, 1), decay=0.9999, use_warmup=True).get_decay(101)  # its count begins at 1
    ours = Ema(nn.Linear(1, 1), TrainConfig(MODEL_EMA_DECAY=0.9999), CPU)._decay_at(100)
    assert f"at t = 100, {ours:.3f} and {theirs:.3f}" in row_of("--model-ema-warmup")


def test_torchvisions_erasing_is_const() -> None:
    assert RandomErasing().value == 0
    change = build_batch_transform(TrainConfig(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="const"), OneLabel(10), CPU)
    torch.manual_seed(0)
    images = change(torch.ones(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)).images
    assert images.unique().tolist() == [0.0, 1.0]
    assert "`TRAIN.RANDOM_ERASE_MODE=const`; ours is noise by default" in row_of("--random-erase", "torchvision")
    assert TrainConfig().RANDOM_ERASE_MODE == "pixel", "noise"


def test_images_are_erased_before_they_are_mixed() -> None:
    """Halfway between an image and its erased partner: a value that erasing after mixing could not leave."""
    train = TrainConfig(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="const", MIXUP_ALPHA=1.0)
    torch.manual_seed(0)
    images = build_batch_transform(train, OneLabel(10), CPU)(torch.ones(8, 3, 32, 32), torch.arange(8)).images
    assert len(images.unique()) > 2


@pytest.mark.parametrize(("more", "precision"), [((), "bf16"), (("AMP.CUSTOM_BLACK_LIST=[softmax]",), "fp32")])
def test_the_softmax_of_plain_attention_on_a_cpu(
    vitamp: Callable[..., Result], tiny: Path, more: tuple[str, ...], precision: str
) -> None:
    done = vitamp("-cfg", tiny, "-device", "cpu", "-amp", "bf16", "-print_amp", "MODEL.ATTENTION=plain", *more)
    assert done.code == 0, done.text
    assert f"softmax {precision}" in done.out
    page = " ".join((ROOT / "docs" / "amp.md").read_text(encoding="utf-8").split())
    assert "`MODEL.ATTENTION=plain` computes softmax in bf16" in page
    assert "with `AMP.CUSTOM_BLACK_LIST=[softmax]`, CPUs use fp32 too" in page


def defaults_rows() -> dict[str, list[str]]:
    """Key -> what here, PaddleViT, timm and torchvision do without flags, by the first table of the page."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ") if part.startswith("Defaults that differ")]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1:] for row in cells if row[0].startswith("`")}


def test_our_column_of_the_defaults_is_the_schemas() -> None:
    rows = defaults_rows()
    assert len(rows) >= 18
    for key, (ours, *_) in rows.items():
        value = default_of(key)
        first = value[0] if key == "DATA.CROP_SCALE" else value
        shown = {True: "true", False: "false", None: "null"}.get(first) if first in (True, False, None) else None
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            assert float(ours.split()[0]) == first, key
        elif isinstance(first, (list, tuple)):
            assert [float(part) for part in ours.split(",")] == list(first), key
        else:
            assert ours.split()[0].rstrip(",") == (shown or str(first)), key


def test_torchvisions_crop_and_timms_normalisation_are_those_of_the_table() -> None:
    assert RandomResizedCrop(224).scale[0] == float(defaults_rows()["DATA.CROP_SCALE"][3])
    theirs = timm.get_pretrained_cfg("vit_base_patch16_224")
    assert theirs is not None
    assert (theirs.mean, theirs.crop_pct) == ((0.5, 0.5, 0.5), 0.9), "the worked command leaves mean and sets the crop"


def worked(part: str) -> Config:
    """The settings of the command a user of another program is given instead of theirs."""
    texts = [block.text for block in blocks() if block.page == "docs/migrating.md" and block.mark != "not checked"]
    (words,) = [words for text in texts for words in commands(text) if part in " ".join(words)]
    command = parse(words[1:], words[0])
    return load_config(command.cfg and str(ROOT / command.cfg), command.flags, command.words).config


def test_the_worked_command_from_paddlevit_trains_with_its_numbers() -> None:
    train, model = worked("ATTENTION_DROPOUT").TRAIN, worked("ATTENTION_DROPOUT").MODEL
    assert (train.BASE_LR, train.LINEAR_SCALED_LR, train.WEIGHT_DECAY, train.WEIGHT_DECAY_ALL) == (
        3e-3,
        None,
        0.3,
        True,
    )
    assert (train.WARMUP_EPOCHS, train.GRAD_CLIP, model.DROPOUT, model.ATTENTION_DROPOUT) == (32, 1.0, 0.1, 0.1)
    without = load_config(str(ROOT / "configs" / "vit_base_patch16_224.yaml")).config
    assert (without.TRAIN.LINEAR_SCALED_LR, without.MODEL.ATTENTION_DROPOUT) == (4096, 0.0)


def test_the_worked_command_from_timm_has_its_defaults() -> None:
    config = worked("runs/base")
    rows = defaults_rows()
    for key in ("TRAIN.WARMUP_EPOCHS", "TRAIN.WARMUP_START_LR", "TRAIN.COLOR_JITTER", "TRAIN.SMOOTHING", "SEED"):
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == float(rows[key][2]), key
    assert (config.TRAIN.LINEAR_SCALED_LR, config.DATA.CROP_SCALE[0], config.DATA.CROP_PCT) == (None, 0.08, 0.9)


def test_the_worked_command_from_torchvision_has_its_defaults() -> None:
    config = worked("runs/resnet50")
    rows = {key: row[3] for key, row in defaults_rows().items()}
    assert float(rows["TRAIN.BASE_LR"]) == config.TRAIN.BASE_LR
    assert float(rows["TRAIN.WEIGHT_DECAY"]) == config.TRAIN.WEIGHT_DECAY
    assert (config.TRAIN.NUM_EPOCHS, config.DATA.BATCH_SIZE) == (90, 32)
    assert list(config.DATA.IMAGENET_MEAN) == [float(part) for part in rows["DATA.IMAGENET_MEAN"].split(",")]
    assert (config.DATA.INTERPOLATION, config.TRAIN.LR_SCHEDULER.DECAY_EPOCHS) == ("bilinear", 30)
