"""Batches of the next epoch and of the next validation are loaded before they are asked for, and nothing else."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import TrainLoader, ValLoader, open_dataset
from datasets.base import Batch
from datasets.variants import Sized, Variant
from tests.datasets.opened import CPU, settings
from tests.datasets.processes import in_order
from tests.program import Result, Vitamp, metrics
from tests.waiting import until
from utils.config.train import TrainConfig

OWN = """
import os, signal, time
from pathlib import Path
from torch.nn import functional as F
from vitamp import augmentation, loss

PROCESS = os.getpid()

def note(word):
    with open(os.environ["NOTES"], "a") as file:
        file.write(word + "\\n")

@augmentation
def noted(image):
    if os.getpid() != PROCESS:
        note("image")
    return image

@loss
def slow(logits, targets, kills: int = 0):
    if not logits.is_leaf:  # they are of an update, not of a trial
        time.sleep(0.3)
        note("update")
        if Path(os.environ["NOTES"]).read_text().count("update") == kills:
            children = Path(f"/proc/self/task/{PROCESS}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
    return F.cross_entropy(logits, targets)
"""
MODEL = "-dataset imagenet2012 -batch_size 4 -num_workers 1 -epochs 3 DATA.IMAGE_CHANNELS=3 MODEL.NUM_CLASSES=3"


@pytest.fixture
def train(vitamp: Vitamp, tiny: Path, listed: Path, tmp_path: Path) -> Callable[..., Result]:
    """Three epochs of three updates, with a loss and an augmentation that write a line into the file notes."""
    own, env = tmp_path / "own.py", {"NOTES": str(tmp_path / "notes")}
    own.write_text(OWN)
    words = ("-cfg", tiny, "-data_path", listed, "-output", tmp_path / "run", *MODEL.split())
    return lambda *more, code: vitamp(*words, "-use", own, "TRAIN.LOSS=slow", *more, env=env, code=code)


def test_an_epochs_last_update_finds_the_next_epoch_begun(train: Callable[..., Result], tmp_path: Path) -> None:
    train("TRAIN.AUGMENT=noted", code=0)
    notes = (tmp_path / "notes").read_text().split()
    assert notes.count("image") == 3 * 12, "each image once in each epoch, and none after the last"
    done = [place for place, word in enumerate(notes) if word == "update"]
    assert len(done) == 9
    for epoch in (1, 2):
        assert notes[: done[3 * epoch - 1]].count("image") >= 12 * epoch + 4


def test_a_process_killed_while_it_loads_a_validation_ahead_costs_no_training(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    died = train("slow.kills=3", "TRAIN.PATIENCE=2", code=1)
    assert "was killed by SIGKILL" in died.err
    assert "The training so far is saved; -resume repeats this validation." in died.err
    train("-resume", "auto", code=0)
    assert [line["epoch"] for line in metrics(tmp_path / "run", "val")] == [1, 2, 3]


def growing(images: Variant) -> Sized:
    return Sized(images, TrainConfig(NUM_EPOCHS=4, SIZE_SCHEDULE=((0.0, 8), (0.5, 16))), 16)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_in_a_row_have_the_batches_of_each(training: Callable[..., TrainLoader], workers: int) -> None:
    """Images grow in epoch 3. Two processes hold four batches, and an epoch has three."""
    fresh = training(around=growing)
    expected = [in_order(fresh, epoch) for epoch in (1, 2, 3, 4)]
    windows = training(around=growing, workers=workers).epochs(range(1, 5), start=1)
    batches = [batch for window in windows for _, batch in window]
    found = [(one.indices.tolist(), one.labels.tolist(), one.images.numpy().tobytes()) for one in batches]
    assert found == list(itertools.chain(expected[0][1:], *expected[1:]))


class Noting(Variant):
    """Writes a line for each batch."""

    notes = Path()

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        with self.notes.open("a") as file:
            file.write(f"{keys[0][1]}\n")
        return self.inner.__getitems__(keys)


def test_validation_is_loaded_ahead_for_so_many_passes(listed: Path, tmp_path: Path) -> None:
    dataset = Noting(open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, CPU))
    dataset.notes = tmp_path / "notes"
    loader = ValLoader(dataset, 2, 0, 1, 1, CPU)
    expected = list(range(0, len(dataset), 2))

    def loaded() -> list[int]:
        return list(map(int, dataset.notes.read_text().split())) if dataset.notes.exists() else []

    def validate() -> list[int]:
        return [int(batch.indices[0]) for batch in loader]

    loader.load_ahead(2)
    until(lambda: loaded() == expected[:2], 20)
    loader.load_ahead(2)
    assert validate() == expected
    until(lambda: loaded() == expected + expected[:2], 20)
    assert validate() == expected
    assert validate() == expected
    assert loaded() == 3 * expected, "nothing was loaded twice, or for a pass that nobody announced"
    loader.load_ahead(1)
    next(iter(loader))
    assert validate() == expected, "the pass after one that was broken off is whole"
    loader.close()
