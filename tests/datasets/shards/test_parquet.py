"""Rows and columns of parquet files that become samples, by file names and column types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.datasets.shards.parquet_files import content, pa, part, write
from tests.datasets.shards.tar_files import picture
from utils.config.data import DataConfig

OfHub = Callable[..., DataConfig]


@pytest.mark.parametrize(
    ("first", "second"),
    [("train/a/0000", "train/b/0000"), ("train/" + "ä" * 90, "train/" + "ä" * 90 + "b"), ("train/x", "train/x.y")],
    ids=["of one name", "of long names that begin alike", "with dots"],
)
def test_parquet_files_of_any_name_are_read(tmp_path: Path, of_hub: OfHub, first: str, second: str) -> None:
    write(tmp_path / "set" / f"{first}.parquet", range(4))
    write(tmp_path / "set" / f"{second}.parquet", range(4, 7))
    write(tmp_path / "set" / "val.parquet", range(7, 9))
    train = part(of_hub(tmp_path / "set"))
    assert content(train) == [picture(k) for k in range(7)]
    assert train.labels.tolist() == [k % 3 for k in range(7)]
    assert train.name(6).endswith("/train/00000.tar/00001/00000002.png"), "the second file, and the row in it"


def test_parquet_files_in_no_split_are_named(tmp_path: Path, of_hub: OfHub, said: pytest.LogCaptureFixture) -> None:
    for name in ("train", "val", "extra/part"):
        write(tmp_path / "set" / f"{name}.parquet", range(4))
    assert len(part(of_hub(tmp_path / "set"))) == 4
    assert said.text.count("nor in the validation split: extra/part.parquet") == 1


@pytest.mark.parametrize("large", [False, True])
def test_parquet_labels_may_be_categories(tmp_path: Path, of_hub: OfHub, large: bool) -> None:
    """A column of categories as pandas writes it: numbers and their names."""
    text = pa.large_string() if large else pa.string()
    for name, numbers, categories in (("train", range(6), ["cat", "ant", "bee"]), ("val", range(3), ["bee", "ant"])):
        codes = pa.array([k % len(categories) for k in numbers], pa.int8())
        labels = pa.DictionaryArray.from_arrays(codes, pa.array(categories, text))
        write(tmp_path / "set" / f"{name}.parquet", numbers, notes=None, labels=labels)
    train, val = (part(of_hub(tmp_path / "set"), split) for split in (True, False))
    assert train.classes == ["ant", "bee", "cat"]
    assert train.labels.tolist() == [2, 0, 1] * 2
    assert val.labels.tolist() == [1, 0, 1]
    assert train.read(4) == picture(4)
