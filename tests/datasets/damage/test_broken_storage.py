"""Failures that are not the image's fault: storage errors and running out of memory."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, TrainLoader, ValLoader, open_dataset
from datasets.base import Broken
from datasets.damage import BrokenImages
from datasets.images import Images
from datasets.transforms.pixels import Pixels
from tests.datasets.damage.test_broken import Flaky, epoch
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError

Settings = Callable[..., DataConfig]
EIO = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def failing(listed: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainLoader]:
    """A training loader of the twelve listed images, some of which fail with storage errors."""
    monkeypatch.setattr("datasets.damage.PAUSES", ())

    def make(lost: list[int], max_bad: float, error: Exception = EIO) -> TrainLoader:
        cpu = torch.device("cpu")
        images = open_dataset(settings(DATA_PATH=str(listed), MAX_BAD=max_bad), True, 3, 5, cpu)
        assert isinstance(images, Images)
        images.samples = Flaky(images.samples, dict.fromkeys(lost, 99), error)
        return TrainLoader(images, EpochOrder(12, 4, 1, 0, 1, 5, True, 1), 5, 0, cpu)

    return make


@pytest.mark.parametrize("max_bad", [0, 1, 7, 8, 1000])
def test_storage_failures_end_training_whatever_max_bad_is(failing: Callable[..., TrainLoader], max_bad: int) -> None:
    with pytest.raises(TrainingError) as caught:
        epoch(failing(list(range(12)), max_bad))
    text = str(caught.value)
    assert text.startswith("Storage failure: 8 training images in a row") == (max_bad >= 8)
    assert text.startswith("8 training images could not be read, and DATA.MAX_BAD allows") == (max_bad < 8)
    assert "Input/output error" in text
    assert "-resume" in text
    assert "DATA.EXCLUDE" not in text
    assert "raise DATA.MAX_BAD" not in text


def test_validation_error_after_storage_failure_does_not_blame_the_file(
    listed: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", ())
    images = open_dataset(settings(DATA_PATH=str(listed)), False, 3, 5, torch.device("cpu"))
    assert isinstance(images, Images)
    images.samples = Flaky(images.samples, {2: 99}, EIO)
    loader = ValLoader(images, 4, 0, 1, 0, torch.device("cpu"))
    assert sum(int((batch.indices >= 0).sum()) for batch in loader) == len(images) - 1
    with pytest.raises(
        TrainingError, match=r"Input/output error.*when the storage is back, repeat the command"
    ) as caught:
        loader.broken.raise_together(ALONE)
    assert "DATA.EXCLUDE" not in str(caught.value)


def test_storage_failures_are_comments_in_the_broken_list(
    failing: Callable[..., TrainLoader], listed: Path, settings: Settings, tmp_path: Path
) -> None:
    (listed / "train" / "2.png").write_bytes(b"x")
    loader = failing([4, 9], 3)
    loader.broken.write_into(tmp_path)
    for number in (1, 2):
        epoch(loader, number)
        loader.broken.share(World())
    file = tmp_path / "broken.txt"
    lines = sorted(file.read_text().splitlines())
    assert lines[:2] == ["# train/4.png  # Input/output error", "# train/9.png  # Input/output error"]
    assert len(lines) == 3
    assert "3 training images could not be read" in loader.broken.summary()
    assert "except for 2 with storage errors" in loader.broken.summary()
    data = settings(DATA_PATH=str(listed), EXCLUDE=str(file))
    images = open_dataset(data, True, 3, 5, torch.device("cpu"))
    assert isinstance(images, Images)
    assert len(images) == 11, "2.png alone is left out"


def test_storage_failures_beyond_max_bad_do_not_suggest_exclude(failing: Callable[..., TrainLoader]) -> None:
    """It counts like any other failure, but the message does not suggest excluding intact files."""
    with pytest.raises(TrainingError) as caught:
        epoch(failing([1, 4, 9], 2))
    text = str(caught.value)
    assert "3 training images could not be read, and DATA.MAX_BAD allows 2" in text
    assert "3 of them failed with storage errors" in text
    assert "DATA.EXCLUDE" not in text


def test_damage_replaces_an_earlier_storage_failure() -> None:
    broken = BrokenImages(5)
    broken.add([Broken(3, "a/3.png", "Input/output error", "# 3.png", storage=True)])
    broken.add([Broken(3, "a/3.png", "cut off", "3.png")])
    broken.add([Broken(3, "a/3.png", "Input/output error", "# 3.png", storage=True)])
    assert "1 training image could not be read" in broken.summary()
    assert "storage errors" not in broken.summary()


def test_log_line_of_the_image_beyond_max_bad_counts_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    broken = BrokenImages(1)
    broken.add([Broken(3, "3.png", "cut off", "3.png")])
    with pytest.raises(TrainingError):
        broken.add([Broken(4, "4.png", "cut off", "4.png")])
    first, second = (record.getMessage() for record in caplog.records)
    assert "The next image replaces it. (1 so far; DATA.MAX_BAD allows 1.)" in first
    assert second.endswith("4.png cannot be read: cut off. (2 so far; DATA.MAX_BAD allows 1.)")


@pytest.mark.parametrize("where", ["decoding", "reading"])
def test_memory_error_is_not_a_broken_image(
    failing: Callable[..., TrainLoader], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    loader = failing([4] if where == "reading" else [], 12, MemoryError())
    if where == "decoding":

        def starve(*_: object) -> None:
            raise MemoryError

        images = loader._feed._fetch.dataset
        assert isinstance(images, Images)
        assert isinstance(images.pixels, Pixels)
        monkeypatch.setattr(images.pixels.reader, "open", starve)
    with pytest.raises(TrainingError, match=r"Memory ran out.*NUM_WORKERS.*-resume"):
        epoch(loader)
    assert loader.broken.summary() == ""
