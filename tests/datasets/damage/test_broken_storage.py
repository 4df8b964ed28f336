"""Failures that are not the image's fault: storage errors and running out of memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, TrainLoader, ValLoader, open_dataset
from datasets.images import Images
from datasets.transforms.pixels import Pixels
from tests.datasets.damage.test_broken import Flaky, broken_of, epoch
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
    assert text.startswith("8 training images cannot be read, and DATA.MAX_BAD allows") == (max_bad < 8)
    assert "Input/output error" in text
    assert "when the storage is back" in text.casefold()
    assert "-resume" in text


def test_validation_error_after_storage_failure_does_not_blame_the_file(
    listed: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", ())
    images = open_dataset(settings(DATA_PATH=str(listed)), False, 3, 5, torch.device("cpu"))
    assert isinstance(images, Images)
    images.samples = Flaky(images.samples, {2: 99}, EIO)
    loader = ValLoader(images, 4, 0, 1, 0, torch.device("cpu"))
    assert sum(int((batch.indices >= 0).sum()) for batch in loader) == len(images) - 1
    assert loader.broken is not None
    with pytest.raises(TrainingError, match=r"Input/output error.*when the storage is back, repeat the command"):
        loader.broken.raise_together(ALONE)


def test_storage_failures_are_comments_in_the_broken_list(
    failing: Callable[..., TrainLoader], listed: Path, settings: Settings, tmp_path: Path
) -> None:
    (listed / "train" / "2.png").write_bytes(b"x")
    loader = failing([4, 9], 3)
    broken_of(loader).folder = tmp_path
    for number in (1, 2):
        epoch(loader, number)
        broken_of(loader).share(World())
    file = tmp_path / "broken.txt"
    lines = sorted(file.read_text().splitlines())
    assert lines[:2] == ["# train/4.png  # Input/output error", "# train/9.png  # Input/output error"]
    assert len(lines) == 3
    assert "3 training images could not be read" in broken_of(loader).summary()
    data = settings(DATA_PATH=str(listed), EXCLUDE=str(file))
    images = open_dataset(data, True, 3, 5, torch.device("cpu"))
    assert isinstance(images, Images)
    assert len(images) == 11, "2.png alone is left out"


@pytest.mark.parametrize("where", ["decoding", "reading"])
def test_memory_error_is_not_a_broken_image(
    failing: Callable[..., TrainLoader], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    loader = failing([4] if where == "reading" else [], 12, MemoryError())
    if where == "decoding":

        def starve(*_: object) -> None:
            raise MemoryError

        images = loader._fetch.dataset
        assert isinstance(images, Images)
        assert isinstance(images.pixels, Pixels)
        monkeypatch.setattr(images.pixels.reader, "open", starve)
    with pytest.raises(TrainingError, match=r"Memory ran out.*NUM_WORKERS.*-resume"):
        epoch(loader)
    assert broken_of(loader).summary() == ""
