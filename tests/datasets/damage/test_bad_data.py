"""Bad input: every message says what is wrong, where, and what to do."""

import re
from pathlib import Path

import pytest

from datasets import check_dataset, open_dataset
from datasets.labels import ANY_LABEL
from tests.datasets.opened import CPU, settings
from tests.refused import refusal
from utils.config.data import DataConfig
from utils.errors import UserError


def complaint(data: DataConfig, num_classes: int = 3) -> str:
    """Message of the check before a run."""
    return refusal(check_dataset, data, num_classes)


@pytest.mark.parametrize("name", ["imagenet2012", "imagefolder"])
def test_data_path_without_data_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    expected = tmp_path / "empty" / {"imagenet2012": "train_list.txt", "imagefolder": "train"}[name]
    for place, *said in (
        (None, "DATA.DATA_PATH (-data_path)"),
        ("none", f"{tmp_path / 'none'} does not exist"),
        ("file", "is a file"),
        ("empty", str(expected), "Expected layout"),
    ):
        found = complaint(settings(DATASET=name, DATA_PATH=place and str(tmp_path / place)))
        assert all(words in found for words in said), found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(
            (f"train/0.png 0\n\n{line}\n", r"\S+/train_list\.txt:3: .*relative/path\.JPEG label")
            for line in ("train/0.png", "train/0.png x", "train/0.png 1.5", "7")
        ),
        *(
            (f"{path} 0\n", rf"\S+/train_list\.txt:1: {path} ")
            for path in ("/etc/passwd", "../other/1.png", "train/../../1.png")
        ),
        ("images/0.png 0\n", r".*there is no file \S+/images/0\.png"),
        ("\n", r".*train_list\.txt is empty"),
        (b"\xff\xfe\x00\x81", r".*train_list\.txt cannot be read"),
    ],
)
def test_bad_list_is_refused(listed: Path, content: str | bytes, said: str) -> None:
    (listed / "train_list.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.match(f"(?s){said}", complaint(settings(DATA_PATH=str(listed))))


def test_missing_second_list_is_refused(listed: Path) -> None:
    (listed / "val_list.txt").unlink()
    assert str(listed / "val_list.txt") in complaint(settings(DATA_PATH=str(listed)))


@pytest.mark.parametrize("label", [3, -1])
def test_label_outside_the_classes_is_refused(listed: Path, label: int) -> None:
    (listed / "val_list.txt").write_text(f"val/0.png 2\nval/1.png {label}\n")
    said = complaint(settings(DATA_PATH=str(listed)))
    assert said.startswith(f"{listed / 'val_list.txt'}:2: label {label} ")
    assert "NUM_CLASSES 3" in said
    check_dataset(settings(DATA_PATH=str(listed)), ANY_LABEL, train=False)  # its labels are checked later
    with pytest.raises(UserError, match=f"label {label}"):
        open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, CPU)


def test_more_class_folders_than_num_classes_are_refused(class_tree) -> None:
    data = settings(DATASET="imagefolder", DATA_PATH=str(class_tree))
    said = complaint(data, 2)
    assert "3 classes" in said
    assert "NUM_CLASSES is 2" in said
    assert "NUM_CLASSES is 9" in complaint(settings(DATASET="digits"), 9)


def test_class_folders_without_images_are_refused(class_tree: Path) -> None:
    data = settings(DATASET="imagefolder", DATA_PATH=str(class_tree))
    for part in ("val", "train"):
        for image in (class_tree / part).rglob("*.png"):
            image.unlink()
        assert f"no images in class folders of {class_tree / part}" in complaint(data)


def test_validation_class_missing_in_training_is_refused(class_tree) -> None:
    (class_tree / "val" / "cat").rename(class_tree / "val" / "cats")
    said = complaint(settings(DATASET="imagefolder", DATA_PATH=str(class_tree)), 4)
    assert str(class_tree / "val" / "cats") in said
    assert "Did you mean cat?" in said
