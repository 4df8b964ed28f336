"""`hf:`: image data sets in parquet files, copied once and then read like other shards."""

import multiprocessing
import shutil
import sys
from pathlib import Path

import pytest

from datasets import check_dataset, open_dataset
from tests.datasets.opened import CPU, content, of_hub, part
from tests.datasets.shards.parquet_files import pa, pq, write
from tests.datasets.shards.tar_files import picture
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import start_log


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_hub_images_are_copied_unchanged(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", range(10), kind=kind)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", range(10, 15), kind=kind)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", range(20, 24), kind=kind)
    train, val = part(of_hub(tmp_path)), part(of_hub(tmp_path), train=False)
    assert content(train) == [picture(k, kind) for k in range(15)]
    assert content(val) == [picture(k, kind) for k in range(20, 24)]
    assert content(part(of_hub(tmp_path, PART="test"), train=False)) == content(val)
    assert train.labels.tolist() == [k % 3 for k in range(15)]
    assert val.labels.tolist() == [k % 3 for k in range(20, 24)]
    assert train.classes == ["ant", "bee", "cat"]
    ending = "jpg" if kind == "JPEG" else kind.lower()
    assert train.name(12).endswith(f"/train/00000.tar/00001/00000002.{ending}")
    assert open_dataset(of_hub(tmp_path), True, 3, 0, CPU).__getitems__([(0, 3)]).images.any()


def test_hub_columns_by_metadata_or_name(tmp_path: Path) -> None:
    notes = {"pixels": {"_type": "Image"}, "species": {"_type": "ClassLabel", "names": ["a", "b", "c"]}}
    write(tmp_path / "noted" / "train.parquet", range(9), notes=notes, columns=("pixels", "species"))
    write(tmp_path / "plain" / "train.parquet", range(9), notes=None, struct=False, columns=("img", "target"))
    names = ["cat", "ant", "bee"] * 3
    write(tmp_path / "named" / "train.parquet", range(9), notes=None, labels=names)
    for name, classes in (("noted", ["a", "b", "c"]), ("plain", None), ("named", ["ant", "bee", "cat"])):
        train = part(of_hub(tmp_path / name, VAL_FRACTION=0.4))
        numbers = [next(k for k in range(9) if picture(k) == image) for image in content(train)]
        assert train.classes == classes
        shift = 2 if name == "named" else 0
        assert train.labels.tolist() == [(k + shift) % 3 for k in numbers]


def test_hub_copy_is_made_once_and_again_after_a_change(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    data = of_hub(tmp_path / "set")
    write(tmp_path / "set" / "train.parquet", range(12))
    part(data)
    assert "copying its images to" in said.text
    assert "copied 12 images" in said.text
    said.clear()
    part(data)
    assert "copying" not in said.text
    write(tmp_path / "set" / "train.parquet", range(30, 45))
    assert len(part(data)) + len(part(data, train=False)) == 15
    assert "copied 15 images" in said.text


def test_damaged_hub_copy_is_named_and_made_again_once_removed(tmp_path: Path, cache: Path) -> None:
    data = of_hub(tmp_path / "set")
    write(tmp_path / "set" / "train.parquet", range(12))
    part(data)
    (tar,) = cache.glob("hf/*-set-*/*/*.tar")
    tar.write_bytes(b"")
    with pytest.raises(UserError, match=r"has 0 bytes.*of a data set hf:NAME, remove") as error:
        part(data)
    folder = tar.parent.parent
    assert f"remove {folder}." in str(error.value)
    shutil.rmtree(folder)
    assert len(part(data)) + len(part(data, train=False)) == 12


def _prepare(data: DataConfig, out: Path) -> None:
    sys.stdout = out.open("w")
    start_log(to_terminal=True)
    check_dataset(data, 3)
    sys.stdout.flush()


def test_hub_copy_is_made_by_one_process_and_again_after_an_interruption(tmp_path: Path, cache: Path) -> None:
    """They start together, beside the remains of a killed process."""
    write(tmp_path / "set" / "train.parquet", range(24))
    write(tmp_path / "set" / "test.parquet", range(4))
    data = of_hub(tmp_path / "set")
    check_dataset(data, 3)
    (copied,) = (path for path in (cache / "hf").iterdir() if path.is_dir())
    before = {path.name: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    half = copied.with_name(f".{copied.name}.part")
    copied.rename(half)
    (half / "dataset.json").unlink()
    (half / "train" / "00000.tar").write_bytes(b"half")
    outs = [tmp_path / f"out{number}" for number in range(3)]
    processes = [multiprocessing.get_context("fork").Process(target=_prepare, args=(data, out)) for out in outs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted("copying its images" in out.read_text() for out in outs) == [False, False, True]
    assert {path.name: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    assert not half.exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [("train/a/0000", "train/b/0000"), ("train/" + "ä" * 90, "train/" + "ä" * 90 + "b"), ("train/x", "train/x.y")],
    ids=["of one name", "of long names that begin alike", "with dots"],
)
def test_parquet_files_of_any_name_are_read(tmp_path: Path, first: str, second: str) -> None:
    write(tmp_path / "set" / f"{first}.parquet", range(4))
    write(tmp_path / "set" / f"{second}.parquet", range(4, 7))
    write(tmp_path / "set" / "val.parquet", range(7, 9))
    train = part(of_hub(tmp_path / "set"))
    assert content(train) == [picture(k) for k in range(7)]
    assert train.labels.tolist() == [k % 3 for k in range(7)]
    assert train.name(6).endswith("/train/00000.tar/00001/00000002.png"), "the second file, and the row in it"


def test_parquet_files_in_linked_folders_are_read(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.parquet", range(4))
    write(tmp_path / "elsewhere" / "0.parquet", range(4, 7))
    (tmp_path / "set" / "validation").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
    assert content(part(of_hub(tmp_path / "set"), train=False)) == [picture(k) for k in range(4, 7)]


def test_parquet_files_in_no_split_are_named(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    for name in ("train", "val", "extra/part"):
        write(tmp_path / "set" / f"{name}.parquet", range(4))
    assert len(part(of_hub(tmp_path / "set"))) == 4
    assert said.text.count("nor in the validation split: extra/part.parquet") == 1


def test_test_split_without_labels_is_left_out(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "set" / "train.parquet", range(8), notes=None, labels=["cat", "ant"] * 4)
    write(tmp_path / "set" / "test.parquet", range(4), columns=("image", "id_again"))
    assert len(part(of_hub(tmp_path / "set"))) + len(part(of_hub(tmp_path / "set"), train=False)) == 8
    assert "test.parquet has no column label; the split test is left out." in said.text


def test_parquet_labels_may_be_categories(tmp_path: Path) -> None:
    """A column of categories as pandas writes it: numbers and their names."""
    for name, numbers, categories in (("train", range(6), ["cat", "ant", "bee"]), ("val", range(3), ["bee", "ant"])):
        codes = pa.array([k % len(categories) for k in numbers], pa.int8())
        labels = pa.DictionaryArray.from_arrays(codes, pa.array(categories, pa.large_string()))
        write(tmp_path / "set" / f"{name}.parquet", numbers, notes=None, labels=labels)
    train, val = (part(of_hub(tmp_path / "set"), split) for split in (True, False))
    assert train.classes == ["ant", "bee", "cat"]
    assert train.labels.tolist() == [2, 0, 1] * 2
    assert val.labels.tolist() == [1, 0, 1]
    assert train.read(4) == picture(4)


def test_missing_image_in_parquet_is_copied_as_an_empty_file(tmp_path: Path) -> None:
    table = pq.read_table(write(tmp_path / "other" / "x.parquet", range(6)))
    images = table["image"].to_pylist()
    images[2], images[4] = None, {"bytes": None, "path": "gone.png"}
    column = pa.array(images, table.schema.field("image").type)
    (tmp_path / "set").mkdir()
    pq.write_table(table.set_column(1, "image", column), tmp_path / "set" / "train.parquet")
    write(tmp_path / "set" / "val.parquet", range(3))
    found = content(part(of_hub(tmp_path / "set")))
    assert [len(image) == 0 for image in found] == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "label": [0]}, "has no column of images; its columns are text, label"),
        ({"image": [b"a"], "caption": ["a"]}, "has no column of labels; its columns are image, caption"),
        ({"image": ["a.jpg"], "label": [0]}, "images are of type string, not bytes of image files"),
    ],
)
def test_parquet_files_without_images_or_labels_are_refused(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=message):
        check_dataset(of_hub(tmp_path), 3)


@pytest.mark.parametrize(
    ("split", "labels", "message"),
    [
        ("train", [0.5, 1.5, 2.5], "the column label of .* is of type double; labels must be whole numbers or names"),
        ("train", [[0], [1, 2], []], "or names. Several labels per image are read from a csv table"),
        ("train", [0, None, 1], r"train\.parquet, row 1: the column label has no label"),
        ("train", [0, 3, 1], "00000/00000001.png: label 3 does not fit"),
        ("test", [-1, -1, -1], "00000/00000000.png: label -1 does not fit"),
    ],
)
def test_bad_parquet_labels_are_refused(
    tmp_path: Path, cache: Path, split: str, labels: list[object], message: str
) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.parquet", range(3), labels=labels if name == split else None)
    with pytest.raises(UserError, match=message):
        check_dataset(of_hub(tmp_path), 3)
    assert not list(cache.glob("hf/*.part")), "nothing half copied is left"


def test_damaged_parquet_files_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "train.parquet", range(9))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train\.parquet cannot be read as a parquet file: .*[^.]\. Fetch it again"):
        check_dataset(of_hub(tmp_path), 3)
    file.write_bytes(whole[:4] + bytes(396) + whole[400:])
    with pytest.raises(UserError, match=r"train\.parquet cannot be read as a parquet file"):
        check_dataset(of_hub(tmp_path), 3)


def test_folders_of_none_or_several_data_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)there is no parquet file in .*Expected layout"):
        check_dataset(of_hub(tmp_path), 3)
    for name in ("large", "small"):
        write(tmp_path / name / "train.parquet", range(3))
    with pytest.raises(UserError, match=r"holds several data sets: large, small\. Name one of them, as in hf:.*/large"):
        check_dataset(of_hub(tmp_path), 3)


def test_bad_hub_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, message in (
        ("", "lacks a name or a folder"),
        (tmp_path / "nowhere", "there is no folder"),
        ("owner/name", "not on this machine.*DATA.DOWNLOAD=true fetches it"),
    ):
        with pytest.raises(UserError, match=message):
            check_dataset(of_hub(place), 3)
    write(tmp_path / "train.parquet", range(9))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        check_dataset(of_hub(tmp_path), 3)
