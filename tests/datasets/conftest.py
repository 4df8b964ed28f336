"""Small generated data sets on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import EpochOrder, TrainLoader, open_dataset
from utils.config.data import DataConfig

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """List files in PaddleViT's format: 12 training and 7 validation images of noise, labels 0..2."""
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

    def make() -> Path:
        for part in ("train", "val"):
            for label, name in enumerate(("ant", "bee", "cat")):
                folder = tmp_path / part / name
                folder.mkdir(parents=True)
                for number in range(label + 1):
                    Image.new("RGB", (24, 24), COLOURS[label]).save(folder / f"{number}.png")
        return tmp_path

    return make


@pytest.fixture
def settings() -> Callable[..., DataConfig]:
    """A DataConfig with small images and the settings of the test."""

    def make(**values: object) -> DataConfig:
        return DataConfig.model_validate({"IMAGE_SIZE": 8, "BATCH_SIZE": 4, **values})

    return make


@pytest.fixture
def of_shards(
    settings: Callable[..., DataConfig], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., DataConfig]:
    """Settings for shards in a folder, with a cache for this test."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda place, **more: settings(DATASET="shards", DATA_PATH=str(place), CACHE=str(cache), **more)


@pytest.fixture
def of_hub(settings: Callable[..., DataConfig], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DataConfig]:
    """Settings for a folder of parquet files, with a cache for this test."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda place, **more: settings(DATASET=f"hf:{place}", **{"CACHE": str(cache), **more})


@pytest.fixture
def training(
    listed: Path, settings: Callable[..., DataConfig], cpu: torch.device
) -> Iterator[Callable[..., TrainLoader]]:
    """Loaders of the twelve listed images, with every random transform on."""
    data = settings(DATA_PATH=str(listed), SHIFT=0.2, ZOOM=0.2, ROTATE=20, AFFINE_PROB=0.7)
    opened: list[TrainLoader] = []

    def make(batch: int = 4, accum: int = 1, workers: int = 0, seed: int = 5) -> TrainLoader:
        dataset = open_dataset(data, True, 3, seed, cpu)
        opened.append(
            TrainLoader(dataset, EpochOrder(len(dataset), batch, accum, 0, 1, seed, True), seed, workers, cpu)
        )
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()
