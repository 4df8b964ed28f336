"""DATA.RELABEL: training images that are left out or get another label."""

import csv
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from datasets import open_dataset
from datasets.base import Samples, name_prefix
from tests.datasets.layouts import lay_out
from tests.datasets.opened import CPU, part, settings
from tests.program import Vitamp, save_image
from tools.check_labels.searched_images import open_images
from utils.config import Config
from utils.config.data import DataConfig
from utils.errors import UserError


def write(file: Path, *rows: Sequence[str]) -> str:
    """Each row: path, given, proposed, decision."""
    with open(file, "w", encoding="utf-8-sig", newline="") as stream:
        table = csv.writer(stream)
        table.writerows([("score", "path", "given", "proposed", "decision"), *(("0.5", *row) for row in rows)])
    return str(file)


def labels_of(samples: Samples, data: DataConfig) -> dict[str, object]:
    names = [samples.name(index).removeprefix(name_prefix(data)) for index in range(len(samples))]
    return dict(zip(names, samples.labels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("kind", "fold"),
    [
        *((kind, None) for kind in ("imagefolder", "csv", "several", "lists", "shards", "named shards")),
        *((kind, "2/3") for kind in ("imagefolder", "csv", "several", "shards")),
    ],
)
def test_relabel_changes_the_training_split_alone(tmp_path: Path, kind: str, fold: str | None) -> None:
    several, classes = kind == "several", "012" if kind == "lists" or "shards" in kind else ("ant", "bee", "cat")
    images = [
        (f"{'klmnopqrstuvwxy'[k]}.png", f"{classes[k % 3]};ant" if several and k % 3 else classes[k % 3])
        for k in range(15)
    ]
    splits = ("train", "val") if fold is None else ("train",) if kind == "shards" else ("",)
    place = lay_out("csv" if several else kind.removeprefix("named "), tmp_path / "set", dict.fromkeys(splits, images))
    data = settings(**place, MULTI_LABEL=several, FOLD=fold, EXCLUDE=str(tmp_path / "exclude.txt"))
    (tmp_path / "exclude.txt").write_text("")
    if kind == "named shards":  # as check_labels.py names them
        (tmp_path / "set" / "classes.txt").write_text("crane\ndog\ncrane\n")
        classes = tuple(open_images(Config(DATA=data), "train").classes)
        assert classes == ("crane (label 0)", "dog", "crane (label 2)")
    before, scored = (labels_of(part(data, train), data) for train in (True, False))
    kept, dropped, moved, excluded, emptied, *_ = before
    (tmp_path / "exclude.txt").write_text(excluded)

    def given(name: str) -> str:
        own = before[name]
        return "|".join(classes[k] for k in range(3) if own[k]) if isinstance(own, list) else classes[int(str(own))]

    rows = [(kept, given(kept), "nothing", " Keep"), (f"./{dropped}", given(dropped), "", "DROP")]
    rows += [
        (moved, given(moved), "cat|bee" if several else classes[2], "relabel"),
        (next(iter(scored)), "?", "", "drop"),
    ]
    rows += [(emptied, given(emptied), "", "relabel")] if several else []
    data = data.changed(RELABEL=write(tmp_path / "list.csv", *rows))
    found = part(data)
    expected = {**before, moved: [0, 1, 1] if several else 2} | ({emptied: [0, 0, 0]} if several else {})
    assert labels_of(found, data) == {name: expected[name] for name in before if name not in (dropped, excluded)}
    assert labels_of(part(data, train=False), data) == {name: own for name, own in scored.items() if name != excluded}
    # As features of a frozen model are computed.
    again = open_dataset(data.changed(PART="train"), False, 3, 0, CPU).single_images()
    assert again is not None
    assert labels_of(again, data) == labels_of(found, data)
    assert found.relabel is not None
    assert (found.relabel["dropped"], found.relabel["relabelled"]) == (1, 2 - (before[moved] == 2) - (not several))


WRONG = [
    ([("train/ant/0.jpg", "ant", "bee", "move")], ":2: the decision 'move' must be keep, drop or relabel"),
    ([("train/ant/0.jpg", "bee", "ant", "keep")], ":2: given is 'bee', but train/ant/0.jpg has the label 'ant'"),
    ([("train/ant/0.jpg", "ant", "beee", "relabel")], ":2: proposed is 'beee', which is no class .* Did you mean bee?"),
    ([("train/ant/0.jpg", "ant", "bee", "keep")] * 2, ":3: train/ant/0.jpg is in line 2 too"),
    ([(f"train/{name}/{k}.jpg", name, "", "drop") for name in ("ant", "bee") for k in range(6)], "leaves out all 12"),
]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for number in range(24):
        split, name = ("train" if number < 12 else "val"), ("ant", "bee")[number % 2]
        save_image(tmp_path / "set" / split / name / f"{number % 12 // 2}.jpg", number)
    return tmp_path / "set"


@pytest.mark.parametrize(("rows", "message"), WRONG)
def test_wrong_rows_are_refused_with_their_line(
    folders: Path, tmp_path: Path, rows: list[tuple[str, ...]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        part(settings(DATASET="imagefolder", DATA_PATH=str(folders), RELABEL=write(tmp_path / "list.csv", *rows)))


@pytest.mark.parametrize(("labels", "files"), [("0 1 1", 3), ("0;1 1 1", 3), ("0 1 1", 2)])  # 2: one has two labels
def test_class_without_training_images_is_warned_of(
    tmp_path: Path, said: pytest.LogCaptureFixture, labels: str, files: int
) -> None:
    images = [(f"{number % files}.png", label) for number, label in enumerate(labels.split())]
    several, names = ";" in labels, {"train": images, "val": images}
    # Of a table, two labels of one image are refused.
    data = settings(**lay_out("csv" if files == 3 else "lists", tmp_path, names), MULTI_LABEL=several)
    row = ("images/train/0.png", "0|1" if several else "0", "1", "relabel")
    part(data.changed(RELABEL=write(tmp_path / "list.csv", row)), num_classes=2)
    assert f"DATA.RELABEL {tmp_path}/list.csv leaves no training image of 1 class, such as 0." in said.messages


def test_names_that_are_not_utf8(folders: Path, tmp_path: Path) -> None:
    odd = [os.fsencode(folders / "train" / "ant") + name for name in (b"/gr\xfcn.jpg", b"/wei\xdf.jpg")]
    for number, name in enumerate(odd):
        os.rename(folders / "train" / "ant" / f"{number}.jpg", name)
    (tmp_path / "exclude.txt").write_bytes(b"train/ant/gr\xfcn.jpg\n")
    (tmp_path / "list.csv").write_bytes(b"path,given,proposed,decision\ntrain/ant/wei\xdf.jpg,ant,bee,relabel\n")
    data = settings(DATASET="imagefolder", DATA_PATH=str(folders), EXCLUDE=str(tmp_path / "exclude.txt"))
    found = part(data.changed(RELABEL=str(tmp_path / "list.csv")))
    assert sorted(found.labels.tolist()) == [0] * 4 + [1] * 7


def test_names_that_are_not_utf8_go_through_a_run(vitamp: Vitamp, tiny: Path, folders: Path, tmp_path: Path) -> None:
    """A class, an image that is a copy of another, and one that is broken."""
    root, run, script = os.fsencode(folders), tmp_path / "run", "scripts/check_data.py"
    for split in (b"/train/", b"/val/"):
        os.rename(root + split + b"ant", root + split + b"gr\xfcn")
    shutil.copy(folders / "train" / "bee" / "0.jpg", os.fsdecode(root + b"/val/bee/wei\xdf.jpg"))
    (folders / "train" / "bee" / os.fsdecode(b"b\xf6s.jpg")).write_bytes(b"broken")
    words = ("-dataset", "imagefolder", "-data_path", folders, "DATA.IMAGE_CHANNELS=3", "DATA.NUM_WORKERS=0")
    words = ("-cfg", tiny, *words, "-num_classes", "auto", "-batch_size", 4, "DATA.MAX_BAD=1")
    done = vitamp(*words, "TRAIN.NUM_EPOCHS=1", "-output", run, code=0)
    assert "b\\udcf6s.jpg cannot be read" in done.text
    assert "(gr\\udcfcn)" in (run / "log.txt").read_text(encoding="utf-8")
    assert (run / "broken.txt").read_bytes().startswith(b"train/bee/b\xf6s.jpg  # ")
    resumed = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=2", code=0)
    assert "at least 1 of 13 validation images have relatives in training" in resumed.text
    given = (f"DATA.EXCLUDE={run / 'broken.txt'}", "-fix", tmp_path / "fixed.txt")
    done = vitamp("-cfg", run / "config.yaml", *given, script=script, code=1)
    assert "train/bee/0.jpg: the same bytes as val/bee/wei\\udcdf.jpg" in done.out
    assert b"b\xf6s.jpg" in (tmp_path / "fixed.txt").read_bytes()
    assert "gr\\udcfcn" in vitamp(run, script="scripts/evaluate.py", code=0).out
    vitamp(run, "-to", "hub", "-output", tmp_path / "hub", script="scripts/export.py", code=0)


def test_relabel_in_a_run(vitamp: Vitamp, tiny: Path, folders: Path, tmp_path: Path) -> None:
    """The log, the class weights, what the run and its checkpoints note, and a list that changes before a resume."""
    rows = [(f"train/ant/{k}.jpg", "ant", "bee", ("drop", "relabel", "relabel", "keep")[k]) for k in range(4)]
    more = [("val/ant/0.jpg", "ant", "bee", "relabel"), ("train/ant/99.jpg", "ant", "bee", "drop")]
    table, run = tmp_path / "list.csv", tmp_path / "run"
    write(table, *rows, *more)
    data = ("-dataset", "imagefolder", "-data_path", folders, "DATA.IMAGE_CHANNELS=3", "DATA.NUM_WORKERS=0")
    words = ("-cfg", tiny, "-output", run, "-resume", "auto", *data, "-num_classes", "auto", "-batch_size", 4)
    words = (*words, "TRAIN.CLASS_WEIGHTS=balanced", f"DATA.RELABEL={table}")
    done = vitamp(*words, "TRAIN.MAX_UPDATES=1", "DATA.DROP_LAST=false", code=0)
    assert f"DATA.RELABEL {table}: 1 training image left out, 2 with another label, 1 as before." in done.text
    assert "2 of its lines match no training image (validation images, whose labels stay as given: 1; " in done.err
    assert "others: 1): line 7, train/ant/99.jpg. A line is a path below DATA_PATH, as train/ant/1" in done.err
    assert "11 training, 12 validation images in 2 classes, from 3 (ant) to 8 (bee) training images" in done.text
    assert "class weights balanced: 0.688 to 1.83" in done.text
    noted = {
        "file": "list.csv",
        "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        "dropped": 1,
        "relabelled": 2,
    }
    (meta,) = run.glob("checkpoints/step-*/meta.json")
    assert json.loads((run / "run.json").read_text())["relabel"] == noted
    assert json.loads(meta.read_text())["samples"]["relabel"] == noted
    write(table, ("train/ant/0.jpg", "ant", "", "drop"), ("train/ant/1.jpg", "ant", "bee", "relabel"))
    done = vitamp(*words, "DATA.DROP_LAST=false", code=2)
    assert "but the training samples have changed since: 11 as before, but with other names or labels" in done.err
    vitamp(*words[:-1], f"DATA.RELABEL={tmp_path / 'none.csv'}", "DATA.DROP_LAST=false", code=2)
    done = vitamp("-cfg", tiny, f"DATA.RELABEL={table}", "-dry_run", code=2)
    assert "the data set digits is held in memory" in done.err
    table.unlink()
    vitamp("-eval", "-resume", run, "-output", tmp_path / "eval", code=0)
