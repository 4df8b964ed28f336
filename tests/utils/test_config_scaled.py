"""LINEAR_SCALED_LR warns about learning rates that it multiplies unexpectedly."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.config import load_config

SCALED = "TRAIN:\n  BASE_LR: 0.003\n  LINEAR_SCALED_LR: 4096\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(SCALED)
    return path


def warnings(path: Path | None, **words: str) -> tuple[str, ...]:
    given = {f"TRAIN.{key}": value for key, value in words.items()}
    return load_config(str(path) if path else None, words=given).warnings


def test_command_line_rate_scaled_by_a_file_is_warned_about(recipe: Path) -> None:
    (line,) = warnings(recipe, BASE_LR="1e-3")
    assert line.startswith("TRAIN.BASE_LR 0.001 (command line): multiplied by (global batch / 4096), because ")
    assert f"TRAIN.LINEAR_SCALED_LR is 4096 ({recipe}:3)" in line
    assert "Set TRAIN.LINEAR_SCALED_LR=null to train at the given learning rate" in line


def test_warmup_and_end_rates_are_warned_about(recipe: Path) -> None:
    (line,) = warnings(recipe, WARMUP_START_LR="1e-5", END_LR="1e-6")
    assert "TRAIN.WARMUP_START_LR 1.0e-05 (command line), TRAIN.END_LR 1.0e-06 (command line): multiplied" in line
    assert warnings(recipe, END_LR="0") == ()


def test_file_rate_scaled_by_its_base_is_warned_about(recipe: Path) -> None:
    own = recipe.with_name("own.yaml")
    own.write_text("BASE: [recipe.yaml]\nTRAIN: {BASE_LR: 0.001}\n")
    (line,) = warnings(own)
    assert line.startswith(f"TRAIN.BASE_LR 0.001 ({own}:2): multiplied")
    own.write_text("BASE: [recipe.yaml]\nTRAIN: {BASE_LR: 0.001, LINEAR_SCALED_LR: 512}\n")
    assert warnings(own) == ()


def test_rate_scaled_by_a_family_default_is_warned_about() -> None:
    (line,) = (
        warnings(None, BASE_LR="1e-3") or load_config(words={"MODEL.TYPE": "swin", "TRAIN.BASE_LR": "1e-3"}).warnings
    )
    assert "TRAIN.LINEAR_SCALED_LR is 512 (default (swin))" in line


@pytest.mark.parametrize("words", [{}, {"BASE_LR": "1e-3", "LINEAR_SCALED_LR": "null"}, {"LINEAR_SCALED_LR": "512"}])
def test_expected_scaling_gives_no_warning(recipe: Path, words: dict[str, str]) -> None:
    assert warnings(recipe, **words) == ()
    assert warnings(None, BASE_LR="1e-3") == ()
