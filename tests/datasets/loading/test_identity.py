"""Fingerprint by which a resumed run recognises its samples and their order."""

import shutil
from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, identity_of, open_dataset
from datasets.variants import Repeated
from tests.datasets.layouts import lay_out
from tests.datasets.shards.tar_files import picture
from utils.config.data import DataConfig

IMAGE = picture(0)


def identity(batch: int = 8, rank: int = 0, world: int = 1, seed: int = 0, copies: int = 1, **data) -> dict:
    settings = DataConfig(**{"DATASET": "digits", "IMAGE_SIZE": 8, "IMAGE_CHANNELS": 1, **data})
    part = open_dataset(settings, True, 10, seed, torch.device("cpu"))
    order = EpochOrder(len(part), batch, 1, rank, world, seed, True, copies, part.shuffled)
    return identity_of(Repeated(part, copies) if copies > 1 else part, order)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"copies": 2}])
def test_identity_changes_with_the_order(changed: dict) -> None:
    assert identity(**changed)["order"] != identity()["order"]


def test_identity_does_not_depend_on_sharding_and_augmentation() -> None:
    assert identity(IMAGE_SIZE=16, FLIP=0.0) == identity()
    assert identity(batch=4, rank=1, world=2)["order"] == identity()["order"]


SOURCES = {
    "class folders": ("imagefolder", ("train", "val")),
    "class folders to be split": ("imagefolder", ("",)),
    "lists": ("lists", ("train", "val")),
    "a table": ("csv", ("train", "val")),
    "a table of several labels": ("csv", ("train", "val")),
    "shards": ("shards", ("train", "val")),
    "shards to be split": ("shards", ("train",)),
}
NAMES = {name: number // 4 for number, name in enumerate("abcdefghijkl")}


@pytest.mark.parametrize("source", SOURCES)
def test_identity_has_the_names_and_labels_in_order(tmp_path: Path, source: str) -> None:
    """Not the place: the same data set elsewhere is the same."""
    kind, splits = SOURCES[source]
    several = "several" in source

    def made(place: str, names: dict[str, int]) -> dict:
        shutil.rmtree(tmp_path / place, ignore_errors=True)
        rows = [(f"{name}.png", "0;1" if several and label == 1 else label) for name, label in names.items()]
        given = lay_out(kind, tmp_path / place, dict.fromkeys(splits, rows), lambda _: IMAGE)
        return identity(batch=1, **given, IMAGE_CHANNELS=3, VAL_FRACTION=0.25, MULTI_LABEL=several)

    first = made("here", NAMES)
    assert made("elsewhere", NAMES) == first
    renamed = {("e1" if name == "e" else name): label for name, label in NAMES.items()}
    swapped = {**NAMES, "a": NAMES["e"], "e": NAMES["a"]}
    for change in (renamed, swapped, {**NAMES, "a": 1}):
        other = made("here", change)
        assert other["data"] != first["data"], change


def test_excluded_images_change_the_identity(listed: Path, tmp_path: Path) -> None:
    words = {"DATASET": "imagenet2012", "IMAGE_CHANNELS": 3, "DATA_PATH": str(listed)}
    first, found = tmp_path / "exclude.txt", [identity(**words)["data"]]
    for number in (0, 3):
        first.write_text(f"train/{number}.png\n")
        found.append(identity(**words, EXCLUDE=str(first))["data"])
    assert len(set(found)) == 3
