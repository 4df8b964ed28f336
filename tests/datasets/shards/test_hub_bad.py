"""Data sets of the hub that are damaged, incomplete or missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import check_dataset
from tests.datasets.shards.parquet_files import content, pa, part, pq, write
from utils.config.data import DataConfig
from utils.errors import UserError


def test_missing_image_in_parquet_is_copied_as_an_empty_file(tmp_path: Path, of_hub: Callable[..., DataConfig]) -> None:
    table = pq.read_table(write(tmp_path / "other" / "x.parquet", range(6)))
    images = table["image"].to_pylist()
    images[2], images[4] = None, {"bytes": None, "path": "gone.png"}
    column = pa.array(images, table.schema.field("image").type)
    (tmp_path / "set").mkdir()
    pq.write_table(table.set_column(1, "image", column), tmp_path / "set" / "train.parquet")
    write(tmp_path / "set" / "val.parquet", range(3))
    found = content(part(of_hub(tmp_path / "set")))
    assert [len(image) == 0 for image in found] == [False, False, True, False, True, False]


def no_images(root: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), root / "train.parquet")


def no_labels(root: Path) -> None:
    pq.write_table(pa.table({"image": [b"a"], "caption": ["a"]}), root / "train.parquet")


def paths_only(root: Path) -> None:
    pq.write_table(pa.table({"image": ["a.jpg"], "label": [0]}), root / "train.parquet")


def float_labels(root: Path) -> None:
    write(root / "train.parquet", range(3), labels=[0.5, 1.5, 2.5])


def lists_of_labels(root: Path) -> None:
    write(root / "train.parquet", range(3), labels=[[0], [1, 2], []])


def missing_label(root: Path) -> None:
    write(root / "train.parquet", range(3), labels=[0, None, 1])


def large_label(root: Path) -> None:
    write(root / "train.parquet", range(3), labels=[0, 3, 1])
    write(root / "val.parquet", range(3))


def hidden_labels(root: Path) -> None:
    write(root / "train.parquet", range(3))
    write(root / "test.parquet", range(3), labels=[-1, -1, -1])


def cut_off(root: Path) -> None:
    file = write(root / "train.parquet", range(9))
    os.truncate(file, file.stat().st_size // 2)


def flipped(root: Path) -> None:
    file = write(root / "train.parquet", range(9))
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)


def several(root: Path) -> None:
    write(root / "large" / "train.parquet", range(3))
    write(root / "small" / "train.parquet", range(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "there is no parquet file in .*Expected layout"),
        (no_images, "has no column of images; its columns are text, label"),
        (no_labels, "has no column of labels; its columns are image, caption"),
        (paths_only, "the image column is of type string; it must hold the bytes of image files"),
        (float_labels, "the column label of .* is of type double; labels must be whole numbers or names"),
        (lists_of_labels, "labels must be whole numbers or names. Several labels per image are read from a csv table"),
        (missing_label, r"train\.parquet, row 1: the column label has no label"),
        (large_label, "label of 00000/00000001.png is 3, which does not fit"),
        (hidden_labels, "label of 00000/00000000.png is -1, which does not fit"),
        (cut_off, r"train\.parquet cannot be read as a parquet file: .*[^.]\. Fetch it again"),
        (flipped, r"train\.parquet cannot be read as a parquet file"),
        (several, r"holds several data sets: large, small\. Name one of them, as in hf:.*/large"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_parquet_files_are_refused(
    tmp_path: Path, of_hub: Callable[..., DataConfig], make: Callable[[Path], None], message: str
) -> None:
    data = of_hub(tmp_path)
    make(tmp_path)
    with pytest.raises(UserError, match=f"(?s){message}"):
        check_dataset(data, 3)
    copies = [path.name for path in Path(data.CACHE or "", "hf").iterdir() if path.is_dir()]
    assert not any(name.endswith(".part") for name in copies), "nothing half copied is left"


def test_bad_hub_names_are_refused(
    tmp_path: Path, of_hub: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
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
