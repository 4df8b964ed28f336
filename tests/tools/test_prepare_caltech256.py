"""The table of Caltech-256: what is in it, what is refused, and that training from it is training from the folders."""

from __future__ import annotations

import csv
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import open_dataset
from tests.datasets.sources.published import image
from tools.prepare_caltech256.command import main
from utils.config.data import DataConfig
from utils.log import log

CLASSES = ("001.ak47", "002.american-flag", "010.beer-mug")
IMAGES = 10


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The images' folder in a made-up tree of three classes and clutter; what else lies in the real one, too."""
    folder = tmp_path / "caltech256" / "256_ObjectCategories"
    for name in (*CLASSES, "257.clutter"):
        for number in range(1, IMAGES + 1):
            image(folder / name / f"{name[:3]}_{number:04d}.jpg", 20 * number)
    (folder / CLASSES[1] / "RENAME2").write_text("a script")
    return folder


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr("tools.common.command_line.start_log", lambda **_: None)
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, log.name)
    return caplog


def prepare(root: Path, *words: object) -> int:
    return main(["-data_path", str(root), *map(str, words)])


def rows(file: Path) -> list[list[str]]:
    with open(file, encoding="utf-8", newline="") as opened:
        return list(csv.reader(opened))


@pytest.mark.usefixtures("tree")
def test_every_image_but_clutter_is_in_it(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    assert prepare(tmp_path, "-partial") == 0
    header, *lines = rows(tmp_path / "caltech256.csv")
    assert header == ["image_path", "target", "class_name"]
    assert len(lines) == 3 * IMAGES
    for path, target, name in lines:
        assert (tmp_path / path).is_file()
        assert Path(path).parent.name == name == CLASSES[int(target)]
    assert "30 images of 3 classes, clutter left out" in heard.text
    assert "27 images for training, 3 for validation" in heard.text
    assert "Not the whole data set (-partial): 3 folders of classes, 256 were published" in heard.text


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("target", ["{}", "{}.0"], ids=["5", "5.0"])
def test_training_from_it_is_training_from_the_folders(tmp_path: Path, target: str) -> None:
    """The same images under the same numbers, in both parts; pandas' way of writing numbers too."""
    assert prepare(tmp_path, "-partial") == 0
    file = tmp_path / "caltech256.csv"
    header, *lines = rows(file)
    with open(file, "w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([header, *([path, target.format(label), name] for path, label, name in lines)])
    split = {"VAL_FRACTION": 0.1, "SPLIT_SEED": 42}
    table = DataConfig.model_validate({"DATASET": "csv", "DATA_PATH": str(file), **split})
    folders = DataConfig.model_validate({"DATASET": "caltech256", "DATA_PATH": str(tmp_path), **split})
    for train in (True, False):
        mine, theirs = (open_dataset(data, train, 256, 0, torch.device("cpu")) for data in (table, folders))
        assert mine.classes == theirs.classes == list(CLASSES)
        first, second = mine.single_images(), theirs.single_images()
        assert first is not None
        assert second is not None
        assert np.array_equal(first.labels, second.labels)
        assert [Path(first.name(i)).name for i in range(len(first))] == [
            Path(second.name(i)).name for i in range(len(second))
        ]


def test_a_tree_that_is_not_whole_is_refused(tmp_path: Path, tree: Path, heard: pytest.LogCaptureFixture) -> None:
    (tree / CLASSES[0] / "001_0003.jpg").write_bytes(b"")
    (tree / "004.baseball-bat").mkdir()
    assert prepare(tmp_path) == 2
    for words in (
        "4 folders of classes, 256 were published",
        "30 images, 29,780 were published",
        "1 folders without an image, first 004.baseball-bat",
        "1 empty files, first 001.ak47/001_0003.jpg",
    ):
        assert words in heard.text
    assert [path.name for path in tmp_path.iterdir()] == ["caltech256"]


@pytest.mark.parametrize("left", [(), CLASSES])
def test_a_tree_without_an_image_is_refused_even_as_a_part(
    tmp_path: Path, tree: Path, heard: pytest.LogCaptureFixture, left: tuple[str, ...]
) -> None:
    shutil.rmtree(tree)
    for name in ("257.clutter", *left):
        (tree / name).mkdir(parents=True)
    assert prepare(tmp_path, "-partial") == 2
    assert f"{tree.parent} is not whole: " in heard.text
    assert ("has an image" if left else "has no folder of a class") in heard.text
    assert "Here DATA.DOWNLOAD=true is -download" in heard.text
    assert not (tmp_path / "caltech256.csv").exists()


def test_a_tree_that_is_not_there_is_told(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    assert prepare(tmp_path) == 2
    assert "there is no caltech256 in" in heard.text
    assert "Here DATA.DOWNLOAD=true is -download" in heard.text


def test_it_fetches_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torchvisions(root: str, download: bool) -> None:
        assert download
        for name in CLASSES:
            for number in (1, 2):
                image(Path(root) / "caltech256" / "256_ObjectCategories" / name / f"{name[:3]}_{number:04d}.jpg")

    monkeypatch.setattr("torchvision.datasets.Caltech256", torchvisions)
    assert prepare(tmp_path / "new", "-download", "-partial") == 0
    assert len(rows(tmp_path / "new" / "caltech256.csv")) == 7


def test_a_table_must_lie_above_its_images(tmp_path: Path, tree: Path, heard: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert prepare(tmp_path, "-partial", "-out", elsewhere / "x.csv") == 2
    assert "must not lead out" in heard.text
    assert prepare(tmp_path, "-partial", "-out", tmp_path / "none" / "x.csv") == 2
    assert "does not exist; name a file" in heard.text
    assert prepare(tree.parent, "-partial", "-out", tree.parent / "x.csv") == 0
    assert rows(tree.parent / "x.csv")[1][0] == "256_ObjectCategories/001.ak47/001_0001.jpg"


@pytest.mark.usefixtures("tree")
def test_a_class_has_one_name(tmp_path: Path) -> None:
    assert prepare(tmp_path, "-partial") == 0
    file = tmp_path / "caltech256.csv"
    file.write_text(file.read_text(encoding="utf-8").replace("0,001.ak47", "0,rifle", 1), encoding="utf-8")
    data = DataConfig(DATASET="csv", DATA_PATH=str(file))
    with pytest.raises(Exception, match=r"caltech256.csv:3: class 0 is called '001.ak47' here and 'rifle' above"):
        open_dataset(data, True, 256, 0, torch.device("cpu"))
