"""Unreadable images and failing storage: replacement in training, log lines, and the limit that ends training."""

import errno
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import PADDING, Batch, TrainLoader, ValLoader, open_dataset
from datasets.base import Broken, Samples
from datasets.damage import PAUSES, BrokenImages, allowed, is_gone
from datasets.images import Images
from datasets.transforms.pixels import Pixels
from tests.datasets.opened import CPU, part, settings
from tests.datasets.processes import in_order
from tests.refused import refusal
from tools.check_data.scan import scan_split
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError

Loaders = Callable[..., TrainLoader]


def claim_to_be_huge(path: Path) -> None:
    """A PNG of a few bytes whose header says 60,000 x 60,000."""
    png = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", 60_000, 60_000) + png[24:29]
    path.write_bytes(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])


def hold_a_huge_array(path: Path) -> None:
    """A file of numpy of 128 bytes whose header says 160 TiB."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**44, 10, 1)})


SPOILS: dict[str, Callable[[Path], object]] = {
    "bomb": claim_to_be_huge,
    "array": hold_a_huge_array,
    "text": lambda path: path.write_text("no picture at all"),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:600]),
    "missing": lambda path: path.unlink(),
}


def image(listed: Path, number: int) -> Path:
    return listed / "train" / f"{number}.png"


def epoch(loader: TrainLoader, number: int = 1) -> list[Batch]:
    return [batch for window in loader.epoch(number) for _, batch in window]


def broken_of(loader: TrainLoader) -> BrokenImages:
    assert loader.broken is not None
    return loader.broken


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spoil", SPOILS)
def test_broken_image_is_replaced_by_the_next_and_other_samples_are_unchanged(
    listed: Path, training: Loaders, said: pytest.LogCaptureFixture, spoil: str, workers: int
) -> None:
    shutil.copy(image(listed, 5), image(listed, 4))
    expected = epoch(training())
    assert not said.messages
    SPOILS[spoil](image(listed, 4))
    found = epoch(training(workers=workers))
    for batch, wanted in zip(found, expected, strict=True):
        # The pixels and the label are those of image 5, the random numbers those of image 4.
        assert torch.equal(batch.images, wanted.images)
        assert torch.equal(batch.indices, wanted.indices)
        assert batch.labels.tolist() == [(5 if i == 4 else i) % 3 for i in batch.indices.tolist()]
    assert len(said.messages) == 1
    assert str(image(listed, 4)) in said.messages[0]
    reasons = {"missing": "it does not exist", "empty": "the file is empty"}
    reasons |= dict.fromkeys(("bomb", "array"), "DATA.MAX_IMAGE_BYTES allows")
    assert reasons.get(spoil, "cannot be read") in said.messages[0]


def test_replacement_search_wraps_around_the_end(listed: Path, training: Loaders) -> None:
    for number in (10, 11, 0):
        image(listed, number).unlink()
    found = {int(i): int(y) for batch in epoch(training()) for i, y in zip(batch.indices, batch.labels, strict=True)}
    assert [found[i] for i in (9, 10, 11, 0, 1)] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_is_logged_once(
    listed: Path, training: Loaders, said: pytest.LogCaptureFixture, workers: int
) -> None:
    for number in (5, 7):
        image(listed, number).write_bytes(b"")
    loader = training(workers=workers, copies=3)
    for number in (1, 2, 3):  # each reads a third of the images, including these two
        epoch(loader, number)
    assert sorted(line.split("/")[-1].split(" ")[0] for line in said.messages) == ["5.png", "7.png"]
    assert "2 training images could not be read" in broken_of(loader).summary()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("limit", "number"), [(0, 1), (0.01, 2), (0.2, 4), (2, 3)])
def test_more_broken_images_than_max_bad_end_the_run(
    listed: Path, training: Loaders, tmp_path: Path, limit: float, number: int, workers: int
) -> None:
    """`number` is the first count beyond the limit: fractions of 12 images are rounded up."""
    broken = [2, 5, 7, 8][: number - 1]
    for one in broken:
        image(listed, one).write_bytes(b"x")
    epoch(training(workers=workers, MAX_BAD=limit))
    image(listed, 10).write_bytes(b"x")
    loader = training(workers=workers, MAX_BAD=limit)
    broken_of(loader).folder = tmp_path
    text = refusal(epoch, loader, by=TrainingError)
    assert f"{number} training image" in text
    assert f"DATA.MAX_BAD allows {number - 1}" in text
    assert "-resume" in text
    assert "\n" not in text
    names = {f"train/{one}.png" for one in [*broken, 10]}
    assert {line.split("  # ")[0] for line in (tmp_path / "broken.txt").read_text().splitlines()} == names


@pytest.mark.parametrize("read", [None, "exclude.txt", "broken.txt"])
def test_broken_list_keeps_lines_of_other_lists(
    listed: Path, training: Loaders, tmp_path: Path, said: pytest.LogCaptureFixture, read: str | None
) -> None:
    """Those of an earlier start, and of the list that the run reads, which stays as it is."""
    (tmp_path / "broken.txt").write_text("train/3.png  # long ago\n")
    (tmp_path / "exclude.txt").write_text("train/1.png\n")
    image(listed, 3).write_bytes(b"x")
    image(listed, 6).unlink()
    loader = training(batch=1, EXCLUDE=read and str(tmp_path / read))
    epoch(loader)
    for folder in (tmp_path / "gone", tmp_path / "gone", tmp_path, tmp_path):
        broken_of(loader).folder = folder
        broken_of(loader).share(World())
    assert said.text.count("gone/broken.txt cannot be written (No such file or directory)") == 1
    file, why = tmp_path / "broken.txt", "not an image in a known format"
    if read == "broken.txt":
        file, why = tmp_path / "broken-2.txt", "long ago"
    lines = ["train/1.png"] * (read == "exclude.txt") + [f"train/3.png  # {why}", "train/6.png  # it does not exist"]
    assert file.read_text().splitlines() == lines
    assert read is None or "6.png" not in (tmp_path / read).read_text()


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


def made_flaky(loader: TrainLoader | ValLoader, failures: dict[int, int], error: Exception | bytes) -> Flaky:
    images = loader._fetch.dataset
    assert isinstance(images, Images)
    images.samples = Flaky(images.samples, failures, error)
    return images.samples


EIO, STALE = OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(("error", "times"), [(EIO, 3), (STALE, 1), (b"garbage", 1)])
def test_temporary_failure_changes_no_pixels(
    training: Loaders,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    error: Exception | bytes,
    times: int,
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", (0.0, 0.0, 0.0))
    expected = in_order(training())
    loader = training()
    samples = made_flaky(loader, {4: times, 9: times}, error)
    assert in_order(loader) == expected
    assert samples.tries == 2 * times
    assert not said.messages


@pytest.mark.parametrize(
    ("error", "tries"),
    [(EIO, 4), (b"garbage", 2), *((OSError(code, "x"), 1) for code in (errno.ENOENT, errno.EACCES, errno.ELOOP))],
)
def test_number_of_retries_by_kind_of_failure(
    training: Loaders, monkeypatch: pytest.MonkeyPatch, error: Exception | bytes, tries: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("datasets.damage.time.sleep", slept.append)
    loader = training()
    samples = made_flaky(loader, {4: 99}, error)
    epoch(loader)
    assert samples.tries == tries
    assert slept == list(PAUSES) * (error is EIO), "network file systems are waited for, nothing else"


def test_lost_storage_ends_retries_in_validation_and_check_data(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("datasets.damage.time.sleep", slept.append)
    loader = ValLoader(open_dataset(settings(DATA_PATH=str(listed), PART="all"), False, 3, 0, CPU), 4, 0, 1, 0, CPU)
    lost = made_flaky(loader, dict.fromkeys(range(19), 99), EIO)
    assert all((batch.indices == PADDING).all() for batch in loader)
    scan_split("validation", lost, settings(), 0)
    assert (slept, lost.tries) == (2 * 8 * [*PAUSES], 2 * (8 * 4 + 11))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil", SPOILS)
def test_validation_raises_instead_of_replacing_broken_images(listed: Path, spoil: str, workers: int) -> None:
    SPOILS[spoil](listed / "val" / "5.png")
    loader = ValLoader(open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, CPU), 4, 0, 1, workers, CPU)
    seen = torch.cat([batch.indices for batch in loader])
    assert sorted(index for index in seen.tolist() if index != PADDING) == [0, 1, 2, 3, 4, 6]
    assert loader.broken is not None
    text = refusal(loader.broken.raise_together, ALONE, by=TrainingError)
    loader.close()
    assert f"{listed / 'val' / '5.png'} (" in text
    assert "After storage errors, when the storage is back, repeat the command" in text
    assert "DATA.EXCLUDE" in text
    assert "check_data.py" in text
    assert "\n" not in text


@pytest.fixture
def failing(training: Loaders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loaders:
    """A training loader of the twelve listed images, some of which fail with storage errors."""
    monkeypatch.setattr("datasets.damage.PAUSES", ())

    def make(lost: list[int], max_bad: float, error: Exception = EIO) -> TrainLoader:
        loader = training(MAX_BAD=max_bad)
        broken_of(loader).folder = tmp_path
        made_flaky(loader, dict.fromkeys(lost, 99), error)
        return loader

    return make


@pytest.mark.parametrize("max_bad", [0, 1, 7, 8, 1000])
def test_storage_failures_end_training_whatever_max_bad_is(failing: Loaders, max_bad: int) -> None:
    text = refusal(epoch, failing([*range(12)], max_bad), by=TrainingError)
    assert text.startswith("Storage failure: 8 training images in a row") == (max_bad >= 8)
    assert text.startswith("8 training images cannot be read, and DATA.MAX_BAD allows") == (max_bad < 8)
    assert "Input/output error" in text
    assert "when the storage is back" in text.casefold()
    assert "-resume" in text


@pytest.mark.parametrize("max_bad", [0, 1, 7, 8, 1000])
@pytest.mark.parametrize("unmounted", [True, False])
def test_removed_data_ends_training_with_one_message_and_no_list(
    failing: Loaders, listed: Path, tmp_path: Path, said: pytest.LogCaptureFixture, max_bad: int, unmounted: bool
) -> None:
    loader = failing([], max_bad)
    shutil.rmtree(listed)
    if unmounted:
        listed.mkdir()
    text = refusal(epoch, loader, by=TrainingError)
    assert text.startswith(f"The data is gone: {listed} is missing or empty. When the storage is back, resume")
    assert "if nothing is saved yet, start again" in text
    assert "cannot be read" not in said.text, "no warning for each image"
    assert not (tmp_path / "broken.txt").exists(), "the images may be intact"


def test_broken_images_at_a_url_do_not_mean_that_the_data_is_gone() -> None:
    assert not is_gone(settings(DATASET="shards", DATA_PATH="https://host/set"))
    assert not is_gone(settings(DATASET="digits"))


def test_storage_failures_are_comments_in_the_broken_list(failing: Loaders, listed: Path, tmp_path: Path) -> None:
    (listed / "train" / "2.png").write_bytes(b"x")
    loader = failing([4, 9], 3)
    for number in (1, 2):
        epoch(loader, number)
        broken_of(loader).share(World())
    file = tmp_path / "broken.txt"
    lines = sorted(file.read_text().splitlines())
    assert lines[:2] == ["# train/4.png  # Input/output error", "# train/9.png  # Input/output error"]
    assert len(lines) == 3
    assert "3 training images could not be read" in broken_of(loader).summary()
    assert len(part(settings(DATA_PATH=str(listed), EXCLUDE=str(file)))) == 11, "2.png alone is left out"


@pytest.mark.parametrize("where", ["decoding", "reading"])
def test_memory_error_is_of_the_image_that_raised_it(
    failing: Loaders, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, where: str
) -> None:
    loader = failing([4] if where == "reading" else [], 12, MemoryError())
    if where == "decoding":
        images = loader._fetch.dataset
        assert isinstance(images, Images)
        assert isinstance(images.pixels, Pixels)
        open_image, fourth = images.pixels.reader.open, images.samples.read(4)

        def starve(encoded: bytes) -> object:
            if encoded == fourth:
                raise MemoryError
            return open_image(encoded)

        monkeypatch.setattr(images.pixels.reader, "open", starve)
    epoch(loader)
    assert "1 training image could not be read" in broken_of(loader).summary()
    assert "4.png cannot be read: memory ran out while it was read; if others fail" in said.text
    assert "NUM_WORKERS" in said.text


def test_fractions_of_images_are_rounded_up_but_not_their_noise() -> None:
    assert [allowed(0.07, images) for images in (100, 101)] == [7, 8], "0.07 * 100 is a little more than 7"


def test_without_a_folder_no_list_is_named() -> None:
    broken = BrokenImages(settings(MAX_BAD=0), 1)
    with pytest.raises(TrainingError, match=r"list them in DATA\.EXCLUDE \(scripts/check_data\.py -fix FILE does\)"):
        broken.add([Broken(0, "a.jpg", "damaged", "a.jpg  # damaged")])
