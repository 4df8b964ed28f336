"""A label far beyond all others, as a typing error makes it, where the classes are counted (-num_classes auto)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from datasets.registry import count_classes
from tests.datasets.shards.tar_files import picture, write_tar
from tests.datasets.sources.published import image
from utils.config.data import DataConfig
from utils.errors import UserError

Settings = Callable[..., DataConfig]
STRAY = 30_000_000
KINDS = ("csv", "csv, several labels", "imagenet2012", "shards")


def write(root: Path, kind: str, label: object) -> dict[str, object]:
    """Six images of labels 0 to 4 and of `label`, the third one; returns the settings of DATA."""
    numbers = [0, 1, label, 2, 3, 4]
    if kind == "shards":
        members = [
            member
            for row, number in enumerate(numbers)
            for member in ((f"{row}.png", picture(row)), (f"{row}.cls", str(number).encode()))
        ]
        write_tar(root / "train" / "0.tar", members)
        write_tar(root / "val" / "0.tar", members[:2])
        return {"DATASET": kind, "DATA_PATH": str(root), "CACHE": str(root / "cache")}
    for row in range(len(numbers)):
        image(root / f"{row}.png", row)
    if kind == "imagenet2012":
        lines = [f"{row}.png {number}" for row, number in enumerate(numbers)]
        (root / "train_list.txt").write_text("\n".join(lines) + "\n")
        (root / "val_list.txt").write_text(f"{lines[0]}\n")
        return {"DATASET": kind, "DATA_PATH": str(root)}
    several, lines = kind == "csv, several labels", ["path,target"]
    for row, number in enumerate(numbers):
        lines.append(f"{row}.png,{f'0;{number}' if several and row else number}")
    for split in ("train", "val"):
        (root / f"{split}.csv").write_text("\n".join(lines if split == "train" else lines[:2]) + "\n")
    return {"DATASET": "csv", "DATA_PATH": str(root), "MULTI_LABEL": several}


WHERE = {
    "csv": "train.csv:4: ",
    "csv, several labels": "train.csv:4: ",
    "imagenet2012": "train_list.txt: 2.png: ",
    "shards": "train/0000.tar/2.png: ",
}


@pytest.mark.parametrize("kind", KINDS)
def test_stray_label_is_refused_with_its_row(kind: str, tmp_path: Path, settings: Settings) -> None:
    data = settings(**write(tmp_path, kind, STRAY))
    with pytest.raises(UserError) as error:
        count_classes(data, True)
    said = str(error.value)
    assert WHERE[kind].replace("0000.tar", "0.tar") in said
    assert "label 30000000 would make 30,000,001 classes, but only 6 labels occur." in said
    assert "set -num_classes 30000001 instead of auto" in said


@pytest.mark.parametrize("kind", KINDS)
def test_numbering_with_gaps_is_counted(kind: str, tmp_path: Path, settings: Settings) -> None:
    """As of a few classes of ImageNet-21k."""
    assert count_classes(settings(**write(tmp_path, kind, 21840)), True) == 21841
