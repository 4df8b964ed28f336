"""DATA.MULTI_LABEL: tables with several labels per image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.registry import count_classes
from engine.inputs.mixing import Mixing
from engine.task.several import SeveralLabels
from tests.datasets.sources.published import image
from utils.config import TrainConfig
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import seed_all

Settings = Callable[..., DataConfig]
CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    for number in range(12):
        image(tmp_path / f"{number}.png", 20 * number)

    def write(lines: list[str], header: str = "path,labels", name: str = "all.csv") -> Path:
        (tmp_path / name).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


def two(table: Callable[..., Path], train: list[str], val: list[str], header: str = "path,labels") -> Path:
    table([f"{number}.png,{labels}" for number, labels in enumerate(train)], header, "train.csv")
    return table([f"{number + 6}.png,{labels}" for number, labels in enumerate(val)], header, "val.csv").parent


def rows(data: DataConfig, train: bool, classes: int = 3) -> list[list[int]]:
    check_dataset(data, classes)
    dataset = open_dataset(data, train, classes, 0, CPU)
    batch = dataset.__getitems__([(1, index) for index in range(len(dataset))])
    assert batch.labels.dtype == torch.float32
    return batch.labels.int().tolist()


TRAIN = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
VAL = [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("train", "val", "header", "names"),
    [
        (["ant;cow", "", "bee"], ["cow; bee", "ant"], "path,labels", ["ant", "bee", "cow"]),
        (["0;2", "", "1"], ["2;1.0", "0"], "image_path,target", None),
        (["1,0,1", "0,0,0", "0.0,1.0,0"], ["0,1,1", "1,0,0"], "path,cow,ant,bee", ["cow", "ant", "bee"]),
    ],
)
def test_labels_become_rows_of_zeros_and_ones(
    table: Callable[..., Path], settings: Settings, train: list[str], val: list[str], header: str, names: list[str]
) -> None:
    data = settings(DATASET="csv", DATA_PATH=str(two(table, train, val, header)), MULTI_LABEL=True)
    assert rows(data, True) == TRAIN
    assert rows(data, False) == VAL
    assert open_dataset(data, False, 3, 0, CPU).classes == names
    assert count_classes(data, True) == 3
    assert [row[3:] for row in rows(data, True, classes=5)] == [[0, 0]] * 3, "outputs that no class has"


@pytest.mark.parametrize("separator", [";", "|", ","])
def test_the_log_names_what_separates_labels(
    table: Callable[..., Path], settings: Settings, said: pytest.LogCaptureFixture, separator: str
) -> None:
    file = table([f'0.png,"ant{separator}bee"', "1.png,ant"], "path,labels")
    check_dataset(settings(DATASET="csv", DATA_PATH=str(file), MULTI_LABEL=True, VAL_FRACTION=0.5), 2)
    assert f"{file}: the labels of an image are separated by {separator!r}." in said.text


def test_columns_of_the_validation_table_may_have_another_order(table: Callable[..., Path], settings: Settings) -> None:
    root = two(table, ["1,0", "0,1"], ["1,0"], "path,ant,bee")
    table(["6.png,0,1"], "path,bee,ant", "val.csv")
    assert rows(settings(DATASET="csv", DATA_PATH=str(root), MULTI_LABEL=True), False, 2) == [[1, 0]]


@pytest.mark.parametrize(
    ("lines", "header", "said"),
    [
        (
            ["0.png,ant;;bee"],
            "path,labels",
            "all.csv:2: 'ant;;bee' has an empty label; separate labels by one ;",
        ),
        (["0.png,ant;ant"], "path,labels", "all.csv:2: the label 'ant' appears twice"),
        (["0.png,", "1.png, "], "path,labels", "all.csv: no image has a label"),
        (["0.png,0;two"], "path,labels", "all.csv:2: the label 'two' is not a whole number, but the first label is"),
        (["0.png,0;-1"], "path,labels", "all.csv:2: label -1 does not fit MODEL.NUM_CLASSES 3"),
        (["0.png,0;3"], "path,labels", "all.csv:2: label 3 does not fit MODEL.NUM_CLASSES 3"),
        (["0.png,a;b;c;d"], "path,labels", "has 4 classes, but MODEL.NUM_CLASSES is 3"),
        (["0.png,1,2"], "path,ant,bee", "all.csv:2: the column bee holds '2'. Without a column of labels, every"),
        (["0.png,1,0"], "path,ant,ant", "two columns are called 'ant'"),
        (["0.png,1"], "path,ant", "has neither a column called target or label or class or targets or labels or"),
    ],
)
def test_bad_tables_are_refused(
    table: Callable[..., Path], settings: Settings, lines: list[str], header: str, said: str
) -> None:
    data = settings(DATASET="csv", DATA_PATH=str(table(lines, header)), MULTI_LABEL=True)
    with pytest.raises(UserError) as error:
        check_dataset(data, 3)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("header", "val", "said"),
    [
        ("path,labels", "6.png,fox", "val.csv:2: "),
        ("path,ant,cow", "6.png,1,0", "need the same columns; only one of them has bee"),
    ],
)
def test_splits_need_the_same_classes(
    table: Callable[..., Path], settings: Settings, header: str, val: str, said: str
) -> None:
    columns = "cow" in header
    root = two(table, ["1,0", "0,1"] if columns else ["ant", "bee"], ["x"], "path,ant,bee" if columns else header)
    table([val], header, "val.csv")
    with pytest.raises(UserError) as error:
        check_dataset(settings(DATASET="csv", DATA_PATH=str(root), MULTI_LABEL=True), 3)
    assert said in str(error.value)


def test_other_data_sets_are_refused(settings: Settings) -> None:
    with pytest.raises(UserError, match="the data set digits has one label per image"):
        check_dataset(settings(DATASET="digits", MULTI_LABEL=True), 10)


@pytest.mark.parametrize("separator", [";", "|", ", "])
def test_each_separator_is_recognised_in_the_training_table(
    table: Callable[..., Path], settings: Settings, said: pytest.LogCaptureFixture, separator: str
) -> None:
    targets = [f"ant{separator}cow", "", "bee", f"cow{separator}bee"]
    root = two(table, [f'"{target}"' for target in targets], [f'"bee{separator}ant"'])
    data = settings(DATASET="csv", DATA_PATH=str(root), MULTI_LABEL=True)
    assert rows(data, True) == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert rows(data, False) == [[1, 1, 0]]
    assert "one class" not in said.text


@pytest.mark.parametrize(("label", "warned"), [("ant;cow", True), ("ant|cow", True), ("Smith, John", False)])
def test_targets_that_look_like_lists_are_warned_of(
    table: Callable[..., Path], settings: Settings, said: pytest.LogCaptureFixture, label: str, warned: bool
) -> None:
    root = two(table, ["bee", f'"{label}"'], ["bee"], "path,target")
    check_dataset(settings(DATASET="csv", DATA_PATH=str(root)), 3)
    assert (f"train.csv:3: the label '{label}' is read as one class. If it lists several" in said.text) == warned


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixup_mixes_rows(mode: str) -> None:
    seed_all("mixing")
    labels = torch.tensor(np.random.default_rng(0).random((24, 7)) < 0.3).float()
    train: Any = TrainConfig.model_validate({"MIXUP_ALPHA": 0.8, "MIXUP_MODE": mode, "LOSS": "bce"})
    images = torch.rand(24, 1, 1, 1).expand(24, 1, 4, 4).clone()
    mixed = Mixing(train, SeveralLabels(7)).mixed(images, labels)
    for row in range(24):
        own, partner = images[row, 0, 0, 0], images[23 - row, 0, 0, 0]
        lam = (mixed.images[row, 0, 0, 0] - partner) / (own - partner)
        expected = lam * labels[row] + (1 - lam) * labels[23 - row]
        assert torch.allclose(mixed.targets[row], expected, atol=1e-3)
        assert torch.equal(mixed.labels[row], labels[row] if lam >= 0.5 else labels[23 - row])
