"""`hf:` with lists of labels (DATA.MULTI_LABEL)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import open_dataset
from datasets.labels import ANY_LABEL
from datasets.registry import count_classes
from tests.datasets.shards.parquet_files import CPU, content, pa, part, write
from tests.datasets.shards.tar_files import picture
from utils.config.data import DataConfig
from utils.errors import UserError

OfHub = Callable[..., DataConfig]
LABEL = {"_type": "ClassLabel", "names": ["ant", "bee", "cat"]}
TRAIN, VAL = [[2, 0], [], [1], [0, 1, 2], [1], [0, 2]], [[1], [], [2, 1]]


def rows(sets: list[list[int]], classes: int = 3) -> list[list[int]]:
    return [[int(label in of_image) for label in range(classes)] for of_image in sets]


def write_both(root: Path, **options: Any) -> None:
    write(root / "train.parquet", range(6), labels=pa.array(TRAIN, pa.list_(pa.int64())), **options)
    write(root / "val.parquet", range(6, 9), labels=pa.array(VAL, pa.list_(pa.int64())), **options)


@pytest.mark.parametrize(
    "about", [[LABEL], {"_type": "Sequence", "feature": LABEL}, {"_type": "List", "feature": LABEL}]
)
@pytest.mark.parametrize("name", ["labels", "seen_in_it"])
def test_lists_of_numbers_become_rows_of_zeros_and_ones(tmp_path: Path, of_hub: OfHub, about: Any, name: str) -> None:
    notes = {"image": {"_type": "Image"}, name: about}
    write_both(tmp_path / "set", columns=("image", name), notes=notes)
    data = of_hub(tmp_path / "set", MULTI_LABEL=True)
    train, val = part(data), part(data, train=False)
    assert train.labels.tolist() == rows(TRAIN)
    assert val.labels.tolist() == rows(VAL)
    assert train.labels.dtype == np.uint8
    assert train.classes == ["ant", "bee", "cat"]
    assert content(val) == [picture(k, "PNG") for k in range(6, 9)]
    assert count_classes(data, train=True) == 3


def test_lists_of_names_are_numbered_alphabetically(tmp_path: Path, of_hub: OfHub) -> None:
    write(tmp_path / "set" / "a.parquet", range(4), notes=None, labels=[["dog", "ant"], [], ["dog"], ["bee", "bee"]])
    data = of_hub(tmp_path / "set", MULTI_LABEL=True, VAL_FRACTION=0.25)
    both = [part(data, train) for train in (True, False)]
    found = {samples.name(k)[-6:]: samples.labels[k].tolist() for samples in both for k in range(len(samples))}
    assert list(dict(sorted(found.items())).values()) == [[1, 0, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert [len(samples) for samples in both] == [3, 1]


def test_numbers_without_names_count_to_the_highest(tmp_path: Path, of_hub: OfHub) -> None:
    write_both(tmp_path / "set", notes=None)
    assert count_classes(of_hub(tmp_path / "set", MULTI_LABEL=True), train=True) == 3


@pytest.mark.parametrize(
    ("labels", "several", "said"),
    [
        ([[0], [5], [1]], True, "the label of 00000/00000001.png is 5, which does not fit MODEL.NUM_CLASSES 3"),
        ([[0], [-1], [1]], True, "is -1, which does not fit"),
        ([[0], None, [1]], True, "row 1: the column label has no label"),
        ([[0], [None], [1]], True, "row 1: the column label has no label"),
        (pa.array([[], [], []], pa.list_(pa.int64())), True, "no image has a label"),
        ([[0], [1], [1]], False, "its images have several labels each. Set DATA.MULTI_LABEL=true"),
        ([0, 1, 1], True, "its images have one label each. Leave DATA.MULTI_LABEL out"),
        ([[0.5], [1.0], [1.0]], True, "is of type double; labels must be whole numbers or names, or lists of them"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, of_hub: OfHub, labels: list[Any], several: bool, said: str) -> None:
    write(tmp_path / "set" / "train.parquet", range(3), notes=None, labels=labels)
    data = of_hub(tmp_path / "set", MULTI_LABEL=several, VAL_FRACTION=0.4)
    with pytest.raises(UserError) as error:
        open_dataset(data, True, ANY_LABEL if "no image" in said else 3, 0, CPU)
    assert said in str(error.value)


def test_a_copy_whose_manifest_lost_label_sets_is_refused(tmp_path: Path, of_hub: OfHub) -> None:
    write_both(tmp_path / "set", notes=None)
    data = of_hub(tmp_path / "set", MULTI_LABEL=True)
    part(data)
    (manifest,) = Path(data.CACHE or "", "hf").glob("*/dataset.json")
    text = manifest.read_text()
    manifest.write_text(text[: text.index('"label_sets"')] + '"label_sets": [[0]],' + text[text.index('"parts"') - 2 :])
    with pytest.raises(UserError, match=r"dataset\.json lacks the labels of some images"):
        part(data)
