"""Class folders without splits, and warnings of empty classes."""

import logging
import re
from pathlib import Path

import pytest

from datasets import check_dataset, open_dataset
from datasets.images import Images
from tests.datasets.layouts import lay_out
from tests.datasets.opened import CPU, of_shards, settings
from tests.datasets.shards.tar_files import samples, write_tar
from tests.datasets.sources.published import image
from tests.program import Vitamp
from utils.config.data import DataConfig
from utils.errors import UserError


@pytest.fixture
def unparted(tmp_path: Path) -> Path:
    for name, count in (("daisy", 10), ("rose", 20)):
        for number in range(count):
            image(tmp_path / name / "deep" / f"{number:02d}.png", number)
    return tmp_path


def paths(data: DataConfig, train: bool) -> list[tuple[str, int]]:
    dataset = open_dataset(data, train, 10, 0, CPU)
    assert isinstance(dataset, Images)
    samples = dataset.samples
    return [(samples.name(k), int(samples.labels[k])) for k in range(len(samples))]


def test_class_folders_without_splits_are_split(unparted: Path) -> None:
    data = settings(DATASET="imagefolder", DATA_PATH=str(unparted), VAL_FRACTION=0.2)
    check_dataset(data, 2)
    train, validation = paths(data, True), paths(data, False)
    assert [label for _, label in validation] == [0] * 2 + [1] * 4
    assert not set(train) & set(validation)
    expected = [(str(path), int("rose" in str(path))) for path in sorted(unparted.rglob("*.png"))]
    assert sorted(train + validation) == expected
    assert open_dataset(data, False, 2, 0, CPU).classes == ["daisy", "rose"]
    batch = open_dataset(data, True, 2, 0, CPU).__getitems__([(1, k) for k in range(len(train))])
    assert batch.labels.tolist() == [label for _, label in train]


def test_data_path_one_folder_too_high_is_refused(unparted: Path) -> None:
    image(unparted / "flowers" / "train" / "tulip" / "0.png")
    said = f"one folder too high: .* has class folders in train/. Try -data_path {unparted / 'flowers'}"
    with pytest.raises(UserError, match=said):
        open_dataset(settings(DATASET="imagefolder", DATA_PATH=str(unparted)), True, 10, 0, CPU)


def test_folders_in_class_folders_are_named(unparted: Path, said: pytest.LogCaptureFixture) -> None:
    """One folder in each class, as images/, is no more than a layout."""
    data = settings(DATASET="imagefolder", DATA_PATH=str(unparted))
    check_dataset(data, 2)
    assert "images of folders in it" not in said.text
    for name in ("daisy", "rose", "tulip"):
        image(unparted / "augmented" / name / "0.png")
    check_dataset(data, 3)
    assert (
        "the class augmented takes the images of folders in it (daisy, rose, tulip). They are called like" in said.text
    )
    image(unparted / "daisy" / "deeper" / "0.png")
    check_dataset(data, 3)
    assert (
        "the class augmented takes the images of folders in it (daisy, rose, tulip), like 1 other class." in said.text
    )


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_class_may_have_the_name_of_a_split(unparted: Path, said: pytest.LogCaptureFixture, name: str) -> None:
    for number in range(10):
        image(unparted / name / f"{number}.png")
    data = settings(DATASET="imagefolder", DATA_PATH=str(unparted))
    check_dataset(data, 3)
    assert f"{unparted / name} is taken for a class" in said.text
    assert open_dataset(data, True, 3, 0, CPU).classes == sorted(["daisy", "rose", name])


@pytest.mark.parametrize("parts", [("train", "val"), ("Testing/glioma", "Training/glioma")])
def test_split_folders_are_not_classes(tmp_path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        for number in range(10):
            image(tmp_path / part / f"{number}.png")
    with pytest.raises(UserError, match=r"no images in class folders of|Testing and Training seem to be splits"):
        open_dataset(settings(DATASET="imagefolder", DATA_PATH=str(tmp_path)), True, 2, 0, CPU)


def test_folder_without_class_folders_is_no_split(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    for folder in ("train/ant", "train/bee", "test"):
        image(tmp_path / folder / "0.png")
    (tmp_path / "val").mkdir()
    data = settings(DATASET="imagefolder", DATA_PATH=str(tmp_path))
    advice = f"(?s)folders of {tmp_path}/val or .*To split train/ by DATA.VAL_FRACTION: -data_path {tmp_path}/train"
    with pytest.raises(UserError, match=advice):
        check_dataset(data, 2)
    image(tmp_path / "valid" / "ant" / "0.png")
    check_dataset(data, 2)
    assert [len(paths(data, train)) for train in (True, False)] == [2, 1]
    assert "validation" not in said.text


def warnings_of(data: DataConfig, classes: int, said: pytest.LogCaptureFixture, train: bool = True) -> list[str]:
    """Warnings of the check before a run."""
    said.clear()
    check_dataset(data, classes, train)
    return [record.getMessage() for record in said.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "splits", "warning"),
    [
        ("csv", ("train", "val"), "train.csv has no image for 2 of its 4 classes (the first: 1)."),
        ("lists", ("train", "val"), "train_list.txt has no image for 2 of its 4 classes (the first: 1)."),
        ("imagefolder", ("train", "val"), "train has no image for 1 of its 3 classes (the first: none)."),
        ("imagefolder", ("",), "set has no image for 1 of its 3 classes (the first: none)."),
    ],
)
def test_empty_classes_of_lists_and_folders_are_named(
    tmp_path: Path, said: pytest.LogCaptureFixture, kind: str, splits: tuple[str, ...], warning: str
) -> None:
    rows = [(f"{label}-{k}.png", label) for label in (0, 3) for k in range(2)]
    given = lay_out(kind, tmp_path / "set", dict.fromkeys(splits, rows))
    if kind == "imagefolder":
        (tmp_path / "set" / splits[0] / "none").mkdir()
    assert warnings_of(settings(**given), 4, said)[0].endswith(warning)
    if kind == "lists":  # the classes are those of training
        (listed := tmp_path / "set" / "val_list.txt").write_text(listed.read_text().replace(" 3", " 1"))
        assert warnings_of(settings(**given), 4, said)[1].endswith(
            "val_list.txt has no image for 2 of its 4 classes (the first: 2)."
        )


def test_empty_classes_of_shards_are_named(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    write_tar(tmp_path / "train" / "0.tar", samples([0, 2, 3]))  # labels 0, 2, 0
    write_tar(tmp_path / "val" / "0.tar", samples([1, 2]))
    data, owner = of_shards(tmp_path), f"split of the data set in {tmp_path} has no image for"
    assert warnings_of(data, 3, said) == [
        f"The training {owner} 1 of its 3 classes (the first: 1).",
        f"The validation {owner} 1 of its 3 classes (the first: 0).",
    ]
    assert warnings_of(data, 3, said, False) == [f"The validation {owner} 1 of its 3 classes (the first: 0)."]
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert warnings_of(data, 3, said)[0] == f"The training {owner} 1 of its 3 classes (the first: bee)."


def test_folders_of_systems_are_no_classes(vitamp: Vitamp, unparted: Path, tiny: Path) -> None:
    for name in ("__MACOSX", ".git", "rose/__MACOSX"):
        image(unparted / name / "x.png")
    image(unparted / "loose.png")
    done = vitamp("-cfg", tiny, "-data_path", unparted, "-dataset", "imagefolder", "-num_classes", "auto", "-dry_run")
    assert "MODEL.NUM_CLASSES 2: classes of" in done.out
    assert "skipped hidden folders 3 (.git, __MACOSX, ...), images beside the class folders 1 (loose.png)" in done.text


def test_data_path_that_is_not_read_is_refused(vitamp: Vitamp, unparted: Path, tiny: Path) -> None:
    refused = vitamp("-cfg", tiny, "-data_path", unparted, code=2)
    assert "digits is not read from it. To use the images there, name their layout, as in -dataset" in refused.err


def test_print_config_shows_the_recognised_data_set(vitamp: Vitamp, unparted: Path) -> None:
    shown = vitamp("-data_path", unparted, "-print_config", code=0)
    assert re.search(rf"  DATASET: imagefolder +# recognised in {unparted}\n", shown.out)
