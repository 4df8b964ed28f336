"""`csv`: tables with one path and target, or several labels (DATA.MULTI_LABEL), per line."""

import re
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
from tests.datasets.opened import CPU, settings
from tests.datasets.sources.published import image
from tests.program import Vitamp
from tests.refused import refusal
from utils.config import TrainConfig
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import seed_all

ANIMALS = ["cat", "bee", "ant", "bee", "cat", "bee"]


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write one table; its images, `0.png` and so on, have the shade of their number."""
    for number in range(12):
        image(tmp_path / f"{number}.png", 20 * number)

    def write(text: str, name: str = "all.csv") -> Path:
        (tmp_path / name).write_bytes(text.encode("latin1" if "\xe4" in text else "utf-8"))
        return tmp_path / name

    return write


def rows(targets: list[str], first: int = 0, header: str = "path,target") -> str:
    """A table of these targets; the images are numbered from `first` on."""
    return "\n".join([header, *(f"{number}.png,{target}" for number, target in enumerate(targets, start=first)), ""])


def of_csv(place: Path, **more: object) -> DataConfig:
    return settings(DATASET="csv", DATA_PATH=str(place), **more)


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


@pytest.mark.usefixtures("table")
def test_a_table_may_be_anywhere_with_paths_below_the_data(tmp_path: Path) -> None:
    lists = tmp_path / "elsewhere"
    lists.mkdir()
    for name in ("all.csv", "train.csv", "val.csv"):
        (lists / name).write_text(rows(ANIMALS))
    for place in (lists / "all.csv", lists):
        data = settings(DATASET=f"csv:{place}", DATA_PATH=str(tmp_path), VAL_FRACTION=0.5)
        train, val = parts(data)
        assert {*train, *val} == {(f"{n}.png", ["ant", "bee", "cat"].index(name)) for n, name in enumerate(ANIMALS)}
        assert count_classes(data, train=True) == 3
    with pytest.raises(UserError, match=re.escape(f"DATA.DATASET (-dataset): there is no file {lists}/no.csv")):
        check_dataset(data.changed(DATASET=f"csv:{lists}/no.csv"), 10)
    for place, dataset in ((f"{lists}/all.csv", "csv"), (str(lists), "csv"), (str(lists), f"csv:{lists}/all.csv")):
        text = refusal(check_dataset, data.changed(DATA_PATH=place, DATASET=dataset), 10)
        assert "names 0.png, but there is no file" in text
        table = place if dataset == "csv" else f"{lists}/all.csv"
        assert f"or with -dataset csv:{table} -data_path FOLDER to that folder." in text


def two(table: Callable[..., Path], train: str, val: str) -> Path:
    table(train, "train.csv")
    return table(val, "val.csv").parent


@pytest.mark.parametrize("targets", [["3", "0", "1"], ["3.0", "0.0", "1.0"], ["3.", "0", "1.000"]])
def test_csv_targets_may_be_numbers_and_pandas_numbers(table: Callable[..., Path], targets: list[str]) -> None:
    data = of_csv(two(table, rows(targets), rows(["1"], first=6)))
    assert parts(data) == [[("0.png", 3), ("1.png", 0), ("2.png", 1)], [("6.png", 1)]]
    assert open_dataset(data, True, 10, 0, CPU).classes is None


@pytest.mark.parametrize("paths", ["path", "image_path", "image", "file", "filename"])
@pytest.mark.parametrize("targets", ["target", "label", " Class "])
def test_csv_columns_have_several_names_and_any_position(table: Callable[..., Path], paths: str, targets: str) -> None:
    lines = [f"{number},{name},{number}.png,x" for number, name in enumerate(ANIMALS)]
    header = f",{targets},{paths},note"
    root = two(table, "\n".join([header, *lines]), "\n".join([header, lines[0], lines[2]]))
    train, validation = parts(of_csv(root))
    assert train == [(f"{number}.png", label) for number, label in enumerate([2, 1, 0, 1, 2, 1])]
    assert validation == [("0.png", 2), ("2.png", 0)], "numbered by the classes of the training"


def test_csv_fields_may_be_quoted_and_lines_blank(tmp_path: Path, table: Callable[..., Path]) -> None:
    image(tmp_path / "a, b" / 'the "best" one.png')
    lines = ['"a, b/the ""best"" one.png","dog, big"', "", " , ", "1.png,cat, ,"]
    text = "\ufeff" + "\r\n".join(["path,target", *lines, ""])
    path = two(table, text, text)
    expected = [('the "best" one.png', 1), ("1.png", 0)]
    assert parts(of_csv(path)) == [expected, expected]


@pytest.mark.parametrize(
    ("header", "line", "columns", "lines"),
    [
        ("Datei;Tierart", "{0};k\xe4fer", None, "Latin-1|columns are separated by ';'|'Datei' is read as the path"),
        ("species\tfile", "k\xe4fer\t{0}", None, "Latin-1|columns are separated by '\\t'|'species' as the label"),
        ("id,Bild,Art", "7,{0},k\xe4fer", "file=bild,label=Art", "Latin-1"),
        ("photo,label,old", "{0},k\xe4fer,cat", "file=photo", "Latin-1"),
    ],
)
def test_tables_of_other_programs_are_read_and_each_choice_is_said(
    table: Callable[..., Path], said: pytest.LogCaptureFixture, header: str, line: str, columns: str | None, lines: str
) -> None:
    text = "\n".join([header, *(line.format(f"{number}.png") for number in range(3))])
    data = of_csv(two(table, text, text), COLUMNS=columns)
    assert parts(data, 1) == [[(f"{number}.png", 0) for number in range(3)]] * 2
    assert open_dataset(data, False, 1, 0, CPU).classes == ["k\xe4fer"]
    warned = [one for one in said.messages if f"{data.DATA_PATH}/train.csv" in one]
    assert all(word in one for word, one in zip(lines.split("|"), warned, strict=True))


def test_columns_that_are_not_there_or_not_of_a_table_are_refused(table: Callable[..., Path]) -> None:
    root = two(table, rows(ANIMALS), rows(ANIMALS))
    with pytest.raises(UserError, match=r"has no column lable; its columns are path, target\."):
        check_dataset(of_csv(root, COLUMNS="label=lable"), 3)
    with pytest.raises(UserError, match="the data set digits is no csv table"):
        check_dataset(settings(DATASET="digits", COLUMNS="label=x"), 10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("number,target,x\n0,cat,1\n", "no column path or image_path or image or file or filename; its columns are"),
        ("path,species,x\n0.png,cat,1\n", "no column target or label or class; its columns are path, species, x"),
        ("path;lable;x\n0.png;cat;1\n", "Did you mean label? Name the columns in a header, such as path,target"),
        ("0.png,cat\n1.png,ant\n", "train.csv has no header: its first line is 0.png, cat."),
        ("path,target\n0.png,c\xe4t\0\n", "train.csv cannot be read: 'utf-8' codec can't decode"),
        ("path,target\n", "has no lines below its header"),
        ("path,target\n0.png,cat\n1.png\n", "train.csv:3 has 1 fields; the header has 2"),
        ("path,target\n0.png,cat\n1, 1.png,dog\n", "train.csv:3 has 3 fields; the header has 2. Put fields with ','"),
        ("path,target\n0.png,3\n1.png,10\n", "train.csv:3: label 10 does not fit MODEL.NUM_CLASSES 10"),
        ("path,target\n0.png,3\n\n1.png,-1\n", "train.csv:4: label -1 does not fit"),
        ("path,target\n0.png,3\n1.png,1.5\n", "train.csv:3: the label '1.5' is not a whole number"),
        ("path,target\n0.png,cat\n1.png,\n", "train.csv:3: the target is empty"),
        ("path,target\n0.png,cat\n1.png,4\n", "train.csv:3: the target 4 is a number"),
        ("path,target\n/etc/passwd,cat\n", "train.csv:2: /etc/passwd leads out of the data folder"),
        ("path,target\na/../../x.png,cat\n", "train.csv:2: a/../../x.png leads out of the data folder"),
        ("path,target\n0.png,cat\nno.png,cat\n", "train.csv names no.png, but there is no file"),
        ("path,Label,label\n0.png,cat,ant\n", "train.csv: two columns are called 'Label'; remove or rename"),
        ("path,target\n0.png,cat\n1.png,ant\n0.png,ant\n", "train.csv:4: 0.png has other labels in"),
        ('path,target\n"0.png,cat\n', "train.csv cannot be read: unexpected end of data"),
        ("path,target\n" + "".join(f"0.png,c{k}\n" for k in range(11)), "11 classes, but MODEL.NUM_CLASSES is 10"),
    ],
)
def test_bad_csv_is_refused_with_its_line(table: Callable[..., Path], text: str, said: str) -> None:
    root = two(table, text, text)
    with pytest.raises(UserError, match=re.escape(said)):
        check_dataset(of_csv(root), 10)


@pytest.mark.parametrize("missing", ["train.csv", "val.csv", "both", "folder", "path"])
def test_missing_csv_error_shows_the_expected_layout(
    tmp_path: Path, table: Callable[..., Path], vitamp: Vitamp, tiny: Path, missing: str
) -> None:
    root = two(table, rows(ANIMALS), rows(ANIMALS))
    for name in {"both": ["train.csv", "val.csv"], "folder": [], "path": []}.get(missing, [missing]):
        (root / name).unlink()
    given = {"folder": ("-data_path", root / "no"), "path": ()}.get(missing, ("-data_path", root))
    done = vitamp("-cfg", tiny, "-dataset", "csv", *given, "-output", tmp_path / "run", code=2)
    named = {
        "both": f"no file {root / 'train.csv'}",
        "folder": f"there is no file {root / 'no'}",
        "path": "needs DATA.DATA_PATH",
    }
    assert named.get(missing, f"no file {root / missing}") in done.err
    assert "val.csv" in done.err
    assert "images/cat 1.jpg,cat" in done.err


def label_rows(data: DataConfig, train: bool, classes: int = 3) -> list[list[int]]:
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
    table: Callable[..., Path], train: list[str], val: list[str], header: str, names: list[str]
) -> None:
    data = settings(
        DATASET="csv", DATA_PATH=str(two(table, rows(train, 0, header), rows(val, 6, header))), MULTI_LABEL=True
    )
    assert label_rows(data, True) == TRAIN
    assert label_rows(data, False) == VAL
    assert open_dataset(data, False, 3, 0, CPU).classes == names
    assert count_classes(data, True) == 3
    assert [row[3:] for row in label_rows(data, True, classes=5)] == [[0, 0]] * 3, "outputs that no class has"


def test_columns_of_the_validation_table_may_have_another_order(table: Callable[..., Path]) -> None:
    root = two(table, rows(["1,0", "0,1"], 0, "path,ant,bee"), rows(["0,1"], 6, "path,bee,ant"))
    assert label_rows(of_csv(root, MULTI_LABEL=True), False, 2) == [[1, 0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,labels\n0.png,ant;;bee", "all.csv:2: 'ant;;bee' has an empty label; separate labels by one ;"),
        ("path,labels\n0.png,ant;ant", "all.csv:2: the label 'ant' appears twice"),
        ("path,labels\n0.png,\n1.png, ", "all.csv: no image has a label"),
        ("path,labels\n0.png,ant,bee", "header has 2. Put fields with ',' in quotes or separate labels by ';'"),
        ("path,labels\n0.png,0;two", "all.csv:2: the label 'two' is not a whole number, but the first label is"),
        ("path,labels\n0.png,0;-1", "all.csv:2: label -1 does not fit MODEL.NUM_CLASSES 3"),
        ("path,labels\n0.png,0;3", "all.csv:2: label 3 does not fit MODEL.NUM_CLASSES 3"),
        ("path,labels\n0.png,a;b;c;d", "has 4 classes, but MODEL.NUM_CLASSES is 3"),
        ("path,ant,bee\n0.png,1,2", "Without a column of labels, every column but the path and that of DATA.GROUP"),
        ("path,ant,bee\n0.png,0,0", "all.csv: no image has a label"),
        ("path,ant,ant\n0.png,1,0", "two columns are called 'ant'"),
        ("path,ant\n0.png,1", "has neither a column called target or label or class or targets or labels or"),
    ],
)
def test_bad_tables_of_several_labels_are_refused(table: Callable[..., Path], text: str, said: str) -> None:
    data = of_csv(table(text), MULTI_LABEL=True)
    with pytest.raises(UserError, match=re.escape(said)):
        check_dataset(data, 3)


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (rows(ANIMALS), rows(["bees"]), r"val.csv:2: .*train.csv has no class 'bees'. Did you mean bee\?"),
        ("path,labels\n0.png,ant\n1.png,bee\n", "path,labels\n6.png,fox\n", "val.csv:2: "),
        ("path,ant,bee\n0.png,1,0\n", "path,ant,cow\n6.png,1,0\n", "the same columns: one lacks bee"),
    ],
)
def test_splits_need_the_same_classes(table: Callable[..., Path], train: str, val: str, said: str) -> None:
    data = of_csv(two(table, train, val), MULTI_LABEL="target" not in train)
    with pytest.raises(UserError, match=said):
        check_dataset(data, 3)


def test_other_data_sets_are_refused() -> None:
    with pytest.raises(UserError, match="the data set digits has one label per image"):
        check_dataset(settings(DATASET="digits", MULTI_LABEL=True), 10)


@pytest.mark.parametrize("separator", [";", "|", ", "])
def test_each_separator_is_recognised_in_the_training_table(
    table: Callable[..., Path], said: pytest.LogCaptureFixture, separator: str
) -> None:
    targets = [f"ant{separator}cow", "", "bee", f"cow{separator}bee"]
    again = f'3.png,"bee{separator}cow"\n'  # the labels of the last line, in another order
    root = two(table, rows([f'"{target}"' for target in targets]) + again, rows([f'"bee{separator}ant"'], first=4))
    data = of_csv(root, MULTI_LABEL=True)
    assert label_rows(data, True) == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1], [0, 1, 1]]
    assert label_rows(data, False) == [[1, 1, 0]]
    assert "one class" not in said.text
    assert f"{root / 'train.csv'}: the labels of an image are separated by {separator.strip()!r}." in said.text


def test_lines_with_a_part_of_the_labels_are_refused_and_lists_of_words_warned_of(
    table: Callable[..., Path], said: pytest.LogCaptureFixture
) -> None:
    root = two(table, rows(["bee", "ant cow"]), rows(["bee"]))
    check_dataset(of_csv(root, MULTI_LABEL=True), 2)
    assert "the label 'ant cow' is read as one class. If it lists several labels, separate them by ';'" in said.text
    assert "are separated by" not in said.text
    for name, line in (("val.csv", 3), ("train.csv", 4)):
        (root / name).write_text((root / name).read_text() + "0.png,ant cow\n")
        with pytest.raises(UserError, match=rf"{name}:{line}: .* has other labels in .*csv:2\. An image has one label"):
            check_dataset(of_csv(root, MULTI_LABEL=True), 2)
    with pytest.raises(UserError, match=r"DATA\.GROUP who: not found in '0\.png'\. .* a column, name or name_start\."):
        check_dataset(of_csv(root, MULTI_LABEL=True, GROUP="who"), 2)


@pytest.mark.parametrize(("label", "warned"), [("ant;cow", True), ("ant|cow", True), ("Smith, John", False)])
def test_targets_that_look_like_lists_are_warned_of(
    table: Callable[..., Path], said: pytest.LogCaptureFixture, label: str, warned: bool
) -> None:
    root = two(table, rows(["bee", f'"{label}"']), rows(["bee"]))
    check_dataset(of_csv(root), 3)
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


def test_tables_that_teach_nothing_are_refused(table: Callable[..., Path], vitamp: Vitamp) -> None:
    below_0 = ":3: the label -1 is below 0; labels are whole numbers from 0"
    one_class = " has one class, so there is nothing to learn"
    for targets, said in ((["cat"] * 12, one_class), (["0", "-1", "0"], below_0)):
        place = table(rows(targets))
        assert f"{place}{said}" in vitamp("-data_path", place, "-num_classes", "auto", code=2).err


def test_a_column_of_splits_splits_a_single_table(
    tmp_path: Path, table: Callable[..., Path], vitamp: Vitamp, tiny: Path
) -> None:
    lines = ["cat,Train", "bee,test", "cat,val", "bee,training", "bee,val", "cat,train"]
    place = table(rows(lines, header="path,label,split"))
    words = ("-dataset", "csv", "-data_path", place, "-num_classes", "auto", "-batch_size", 2, "DATA.IMAGE_CHANNELS=3")
    done = vitamp("-cfg", tiny, *words, "-output", tmp_path / "run", "TRAIN.MAX_UPDATES=1", code=0)
    assert f"{place}: the column 'split' says which split an image is in: train, val, test." in done.out
    assert "csv: 3 training and 2 validation images of 8 x 8 x 3, 2 classes\n" in done.out
    data = of_csv(place)
    assert parts(data) == [[("0.png", 1), ("3.png", 0), ("5.png", 1)], [("2.png", 1), ("4.png", 0)]]
    test = open_dataset(data.changed(PART="test"), False, 2, 0, CPU)
    assert test.sample_labels().tolist() == [0]
    several = of_csv(table(rows(["1,0,train", "0,1,val"], header="path,ant,bee,Set")), MULTI_LABEL=True)
    assert label_rows(several, False, classes=2) == [[0, 1]]


def test_a_column_with_other_values_than_splits_is_refused_or_warned_of(
    table: Callable[..., Path], said: pytest.LogCaptureFixture
) -> None:
    place = table(rows(["cat,train", "bee,val", "cat,"], header="path,label,subset"))
    with pytest.raises(UserError, match=r"all.csv:4: the column 'subset' holds ''; it must hold train, val or test"):
        check_dataset(of_csv(place), 2)
    check_dataset(
        of_csv(table(rows([f"{name},{k % 2}" for k, name in enumerate(ANIMALS)], header="path,label,fold"))), 3
    )
    assert (
        "the column 'fold' is not read as splits: it holds 0, 1, not train and val or test. DATA.GROUP=fold"
        in said.text
    )


def test_class_names_that_differ_by_case_or_encoding_are_warned_of(
    tmp_path: Path, table: Callable[..., Path], said: pytest.LogCaptureFixture
) -> None:
    names = ["Cat", "cat", "caf\u00e9", "cafe\u0301", "bee"]
    check_dataset(of_csv(table(rows(names * 2))), 5)
    for name in names[:2]:
        image(tmp_path / "folders" / name / "0.png", 1)
        image(tmp_path / "folders" / name / "1.png", 2)
    check_dataset(settings(DATASET="imagefolder", DATA_PATH=str(tmp_path / "folders")), 2)
    table_, folders = [line for line in said.messages if "differ only in capital letters" in line]
    assert "are encoded: Cat and cat; 'cafe\\u0301' and caf\u00e9. If they are one class" in table_
    assert "Cat and cat. If" in folders
