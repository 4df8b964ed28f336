"""Recognising the layout of DATA_PATH, and counting the classes of a data set."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from datasets import count_classes
from datasets.recognise import recognise
from tests.program import save_image
from utils.config import DataConfig
from utils.errors import UserError


def class_folders(root: Path, *splits: str, classes: int = 2) -> None:
    for split in splits:
        for number in range(classes * 3):
            save_image(root / split / f"class_{number % classes}" / f"{number}.jpg", number, (8, 8))


def lists(root: Path) -> None:
    save_image(root / "images" / "1.jpg", 1, (8, 8))
    for name in ("train_list.txt", "val_list.txt"):
        (root / name).write_text("images/1.jpg 0\nimages/1.jpg 4\n")


def tables(root: Path) -> None:
    save_image(root / "images" / "1.jpg", 1, (8, 8))
    for name in ("train.csv", "val.csv"):
        (root / name).write_text("path,target\nimages/1.jpg,cat\nimages/1.jpg,dog\nimages/1.jpg,owl\n")


def shards(root: Path) -> None:
    save_image(root / "1.jpg", 1, (8, 8))
    (root / "1.cls").write_text("6")
    for name in ("train", "val"):
        (root / name).mkdir()
        with tarfile.open(root / name / "0000.tar", "w") as tar:
            tar.add(root / "1.jpg", "1.jpg")
            tar.add(root / "1.cls", "1.cls")


@pytest.mark.parametrize(
    ("make", "name", "what", "classes"),
    [
        (lists, "imagenet2012", "train_list.txt and val_list.txt", 5),
        (tables, "csv", "train.csv and val.csv", 3),
        (shards, "shards", "tar files", 7),
        (lambda root: class_folders(root, "train", "val"), "imagefolder", "class folders in train/ and val/", 2),
        (lambda root: class_folders(root, "."), "imagefolder", "class folders without train/ and val/", 2),
    ],
)
def test_layout_is_recognised_and_its_classes_are_counted(
    tmp_path: Path,
    make,
    name: str,
    what: str,
    classes: int,
) -> None:
    make(tmp_path)
    found = recognise(str(tmp_path))
    assert found is not None
    assert found[0] == name
    assert f"{tmp_path} has {what}" in found[1]
    data = DataConfig(DATASET=name, DATA_PATH=str(tmp_path), CACHE=str(tmp_path / "cache"))
    assert count_classes(data, train=True) == classes


def test_lists_take_precedence_and_the_other_layout_is_named(tmp_path: Path) -> None:
    lists(tmp_path)
    class_folders(tmp_path, "train", "val")
    name, what = recognise(str(tmp_path)) or ("", "")
    assert name == "imagenet2012"
    assert "it also has class folders in train/ and val/, which -dataset imagefolder reads" in what


def test_a_csv_file_and_a_url_are_recognised_by_their_names(tmp_path: Path) -> None:
    tables(tmp_path)
    assert (recognise(str(tmp_path / "train.csv")) or [""])[0] == "csv"
    assert (recognise("s3://bucket/flowers") or [""])[0] == "shards"


def test_unknown_layout_is_an_error_with_the_known_ones(tmp_path: Path) -> None:
    save_image(tmp_path / "1.jpg", 1, (8, 8))
    with pytest.raises(UserError) as caught:
        recognise(str(tmp_path))
    said = str(caught.value)
    assert f"the layout of {tmp_path} is not recognised. Name the data set with -dataset" in said
    assert all(word in said for word in ("train_list.txt", "train.csv", "0000.tar", "<class>"))
    assert recognise(str(tmp_path / "nowhere")) is None, "the data set's own check reports it"


def test_synthetic_images_have_no_number_of_classes() -> None:
    with pytest.raises(UserError, match="give a number, as in -num_classes 10"):
        count_classes(DataConfig(DATASET="synthetic"), train=True)
    assert count_classes(DataConfig(DATASET="digits", IMAGE_CHANNELS=1), train=True) == 10
