"""Recognising the layout of DATA_PATH, and counting the classes of a data set (-num_classes auto)."""

from pathlib import Path

import pytest

from datasets import check_dataset, count_classes
from datasets.recognise import recognise
from tests.datasets.layouts import lay_out
from tests.datasets.opened import settings
from tests.datasets.shards.tar_files import write_tar
from tests.program import Vitamp, save_image
from tests.refused import refusal
from utils.errors import UserError

ROWS = [(f"{label}.png", label) for label in (0, 1, 4)]
STRAY = 30_000_000
"""A label far beyond all others, as a typing error makes it."""


@pytest.mark.parametrize(
    ("kind", "splits", "what", "classes"),
    [
        ("lists", ("train", "val"), "train_list.txt and val_list.txt", 5),
        ("csv", ("train", "val"), "train.csv and val.csv", 5),
        ("shards", ("train", "val"), "tar files", 5),
        ("imagefolder", ("train", "val"), "class folders in train/ and val/", 3),
        ("imagefolder", ("",), "class folders without train/ and val/", 3),
    ],
)
def test_layout_is_recognised_and_its_classes_are_counted(
    tmp_path: Path, kind: str, splits: tuple[str, ...], what: str, classes: int
) -> None:
    given = lay_out(kind, tmp_path, dict.fromkeys(splits, ROWS))
    found = recognise(str(tmp_path))
    assert found is not None
    assert found[0] == given["DATASET"]
    assert f"{tmp_path} has {what}" in found[1]
    assert count_classes(settings(**given), train=True) == classes


def test_lists_take_precedence_and_the_other_layout_is_named(tmp_path: Path) -> None:
    for kind in ("lists", "imagefolder"):
        lay_out(kind, tmp_path, {"train": ROWS, "val": ROWS})
    name, what = recognise(str(tmp_path)) or ("", "")
    assert name == "imagenet2012"
    assert "it also has class folders in train/ and val/, which -dataset imagefolder reads" in what


def test_an_archive_beside_class_folders(tmp_path: Path) -> None:
    given = lay_out("imagefolder", tmp_path, {"train": ROWS, "val": ROWS})
    (tmp_path / "._archive.tar").touch()
    assert (recognise(str(tmp_path)) or [""])[0] == "imagefolder"
    write_tar(tmp_path / "archive.tar", [("train/0/0.png", b"image")])
    with pytest.raises(UserError, match=r"train/0/0.png has no label.*\n.*: -dataset imagefolder reads them."):
        check_dataset(settings(**{**given, "DATASET": "shards"}), 5)


def test_a_table_of_test_images_beside_class_folders_is_no_data_set(tmp_path: Path) -> None:
    lay_out("imagefolder", tmp_path, {"train": ROWS, "valid": ROWS})
    (tmp_path / "test.csv").write_text("id\n1\n")
    name, what = recognise(str(tmp_path)) or ("", "")
    assert name == "imagefolder"
    assert "class folders in train/ and valid/" in what


def test_a_csv_file_and_a_url_are_recognised_by_their_names(tmp_path: Path) -> None:
    lay_out("csv", tmp_path, {"train": ROWS})
    assert (recognise(str(tmp_path / "train.csv")) or [""])[0] == "csv"
    assert (recognise("s3://bucket/flowers") or [""])[0] == "shards"


def test_unknown_layout_is_an_error_with_the_known_ones(tmp_path: Path) -> None:
    save_image(tmp_path / "1.jpg", 1, (8, 8))
    said = refusal(recognise, str(tmp_path))
    assert f"the layout of {tmp_path} is not recognised. Name the data set with -dataset" in said
    assert all(word in said for word in ("train_list.txt", "train.csv", "0000.tar", "<class>"))
    assert recognise(str(tmp_path / "nowhere")) is None, "the data set's own check reports it"


@pytest.mark.parametrize("dataset", [None, "imagefolder", "csv", "imagenet2012", "shards", "images"])
def test_a_mistyped_folder_is_answered_by_the_one_that_is_there(
    tmp_path: Path, vitamp: Vitamp, dataset: str | None
) -> None:
    (tmp_path / "xray/small").mkdir(parents=True)
    words = ("-dataset", dataset) if dataset else ()
    for typed, meant in (("xry", "xray"), ("xry/small", "xray/small"), ("xry/other", "xray"), ("q", "")):
        done = vitamp("-data_path", tmp_path / typed, *words, "-num_classes", 2, code=2)
        assert (f"(did you mean {tmp_path / meant}?)" in done.err) == bool(meant)
        assert ("did you mean" in done.err) == bool(meant)


@pytest.mark.parametrize("below", ["", "images"])
def test_a_table_beside_its_images_is_offered(tmp_path: Path, vitamp: Vitamp, below: str) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("id,kind\n" + "".join(f"{number}.jpg,{'cat' if number % 2 else 'dog'}\n" for number in range(20)))
    for number in range(20):
        save_image(tmp_path / below / f"{number}.jpg", number, (8, 8))
    done = vitamp("-data_path", tmp_path, "-num_classes", "auto", code=2)
    assert f"{tmp_path} has the table labels.csv, which -data_path {table} reads." in done.err
    words = "-data_path", table, "-columns", "file=id,label=kind"
    checked = vitamp(*words, "-fix", tmp_path / "fix.txt", script="scripts/check_data.py", code=2 if below else 0)
    if below:
        where = f"there is no file {tmp_path}/0.jpg (there is {tmp_path}/images/0.jpg)"
        assert f"None of 18 training images exists: {where}" in checked.err
        assert not (tmp_path / "fix.txt").exists(), "no list of all images"


def test_synthetic_images_have_no_number_of_classes() -> None:
    with pytest.raises(UserError, match="give a number, as in -num_classes 10"):
        count_classes(settings(DATASET="synthetic"), train=True)
    assert count_classes(settings(DATASET="digits", IMAGE_CHANNELS=1), train=True) == 10


@pytest.mark.parametrize(
    ("kind", "several", "where"),
    [
        ("csv", False, "train.csv:4: "),
        ("csv", True, "train.csv:4: "),
        ("lists", False, "train_list.txt: images/train/2.png: "),
        ("shards", False, "train/0.tar/2.png: "),
    ],
)
def test_stray_label_is_refused_with_its_row_and_gaps_are_counted(
    tmp_path: Path, kind: str, several: bool, where: str
) -> None:
    """Labels of a few classes of ImageNet-21k have gaps, too."""
    for label in (21840, STRAY):
        labels = [0, 1, f"0;{label}" if several else label, 2, 3, 4]
        rows = [(f"{k}.png", label) for k, label in enumerate(labels)]
        given = lay_out(kind, tmp_path / str(label), {"train": rows, "val": rows[:2]})
        data = settings(**given, MULTI_LABEL=several)
        if label != STRAY:
            assert count_classes(data, True) == label + 1
            continue
        said = refusal(count_classes, data, True)
        assert where in said
        assert "label 30000000 would make 30,000,001 classes, but only 6 labels occur." in said
        assert "set -num_classes 30000001 instead of auto" in said
