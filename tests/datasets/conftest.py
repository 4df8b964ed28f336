"""Small made-up data sets on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from utils.config.schema import DataConfig

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """List files as PaddleViT's: 12 training and 7 validation images of noise, labels 0..2."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 7)):
        (tmp_path / part).mkdir()
        lines = []
        for number in range(count):
            pixels = generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / f"{number}.png")
            lines.append(f"{part}/{number}.png {number % 3}")
        (tmp_path / f"{part}_list.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def class_tree(tmp_path: Path) -> Callable[..., Path]:
    """Class folders: class k has k + 1 images, all of colour k."""

    def make(validation: str = "val") -> Path:
        for part in ("train", validation):
            for label, name in enumerate(("ant", "bee", "cat")):
                folder = tmp_path / part / name
                folder.mkdir(parents=True)
                for number in range(label + 1):
                    Image.new("RGB", (24, 24), COLOURS[label]).save(folder / f"{number}.png")
        return tmp_path

    return make


@pytest.fixture
def settings() -> Callable[..., DataConfig]:
    """A DataConfig with small images, and what the test gives."""

    def make(**values: object) -> DataConfig:
        return DataConfig.model_validate({"IMAGE_SIZE": 8, "BATCH_SIZE": 4, **values})

    return make
