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
from torchvision.transforms import RandomErasing

from engine.inputs.mixup import batch_change
from engine.optim.build import build_optimizer
from engine.optim.ema import Ema
from models import build_model
from tests.program import Result
from utils.config import ModelConfig, OptimizerConfig, TrainConfig

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
    assert "nothing is equal to theirs" in row_of("--drop")


def test_the_two_warm_ups_of_an_ema() -> None:
    theirs = ModelEmaV3(nn.Linear(1, 1), decay=0.9999, use_warmup=True).get_decay(101)  # its count begins at 1
    ours = Ema(nn.Linear(1, 1), 0.9999, True, CPU)._decay_at(100)
    assert f"at t = 100, {ours:.3f} and {theirs:.3f}" in row_of("--model-ema-warmup")


def test_torchvisions_erasing_is_const() -> None:
    assert RandomErasing().value == 0
    change = batch_change(TrainConfig(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="const"), 10, CPU)
    torch.manual_seed(0)
    images = change(torch.ones(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)).images
    assert images.unique().tolist() == [0.0, 1.0]
    assert "`TRAIN.RANDOM_ERASE_MODE=const`; ours is noise unless set so" in row_of("--random-erase", "torchvision")
    assert TrainConfig().RANDOM_ERASE_MODE == "pixel", "noise"


def test_images_are_erased_before_they_are_mixed() -> None:
    """Halfway between an image and its erased partner: a value that erasing after mixing could not leave."""
    train = TrainConfig(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="const", MIXUP_ALPHA=1.0)
    torch.manual_seed(0)
    images = batch_change(train, 10, CPU)(torch.ones(8, 3, 32, 32), torch.arange(8)).images
    assert len(images.unique()) > 2


@pytest.mark.parametrize(("more", "precision"), [((), "bf16"), (("AMP.CUSTOM_BLACK_LIST=[softmax]",), "fp32")])
def test_the_softmax_of_plain_attention_on_a_cpu(
    vitamp: Callable[..., Result], tiny: Path, more: tuple[str, ...], precision: str
) -> None:
    done = vitamp("-cfg", tiny, "-device", "cpu", "-amp", "bf16", "-print_amp", "MODEL.ATTENTION=plain", *more)
    assert done.code == 0, done.text
    assert f"softmax {precision}" in done.out
    page = " ".join((ROOT / "docs" / "amp.md").read_text(encoding="utf-8").split())
    assert "With `MODEL.ATTENTION=plain` on a CPU the softmax takes bf16 and gives bf16" in page
    assert "`AMP.CUSTOM_BLACK_LIST=[softmax]` computes it in fp32 on both" in page
