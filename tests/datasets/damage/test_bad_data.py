"""Bad input: every message says what is wrong, where, and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets import check_dataset, open_dataset
from utils.config.data import DataConfig
from utils.errors import UserError

Settings = Callable[..., DataConfig]


@pytest.fixture
def complaint() -> Callable[[DataConfig, int], str]:
    """Message of the check before a run."""

    def check(data: DataConfig, num_classes: int = 3) -> str:
        with pytest.raises(UserError) as caught:
            check_dataset(data, num_classes)
        return str(caught.value)

    return check


def test_unknown_data_set_is_refused_with_the_closest_name(settings: Settings, complaint, cpu: torch.device) -> None:
    said = complaint(settings(DATASET="imagenet"))
    assert "Did you mean imagenet2012?" in said
    assert "digits, imagefolder, imagenet2012" in said
    assert "is retired: the Hugging Face Hub has it. Use -dataset hf:ethz/food101" in complaint(
        settings(DATASET="food101")
    )
    with pytest.raises(UserError, match="imagenet2012"):
        open_dataset(settings(DATASET="imagenet"), True, 3, 0, cpu)


@pytest.mark.parametrize("name", ["imagenet2012", "imagefolder"])
def test_missing_data_path_is_refused(settings: Settings, complaint, name: str) -> None:
    assert "DATA.DATA_PATH (-data_path)" in complaint(settings(DATASET=name))


@pytest.mark.parametrize("name", ["imagenet2012", "imagefolder"])
def test_data_path_that_is_not_a_folder_is_refused(settings: Settings, complaint, tmp_path: Path, name: str) -> None:
    assert f"{tmp_path / 'none'} does not exist" in complaint(settings(DATASET=name, DATA_PATH=str(tmp_path / "none")))
    (tmp_path / "file").touch()
    assert "is a file" in complaint(settings(DATASET=name, DATA_PATH=str(tmp_path / "file")))


@pytest.mark.parametrize(("name", "looked_for"), [("imagenet2012", "train_list.txt"), ("imagefolder", "train")])
def test_empty_folder_error_shows_the_expected_layout(
    settings: Settings, complaint, tmp_path: Path, name: str, looked_for: str
) -> None:
    said = complaint(settings(DATASET=name, DATA_PATH=str(tmp_path)))
    assert str(tmp_path / looked_for) in said
    assert "Expected layout" in said


def test_missing_second_list_is_refused(listed: Path, settings: Settings, complaint) -> None:
    (listed / "val_list.txt").unlink()
    assert str(listed / "val_list.txt") in complaint(settings(DATA_PATH=str(listed)))


@pytest.mark.parametrize("line", ["train/0.png", "train/0.png x", "train/0.png 1.5", "7"])
def test_malformed_list_line_is_refused_with_its_number(listed: Path, settings: Settings, complaint, line: str) -> None:
    (listed / "train_list.txt").write_text(f"train/0.png 0\n\n{line}\n")
    said = complaint(settings(DATA_PATH=str(listed)))
    assert said.startswith(f"{listed / 'train_list.txt'}:3: ")
    assert "relative/path.JPEG label" in said


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/1.png", "train/../../1.png"])
def test_list_paths_that_leave_the_folder_are_refused(listed: Path, settings: Settings, complaint, path: str) -> None:
    (listed / "train_list.txt").write_text(f"{path} 0\n")
    said = complaint(settings(DATA_PATH=str(listed)))
    assert said.startswith(f"{listed / 'train_list.txt'}:1: {path} ")


@pytest.mark.parametrize("label", [3, -1])
def test_label_outside_the_classes_is_refused(
    listed: Path, settings: Settings, complaint, cpu: torch.device, label: int
) -> None:
    (listed / "val_list.txt").write_text(f"val/0.png 2\nval/1.png {label}\n")
    said = complaint(settings(DATA_PATH=str(listed)))
    assert said.startswith(f"{listed / 'val_list.txt'}:2: label {label} ")
    assert "NUM_CLASSES 3" in said
    with pytest.raises(UserError, match=f"label {label}"):
        open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, cpu)


def test_list_for_another_folder_is_refused(listed: Path, settings: Settings, complaint) -> None:
    (listed / "train_list.txt").write_text("images/0.png 0\n")
    assert f"there is no file {listed / 'images' / '0.png'}" in complaint(settings(DATA_PATH=str(listed)))


def test_empty_and_binary_lists_are_refused(listed: Path, settings: Settings, complaint) -> None:
    (listed / "train_list.txt").write_text("\n")
    assert "train_list.txt is empty" in complaint(settings(DATA_PATH=str(listed)))
    (listed / "train_list.txt").write_bytes(b"\xff\xfe\x00\x81")
    assert "train_list.txt cannot be read" in complaint(settings(DATA_PATH=str(listed)))


def test_more_class_folders_than_num_classes_are_refused(class_tree, settings: Settings, complaint) -> None:
    data = settings(DATASET="imagefolder", DATA_PATH=str(class_tree()))
    said = complaint(data, 2)
    assert "3 classes" in said
    assert "NUM_CLASSES is 2" in said
    assert "NUM_CLASSES is 9" in complaint(settings(DATASET="digits"), 9)


def test_class_folders_without_images_are_refused(class_tree, settings: Settings, complaint) -> None:
    root = class_tree()
    for image in (root / "val").rglob("*.png"):
        image.unlink()
    said = complaint(settings(DATASET="imagefolder", DATA_PATH=str(root)))
    assert f"{root / 'val'} has no images" in said
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    assert f"{root / 'train'} has no images" in complaint(settings(DATASET="imagefolder", DATA_PATH=str(root)))


def test_validation_class_missing_in_training_is_refused(class_tree, settings: Settings, complaint) -> None:
    root = class_tree()
    (root / "val" / "cat").rename(root / "val" / "cats")
    said = complaint(settings(DATASET="imagefolder", DATA_PATH=str(root)), 4)
    assert str(root / "val" / "cats") in said
    assert "Did you mean cat?" in said
