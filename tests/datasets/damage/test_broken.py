"""Unreadable images: replacement in training, log lines, and the limit that ends training."""

from __future__ import annotations

import errno
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import PADDING, Batch, EpochOrder, TrainLoader, ValLoader, open_dataset
from datasets.base import Samples
from datasets.damage import PAUSES, BrokenImages
from datasets.images import Images
from datasets.variants import Repeated
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError

Settings = Callable[..., DataConfig]
Spoil = Callable[[Path], object]


def claim_to_be_huge(path: Path) -> None:
    """A PNG of a few bytes whose header says 60,000 x 60,000."""
    png = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", 60_000, 60_000) + png[24:29]
    path.write_bytes(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])


SPOILS: dict[str, Spoil] = {
    "bomb": claim_to_be_huge,
    "text": lambda path: path.write_text("no picture at all"),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:600]),
    "missing": lambda path: path.unlink(),
}


class Loaders:
    """Training loaders of the twelve listed images, with every random transform on."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self.opened: list[TrainLoader] = []

    def __call__(self, workers: int = 0, copies: int = 1, batch: int = 4, **values: object) -> TrainLoader:
        given = {"SHIFT": 0.2, "ZOOM": 0.2, "ROTATE": 20, "AFFINE_PROB": 0.7, "MAX_BAD": 6, **values}
        cpu = torch.device("cpu")
        dataset = open_dataset(self.settings(DATA_PATH=str(self.root), **given), True, 3, 5, cpu)
        order = EpochOrder(len(dataset), batch, 1, 0, 1, 5, True, copies)
        if copies > 1:
            dataset = Repeated(dataset, copies)
        self.opened.append(TrainLoader(dataset, order, 5, workers, cpu))
        return self.opened[-1]

    def image(self, number: int) -> Path:
        return self.root / "train" / f"{number}.png"


@pytest.fixture
def loaders(listed: Path, settings: Settings) -> Iterator[Loaders]:
    made = Loaders(listed, settings)
    yield made
    for loader in made.opened:
        loader.close()


def epoch(loader: TrainLoader, number: int = 1) -> list[Batch]:
    return [batch for window in loader.epoch(number) for _, batch in window]


def broken_of(loader: TrainLoader) -> BrokenImages:
    assert loader.broken is not None
    return loader.broken


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for batch, twin in zip(one, other, strict=True) for a, b in zip(batch, twin, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spoil", SPOILS)
def test_broken_image_is_replaced_by_the_next_and_other_samples_are_unchanged(
    loaders: Loaders, said: pytest.LogCaptureFixture, spoil: str, workers: int
) -> None:
    shutil.copy(loaders.image(5), loaders.image(4))
    expected = epoch(loaders())
    assert not said.messages
    SPOILS[spoil](loaders.image(4))
    found = epoch(loaders(workers))
    for batch, wanted in zip(found, expected, strict=True):
        # The pixels and the label are those of image 5, the random numbers those of image 4.
        assert torch.equal(batch.images, wanted.images)
        assert torch.equal(batch.indices, wanted.indices)
        assert batch.labels.tolist() == [(5 if i == 4 else i) % 3 for i in batch.indices.tolist()]
    assert len(said.messages) == 1
    assert str(loaders.image(4)) in said.messages[0]
    reasons = {"missing": "it does not exist", "empty": "the file is empty", "bomb": "PIL's limit"}
    assert reasons.get(spoil, "cannot be read") in said.messages[0]


def test_replacement_search_wraps_around_the_end(loaders: Loaders) -> None:
    for number in (10, 11, 0):
        loaders.image(number).unlink()
    found = {int(i): int(y) for batch in epoch(loaders()) for i, y in zip(batch.indices, batch.labels, strict=True)}
    assert [found[i] for i in (9, 10, 11, 0, 1)] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_is_logged_once(loaders: Loaders, said: pytest.LogCaptureFixture, workers: int) -> None:
    loaders.image(5).write_bytes(b"")
    loaders.image(7).write_bytes(b"")
    loader = loaders(workers, copies=3)
    for number in (1, 2, 3):  # each reads a third of the images, including these two
        epoch(loader, number)
    assert sorted(line.split("/")[-1].split(" ")[0] for line in said.messages) == ["5.png", "7.png"]
    assert "2 training images could not be read" in broken_of(loader).summary()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("limit", "number"), [(0, 1), (0.01, 2), (0.2, 4), (2, 3)])
def test_more_broken_images_than_max_bad_end_the_run(
    loaders: Loaders, tmp_path: Path, limit: float, number: int, workers: int
) -> None:
    """`number` is the first count beyond the limit: fractions of 12 images are rounded up."""
    broken = [2, 5, 7, 8][: number - 1]
    for one in broken:
        loaders.image(one).write_bytes(b"x")
    epoch(loaders(workers, MAX_BAD=limit))
    loaders.image(10).write_bytes(b"x")
    loader = loaders(workers, MAX_BAD=limit)
    broken_of(loader).folder = tmp_path
    with pytest.raises(TrainingError) as caught:
        epoch(loader)
    text = str(caught.value)
    assert f"{number} training image" in text
    assert f"DATA.MAX_BAD allows {number - 1}" in text
    assert "-resume" in text
    assert "\n" not in text
    names = {f"train/{one}.png" for one in [*broken, 10]}
    assert {line.split("  # ")[0] for line in (tmp_path / "broken.txt").read_text().splitlines()} == names


def test_broken_list_keeps_lines_of_an_earlier_start(loaders: Loaders, tmp_path: Path) -> None:
    (tmp_path / "broken.txt").write_text("train/3.png  # long ago\n")
    loaders.image(3).write_bytes(b"x")
    loaders.image(6).unlink()
    loader = loaders()
    broken_of(loader).folder = tmp_path
    epoch(loader)
    broken_of(loader).share(World())
    assert (tmp_path / "broken.txt").read_text().splitlines() == [
        "train/3.png  # long ago",
        "train/6.png  # it does not exist",
    ]


class Flaky(Samples):
    """Samples whose storage fails a number of times before each image."""

    def __init__(self, good: Samples, failures: dict[int, int], error: Exception | bytes) -> None:
        self.good, self.failures, self.error = good, failures, error
        self.labels, self.tries = good.labels, 0

    def read(self, index: int) -> bytes | np.ndarray:
        if not self.failures.get(index):
            return self.good.read(index)
        self.failures[index] -= 1
        self.tries += 1
        if isinstance(self.error, bytes):
            return self.error
        raise self.error

    def name(self, index: int) -> str:
        return self.good.name(index)


EIO, STALE = OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(("error", "times"), [(EIO, 3), (STALE, 1), (b"garbage", 1)])
def test_temporary_failure_changes_no_pixels(
    loaders: Loaders,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    error: Exception | bytes,
    times: int,
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", (0.0, 0.0, 0.0))
    expected = epoch(loaders())
    loader = loaders()
    images = loader._fetch.dataset
    assert isinstance(images, Images)
    images.samples = Flaky(images.samples, {4: times, 9: times}, error)
    assert same(epoch(loader), expected)
    assert images.samples.tries == 2 * times
    assert not said.messages


@pytest.mark.parametrize(
    ("error", "tries"),
    [(EIO, 4), (b"garbage", 2), (FileNotFoundError(2, "x"), 1), (PermissionError(13, "Permission denied"), 1)],
)
def test_number_of_retries_by_kind_of_failure(
    loaders: Loaders, monkeypatch: pytest.MonkeyPatch, error: Exception | bytes, tries: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("datasets.damage.time.sleep", slept.append)
    loader = loaders()
    images = loader._fetch.dataset
    assert isinstance(images, Images)
    images.samples = Flaky(images.samples, {4: 99}, error)
    epoch(loader)
    assert images.samples.tries == tries
    assert slept == list(PAUSES) * (error is EIO), "network file systems are waited for, nothing else"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil", SPOILS)
def test_validation_raises_instead_of_replacing_broken_images(
    listed: Path, settings: Settings, cpu: torch.device, spoil: str, workers: int
) -> None:
    SPOILS[spoil](listed / "val" / "5.png")
    loader = ValLoader(open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, cpu), 4, 0, 1, workers, cpu)
    seen = torch.cat([batch.indices for batch in loader])
    assert sorted(index for index in seen.tolist() if index != PADDING) == [0, 1, 2, 3, 4, 6]
    assert loader.broken is not None
    with pytest.raises(TrainingError) as caught:
        loader.broken.raise_together(ALONE)
    loader.close()
    text = str(caught.value)
    assert f"{listed / 'val' / '5.png'} (" in text
    assert "DATA.EXCLUDE" in text
    assert "check_data.py" in text
    assert "\n" not in text
