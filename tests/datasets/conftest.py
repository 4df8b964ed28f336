"""Small generated data sets on disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datasets import EpochOrder, TrainLoader, open_dataset
from datasets.variants import Repeated
from tests.datasets.opened import CPU, settings

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


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
def class_tree(tmp_path: Path) -> Path:
    """Class folders: class k has k + 1 images, all of colour k."""
    for part in ("train", "val"):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(label + 1):
                Image.new("RGB", (24, 24), COLOURS[label]).save(folder / f"{number}.png")
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that DATA.CACHE names if it is not set."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("utils.cache.DEFAULT", str(folder))
    return folder


@pytest.fixture
def training(listed: Path) -> Iterator[Callable[..., TrainLoader]]:
    """Loaders of the twelve listed images, with every random transform on."""
    opened: list[TrainLoader] = []

    def make(
        *,
        batch: int = 4,
        accum: int = 1,
        workers: int = 0,
        copies: int = 1,
        around: Any = lambda one: one,
        **values: object,
    ) -> TrainLoader:
        given = {"SHIFT": 0.2, "ZOOM": 0.2, "ROTATE": 20, "AFFINE_PROB": 0.7, "MAX_BAD": 6, **values}
        dataset = around(open_dataset(settings(DATA_PATH=str(listed), **given), True, 3, 5, CPU))
        order = EpochOrder(len(dataset), batch, accum, 0, 1, 5, True, copies)
        opened.append(TrainLoader(Repeated(dataset, copies) if copies > 1 else dataset, order, 5, workers, CPU))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()
