"""All tests here are skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import KIND, SMALL, Run, Train
from tests.program import Result


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if KIND == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def train(vitamp: Callable[..., Result], small: Path, tmp_path: Path) -> Train:
    def call(name: str, *words: object, updates: int | None = 12, code: int = 0, **options: object) -> Run:
        limit = [] if updates is None else [f"TRAIN.MAX_UPDATES={updates}"]
        done = vitamp("-cfg", small, "-output", tmp_path / name, *limit, *words, **{"timeout": 240, **options})
        assert done.code == code, done.text
        return Run(tmp_path / name, done)

    return call
