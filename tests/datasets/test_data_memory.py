"""A list as long as ImageNet's (1,281,167 images) is shared by loading processes."""

import itertools
import multiprocessing
import os
import tracemalloc
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from datasets import Batch, EpochOrder, TrainLoader, open_dataset
from datasets.sources import files
from datasets.sources.imagefolder import class_files
from datasets.variants import Variant
from tests.datasets.opened import CPU
from tests.program import save_image
from utils.config.data import DataConfig

IMAGES, CLASSES = 1_281_167, 1000
PER_FOLDER = -(-IMAGES // CLASSES)
WORKERS, BATCH = 4, 8192
MOST_PRIVATE_MB = 60
"""A list of Python strings takes 115 MB in each worker, this table 15."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list as long as ImageNet's, whose paths all lead to one small image."""
    root = tmp_path_factory.mktemp("imagenet")
    folder = root / "images"
    save_image(folder / "0.JPEG", seed=1)
    for number in range(1, PER_FOLDER):
        os.link(folder / "0.JPEG", folder / f"{number}.JPEG")
    (root / "train").mkdir()
    for label in range(CLASSES):
        (root / "train" / f"n{label:08d}").symlink_to(folder)
    lines = (f"train/n{i % CLASSES:08d}/{i // CLASSES}.JPEG {i % CLASSES}\n" for i in range(IMAGES))
    (root / "train_list.txt").write_text("".join(lines), encoding="utf-8")
    return root


class LookedUp(Variant):
    """Names and labels of samples without their images, so that an epoch takes seconds, not an hour."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        indices, samples = [index for _, index in keys], self.inner.single_images()
        assert samples is not None
        letters = sum(len(samples.name(index)) for index in indices)
        labels = torch.tensor([int(samples.labels[index]) for index in indices])
        return Batch(torch.tensor([letters]), labels, torch.tensor(indices))


def test_workers_share_the_path_table(imagenet: Path) -> None:
    """Python strings would be copied into a worker when it reads them, all of them within an epoch.

    A quarter of an epoch is enough: in random order, it touches nearly every page of memory. Modules imported before
    the fork stay shared, so what is private is the cost of the data plus a little.
    """
    data = DataConfig(DATASET="imagenet2012", DATA_PATH=str(imagenet), IMAGE_SIZE=16)
    dataset = LookedUp(open_dataset(data, True, CLASSES, 0, CPU))
    assert len(dataset) == IMAGES
    order = EpochOrder(IMAGES, BATCH, 1, 0, 1, 0, drop_last=True)
    loader = TrainLoader(dataset, order, 0, WORKERS, CPU)
    others, seen = set(multiprocessing.active_children()), 0
    try:
        for window in itertools.islice(loader.epoch(1), IMAGES // 4 // BATCH):
            seen += sum(len(one.indices) for _, one in window)
        private = [private_megabytes(worker) for worker in set(multiprocessing.active_children()) - others]
    finally:
        loader.close()
    assert seen > 0.99 * (IMAGES // 4)
    assert len(private) == WORKERS
    assert max(private) < MOST_PRIVATE_MB, private


def test_listing_folders_takes_little_more_than_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """Two Python strings per image would take four times as much."""
    monkeypatch.setattr(files, "SECONDS_TO_REPORT", 0.0)
    save_image(tmp_path / "0.png", seed=1)
    names = [f"{label:02}" for label in range(20)]
    for name in names:
        (tmp_path / name).mkdir()
        for number in range(500):
            os.link(tmp_path / "0.png", tmp_path / name / f"photograph-{number:05}.png")
    tracemalloc.start()
    try:
        found = class_files(tmp_path, names)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(found.paths) == [f"{name}/photograph-{number:05}.png" for name in names for number in range(500)]
    assert found.labels.tolist() == [label for label in range(20) for _ in range(500)]
    assert peak < 10_000 * 110
    assert "Listing images: 10,000 so far, the last: 19/photograph-00499.png" in said.text


def private_megabytes(process: BaseProcess) -> float:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1000
