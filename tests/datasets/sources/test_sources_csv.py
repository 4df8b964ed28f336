"""`csv`: tables with one path and target per line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets import check_dataset, open_dataset
from tests.datasets.sources.published import image
from tests.program import Result
from utils.config.data import DataConfig
from utils.errors import UserError

Settings = Callable[..., DataConfig]
CPU = torch.device("cpu")
ANIMALS = ["cat", "bee", "ant", "bee", "cat", "bee"]


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write one table; its images, `pictures/0.png` and so on, have the shade of their number."""
    for number in range(12):
        image(tmp_path / "pictures" / f"{number}.png", 20 * number)

    def write(lines: list[str], header: str = "path,target", name: str = "all.csv") -> Path:
        (tmp_path / name).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


def rows(targets: list[str], first: int = 0) -> list[str]:
    return [f"pictures/{number}.png,{target}" for number, target in enumerate(targets, start=first)]


def parts(data: DataConfig, classes: int = 10) -> list[list[tuple[str, int]]]:
    """(file name, label) of each image of the training and validation splits."""
    check_dataset(data, classes)
    found = []
    for train in (True, False):
        dataset = open_dataset(data, train, classes, 0, CPU)
        batch = dataset.__getitems__([(1, index) for index in range(len(dataset))])
        samples = getattr(dataset, "samples")  # noqa: B009 - not every data set has them
        found.append([(Path(samples.name(k)).name, label) for k, label in enumerate(batch.labels.tolist())])
    return found


def two(table: Callable[..., Path], train: list[str], val: list[str], header: str = "path,target") -> Path:
    table(train, header, "train.csv")
    return table(val, header, "val.csv").parent


def test_csv_tables_with_class_names(table: Callable[..., Path], settings: Settings) -> None:
    root = two(table, rows(ANIMALS), rows(["cat", "ant"], first=6))
    data = settings(DATASET="csv", DATA_PATH=str(root))
    train, validation = parts(data, 3)
    assert train == [("0.png", 2), ("1.png", 1), ("2.png", 0), ("3.png", 1), ("4.png", 2), ("5.png", 1)]
    assert validation == [("6.png", 2), ("7.png", 0)]
    assert open_dataset(data, False, 3, 0, CPU).classes == ["ant", "bee", "cat"]


@pytest.mark.parametrize("targets", [["3", "0", "1"], ["3.0", "0.0", "1.0"], ["3.", "0", "1.000"]])
def test_csv_targets_may_be_numbers_and_pandas_numbers(
    table: Callable[..., Path], settings: Settings, targets: list[str]
) -> None:
    data = settings(DATASET="csv", DATA_PATH=str(two(table, rows(targets), rows(["1"], first=6))))
    assert parts(data) == [[("0.png", 3), ("1.png", 0), ("2.png", 1)], [("6.png", 1)]]
    assert open_dataset(data, True, 10, 0, CPU).classes is None


@pytest.mark.parametrize("paths", ["path", "image_path", "image", "file", "filename"])
@pytest.mark.parametrize("targets", ["target", "label", " Class "])
def test_csv_columns_have_several_names_and_any_position(
    table: Callable[..., Path], settings: Settings, paths: str, targets: str
) -> None:
    lines = [f"{number},{name},pictures/{number}.png,x" for number, name in enumerate(ANIMALS)]
    root = two(table, lines, lines[:3], f",{targets},{paths},note")
    train, validation = parts(settings(DATASET="csv", DATA_PATH=str(root)))
    assert [label for _, label in train] == [2, 1, 0, 1, 2, 1]
    assert [name for name, _ in validation] == ["0.png", "1.png", "2.png"]


def test_csv_fields_may_be_quoted_and_lines_blank(
    tmp_path: Path, table: Callable[..., Path], settings: Settings
) -> None:
    image(tmp_path / "a, b" / 'the "best" one.png')
    lines = ['"a, b/the ""best"" one.png","dog, big"', "", " , ", "pictures/1.png,cat"]
    path = two(table, lines, lines)
    for name in ("train.csv", "val.csv"):
        (path / name).write_bytes(b"\xef\xbb\xbf" + (path / name).read_bytes().replace(b"\n", b"\r\n"))
    expected = [('the "best" one.png', 1), ("1.png", 0)]
    assert parts(settings(DATASET="csv", DATA_PATH=str(path))) == [expected, expected]


BAD = {
    "no path": (
        ["0,cat"],
        "number,target",
        "no column path or image_path or image or file or filename; its columns are number, target",
    ),
    "no target": (
        ["pictures/0.png,cat"],
        "path,species",
        "no column target or label or class; its columns are path, species",
    ),
    "nearly": (["pictures/0.png,cat"], "path,lable", "Did you mean label?"),
    "semicolons": (["pictures/0.png;cat"], "path;target", "its columns are path;target"),
    "empty": ([], "path,target", "has no lines below its header"),
    "short": (["pictures/0.png,cat", "pictures/1.png"], "path,target", "train.csv:3 has 1 fields; the header has 2"),
    "too large": (
        ["pictures/0.png,3", "pictures/1.png,10"],
        "path,target",
        "train.csv:3: label 10 does not fit MODEL.NUM_CLASSES 10",
    ),
    "negative": (["pictures/0.png,3", "", "pictures/1.png,-1"], "path,target", "train.csv:4: label -1 does not fit"),
    "half": (
        ["pictures/0.png,3", "pictures/1.png,1.5"],
        "path,target",
        "train.csv:3: the label '1.5' is not a whole number",
    ),
    "gap": (["pictures/0.png,cat", "pictures/1.png,"], "path,target", "train.csv:3: the target is empty"),
    "mixed": (["pictures/0.png,cat", "pictures/1.png,4"], "path,target", "train.csv:3: the target 4 is a number"),
    "absolute": (["/etc/passwd,cat"], "path,target", "train.csv:2: /etc/passwd leads out of the data folder"),
    "climbing": (["a/../../x.png,cat"], "path,target", "train.csv:2: a/../../x.png leads out of the data folder"),
    "missing": (
        ["pictures/0.png,cat", "pictures/no.png,cat"],
        "path,target",
        "train.csv names pictures/no.png, but there is no file",
    ),
    "quote": (['"pictures/0.png,cat'], "path,target", "train.csv cannot be read: unexpected end of data"),
    "many": (
        [f"pictures/0.png,c{k}" for k in range(11)],
        "path,target",
        "train.csv has 11 classes, but MODEL.NUM_CLASSES is 10",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_csv_is_refused_with_its_line(table: Callable[..., Path], settings: Settings, case: str) -> None:
    lines, header, said = BAD[case]
    root = two(table, lines, lines, header)
    with pytest.raises(UserError, match=re.escape(said)):
        check_dataset(settings(DATASET="csv", DATA_PATH=str(root)), 10)


def test_csv_validation_class_missing_in_training_is_refused(table: Callable[..., Path], settings: Settings) -> None:
    data = settings(DATASET="csv", DATA_PATH=str(two(table, rows(ANIMALS), rows(["bees"]))))
    with pytest.raises(UserError, match=r"val.csv:2: .*train.csv has no class 'bees'. Did you mean bee\?"):
        check_dataset(data, 10)


@pytest.mark.parametrize("missing", ["train.csv", "val.csv", "both", "folder", "path"])
def test_missing_csv_error_shows_the_expected_layout(
    tmp_path: Path, table: Callable[..., Path], vitamp: Callable[..., Result], tiny: Path, missing: str
) -> None:
    root = two(table, rows(ANIMALS), rows(ANIMALS))
    for name in {"both": ["train.csv", "val.csv"], "folder": [], "path": []}.get(missing, [missing]):
        (root / name).unlink()
    given = {"folder": ("-data_path", root / "no"), "path": ()}.get(missing, ("-data_path", root))
    done = vitamp("-cfg", tiny, "-dataset", "csv", *given, "-output", tmp_path / "run")
    named = {
        "both": f"no file {root / 'train.csv'}",
        "folder": f"{root / 'no'} does not exist",
        "path": "needs DATA.DATA_PATH",
    }
    assert done.code == 2
    assert named.get(missing, f"no file {root / missing}") in done.err
    assert "val.csv" in done.err
    assert "images/cat 1.jpg,cat" in done.err
