"""Flags of other programs, as unknown flags, get the suggestion of utils/foreign_flags.py."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from tests.lint import for_each
from tests.program import ROOT, Vitamp
from utils.cli import Parser, parse
from utils.config import Config, load_config
from utils.config.keys import nested, settings
from utils.errors import UserError
from utils.flags import BY_NAME, FLAGS
from utils.foreign_flags import ABSENT, ANY_VALUE, ELSEWHERE


def error_of(*argv: str, **tool: object) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv, "main_single_gpu.py") if not tool else Parser("x.py", "", FLAGS, **tool).read(argv)  # type: ignore[arg-type]
    return str(caught.value)


@for_each([(flag, ours) for ours, flags in ELSEWHERE.items() for flag in flags])
def test_flag_of_another_program_gets_our_flag_or_setting(both: tuple[str, str]) -> None:
    (name, *own_value), ours = both[0].split(), both[1]
    assert name not in BY_NAME
    for value in own_value or ["", "0.5", "8", "true", "0.1 0.2", "strange"]:
        message = error_of(f"-{name}", *value.split())
        assert message.startswith(f"unknown flag -{name}. Did you mean ")
        assert ours in message
        if not ours.startswith("-") and "=" not in ours and value:
            assert f"{ours}={value.replace(' ', ',')}" in message or f"{ours}=..." in message


@for_each([(flag, why) for why, flags in ABSENT.items() for flag in flags])
def test_flag_without_an_equivalent_says_why(both: tuple[str, str]) -> None:
    assert both[1][1:] in error_of(*f"--{both[0]}".split())


@for_each(list(ELSEWHERE))
def test_what_is_suggested_is_accepted(ours: str) -> None:
    """Flags exist, keys exist, and values are valid."""
    if ours.startswith("-"):
        words = ours.split()
        assert words[0].removeprefix("-") in BY_NAME
        if len(words) > 1:
            parse(words, "main_single_gpu.py")
    else:
        key, _, value = ours.partition("=")
        assert key in settings()
        if value and value != ANY_VALUE:
            load_config(words={key: value})


def test_flags_on_the_page_are_known() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `-")]
    flags = [flag for cell in first for flag in re.findall(r"`-+([\w-]+)(?: \w+)?`", cell)]
    assert len(flags) > 40
    ours = re.findall(r"`-(\w+)", " ".join(re.findall(r"^\| `.+? \| (.*?) \|", page, re.MULTILINE)))
    assert [flag for flag in ours if flag not in BY_NAME] == [], "of the second column"
    for flag in (name.replace("-", "_") for name in flags):
        assert flag in BY_NAME or re.search("Did you mean|Not needed", error_of(f"-{flag}")), flag


def test_value_of_the_other_program_is_suggested_only_if_it_is_valid_here() -> None:
    with pytest.raises(ValidationError):
        Config.model_validate(nested({"DATA.INTERPOLATION": "random"}))
    assert "DATA.INTERPOLATION=bilinear?" in error_of("--interpolation", "bilinear")
    assert "DATA.INTERPOLATION=...?" in error_of("--interpolation", "random")
    assert "TRAIN.MIXUP_PROB=0.5?" in error_of("--mixup-prob", "0.5")
    assert "TRAIN.OPTIMIZER.NAME=nesterov or TRAIN.OPTIMIZER.NAME=SGD? " in error_of("--opt", "sgd")
    assert "TRAIN.WARMUP_START_LR=...?" in error_of("--lr-warmup-decay", "0.01"), "there a factor"
    assert "EMA_DECAY=...?" in error_of("--model-ema-decay", "0.99998"), "which torchvision scales by the batch"


def test_flag_for_amp_keeps_its_value_and_no_flag_leads_to_executed_files(vitamp: Vitamp) -> None:
    words = ("--use-amp", "no", "-a", "yes", "--use_ema", "-multi_scale_sampler_ddp")
    assert vitamp("-cfg", "vit_digits", *words, code=2).err.splitlines()[1:] == [
        "  --use-amp. Did you mean -amp no?",
        "  -a. Did you mean -amp yes?",
        "  --use_ema.",
        "  -multi_scale_sampler_ddp. Not available here: all images of an epoch have one size.",
    ]
    assert "-model?" in error_of("-a", "resnet50")


def test_tool_without_settings_suggests_none() -> None:
    assert "TRAIN.SMOOTHING=0.1" in error_of("--label-smoothing", "0.1", settings=True)
    assert "TRAIN.SMOOTHING" not in error_of("--label-smoothing", "0.1", settings=False)
    assert "MODEL.DEPTH" not in error_of("-depth", "3", settings=False)
