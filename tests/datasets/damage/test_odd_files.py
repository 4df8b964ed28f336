"""Files that are no images, by their names, and links in circles."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import check_dataset
from datasets.decoding import ENDINGS
from datasets.given import open_given
from datasets.shards.index import IMAGE_KINDS
from datasets.sources.imagefolder import class_files
from tests.datasets.opened import settings
from tests.datasets.shards.tar_files import picture, samples, write_set, write_tar
from tests.program import ROOT, save_image
from tools.predict.images import find_images
from utils.config.data import DataConfig
from utils.errors import UserError


def test_image_extensions_are_the_same_everywhere(tmp_path: Path) -> None:
    """Training and predict find the same files, and the decoder reads each kind."""
    made = [ending for ending in ENDINGS if not (ending == ".avif" and ".avif" not in Image.registered_extensions())]
    for ending in made:
        image = Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
        folder = tmp_path / "one"
        folder.mkdir(exist_ok=True)
        (image.convert("1") if ending == ".pbm" else image).save(folder / f"x{ending}")
    paths = list(class_files(tmp_path, ["one"]).paths)
    assert {Path(path).suffix for path in paths} == set(made)
    assert [os.path.relpath(path, tmp_path) for path in find_images([str(tmp_path)])] == paths
    assert f" {' '.join(ENDINGS)};" in (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8").replace("\n", " ")
    assert {f".{kind}" for kind in IMAGE_KINDS} == {*ENDINGS, ".npy"}
    part = open_given([str(tmp_path / path) for path in paths], DataConfig(IMAGE_SIZE=8, DATASET="imagefolder"))
    part.__getitems__([(0, index) for index in range(len(part))])
    assert part.take_broken() == []


@pytest.mark.parametrize("walk", ["training", "predict"])
def test_skipped_files_are_counted_by_extension(tmp_path: Path, walk: str, said: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "one" / "a.png", seed=0)
    for name in ("photo.heic", "b.HEIC", "c.heic", "notes.txt", "Makefile", ".hidden"):
        (tmp_path / "one" / name).write_bytes(b"x")
    for _ in range(2):
        class_files(tmp_path, ["one"]) if walk == "training" else find_images([str(tmp_path)])
    line = "skipped .heic 3 (b.HEIC, c.heic, ...), .txt 1 (notes.txt), hidden files 1 (.hidden), no extension 1"
    assert said.text.count(f"{tmp_path}: {line}") == 1


def test_circular_links_are_not_followed(tmp_path: Path) -> None:
    save_image(tmp_path / "one" / "a.png", seed=0)
    for name in ("back", "again"):
        (tmp_path / "one" / name).symlink_to(tmp_path)
    (tmp_path / "one" / "self").symlink_to("self")
    assert list(class_files(tmp_path, ["one"]).paths) == ["one/a.png"]
    assert find_images([str(tmp_path)]) == [str(tmp_path / "one" / "a.png")]


def test_tar_images_with_two_dots_are_counted_as_skipped(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    dotted = [("cat.front.jpg", picture(7)), ("cat.front.cls", b"1"), ("x.heic", b"x")]
    write_tar(write_set(tmp_path) / "train" / "0001.tar", [*dotted, *samples([1, 2])])
    data = settings(DATASET="shards", DATA_PATH=str(tmp_path))
    told = "skipped more than one dot in the name 2 (cat.front.jpg, cat.front.cls), .heic 1 (x.heic)"
    check_dataset(data, 3)
    assert told in said.text
    write_tar(tmp_path / "val" / "0000.tar", dotted)
    with pytest.raises(UserError, match=r"have no images; skipped more than one dot"):
        check_dataset(data, 3)
