"""Fingerprint by which a resumed run recognises its samples and their order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, identity_of, open_dataset
from datasets.variants import Repeated
from tests.datasets.shards.tar_files import samples, write_tar
from tests.program import save_image
from utils.config.data import DataConfig

CLASSES = ("ant", "bee", "cat")


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


def write_folders(root: Path, names: dict[str, int]) -> None:
    for name, label in names.items():
        for split in ("train", "val"):
            save_image(root / split / CLASSES[label] / f"{name}.jpg", seed=0)


def write_unsplit_folders(root: Path, names: dict[str, int]) -> None:
    for name, label in names.items():
        save_image(root / CLASSES[label] / f"{name}.jpg", seed=0)


def write_lists(root: Path, names: dict[str, int]) -> None:
    for split in ("train", "val"):
        for name in names:
            save_image(root / split / f"{name}.jpg", seed=0)
        lines = [f"{split}/{name}.jpg {label}\n" for name, label in names.items()]
        (root / f"{split}_list.txt").write_text("".join(lines))


def write_table(root: Path, names: dict[str, int]) -> None:
    for name in names:
        save_image(root / f"{name}.jpg", seed=0)
    lines = ["path,target\n", *(f"{name}.jpg,{CLASSES[label]}\n" for name, label in names.items())]
    for split in ("train", "val"):
        (root / f"{split}.csv").write_text("".join(lines))


def write_label_sets(root: Path, names: dict[str, int]) -> None:
    write_table(root, names)
    for split in ("train", "val"):
        text = (root / f"{split}.csv").read_text()
        (root / f"{split}.csv").write_text(text.replace(",bee", ",bee;ant"))


def write_shards(root: Path, names: dict[str, int]) -> None:
    image = samples([0])[0][1]
    members = [
        (f"{name}.{kind}", f"{label}".encode() if kind == "cls" else image)
        for name, label in names.items()
        for kind in ("png", "cls")
    ]
    for split in ("train", "val"):
        write_tar(root / split / "0.tar", members)


def write_unsplit_shards(root: Path, names: dict[str, int]) -> None:
    write_shards(root, names)
    shutil.rmtree(root / "val")


Write = Callable[[Path, dict[str, int]], None]
WRITERS: dict[str, tuple[Write, str]] = {
    "class folders": (write_folders, "imagefolder"),
    "class folders to be split": (write_unsplit_folders, "imagefolder"),
    "lists": (write_lists, "imagenet2012"),
    "a table": (write_table, "csv"),
    "a table of several labels": (write_label_sets, "csv"),
    "shards": (write_shards, "shards"),
    "shards to be split": (write_unsplit_shards, "shards"),
}
NAMES = {name: number // 4 for number, name in enumerate("abcdefghijkl")}


@pytest.mark.parametrize("source", WRITERS)
def test_identity_has_the_names_and_labels_in_order(tmp_path: Path, source: str) -> None:
    """Not the place: the same data set elsewhere is the same."""
    write, dataset = WRITERS[source]

    def made(place: str, names: dict[str, int]) -> dict:
        shutil.rmtree(tmp_path / place, ignore_errors=True)
        write(tmp_path / place, names)
        several = {"MULTI_LABEL": True} if "several" in source else {}
        words = {"CACHE": str(tmp_path / f"cache-{place}"), "VAL_FRACTION": 0.25, **several}
        return identity(batch=1, DATASET=dataset, IMAGE_CHANNELS=3, DATA_PATH=str(tmp_path / place), **words)

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
