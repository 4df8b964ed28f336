"""Pipes, sockets, devices and other files in place of images, lists and tables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import check_dataset
from datasets.damage import Failure, failure_or
from datasets.decoding import ENDINGS
from datasets.given import open_given
from datasets.shards.index import IMAGE_KINDS
from datasets.sources.imagefolder import class_files
from models.weights.find import locate
from tests.datasets.opened import settings
from tests.datasets.shards.tar_files import picture, samples, write_set, write_tar
from tests.program import ROOT, Vitamp, save_image
from tools.predict.images import find_images
from utils.config.data import DataConfig
from utils.errors import UserError
from vitamp.files import NotRegular, only_regular, read_regular

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
SECONDS = 60
"""Time limit, many times what each test takes: a program that waits for a pipe never ends."""
SMALL = (
    *("-dataset", "imagefolder", "-num_classes", "2", "-image_size", "16", "-batch_size", "4", "-num_workers", "0"),
    *("MODEL.TRANS.PATCH_SIZE=8", "MODEL.TRANS.EMBED_DIM=16", "MODEL.TRANS.DEPTH=1", "MODEL.TRANS.NUM_HEADS=1"),
    *("DATA.IMAGE_CHANNELS=3", "TRAIN.NUM_EPOCHS=1", "-device", "cpu"),
)


def odd(path: Path, kind: str) -> str:
    """Create something at `path` that is not a file; returns what the program calls it."""
    if kind == "pipe":
        os.mkfifo(path)
        return "a named pipe"
    if kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has room for 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(here)
        return "a socket"
    path.symlink_to("/dev/zero")
    return "a character device"


KINDS = ("pipe", "socket", "endless")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes with eight training and two validation images each."""
    for part, count in (("train", 8), ("val", 2)):
        for number in range(2 * count):
            save_image(tmp_path / "tree" / part / f"class_{number % 2}" / f"{number}.png", seed=number + 100 * count)
    return tmp_path / "tree"


def test_link_to_itself_is_missing_without_retries(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to("x.png")
    failure = failure_or(lambda: read_regular(tmp_path / "x.png"))
    assert failure == Failure("its symbolic links form a loop", "missing")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    called = odd(tmp_path / "x.png", kind)
    with pytest.raises(NotRegular, match=f"it is {called}, not a file"):
        read_regular(tmp_path / "x.png")
    failure = failure_or(lambda: read_regular(tmp_path / "x.png"))
    assert isinstance(failure, Failure)
    assert failure.kind == "not a file"
    (tmp_path / "real").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    assert read_regular(tmp_path / "link") == b"content"
    with pytest.raises(IsADirectoryError):
        os.close(only_regular(tmp_path, os.O_RDONLY))


def test_training_replaces_images_that_are_not_files(tree: Path, tmp_path: Path, vitamp: Vitamp) -> None:
    for kind in KINDS:
        odd(tree / "train" / "class_0" / f"{kind}.png", kind)
    save_image(tree / "train" / "class_0" / "one_more.png", seed=1)  # five full batches, so that every image is read
    words = ("-data_path", tree, "-output", tmp_path / "run", "DATA.MAX_BAD=3")
    done = vitamp("-cfg", "configs/vit_digits.yaml", *SMALL, *words, timeout=SECONDS, code=0)
    for name, called in (("pipe", "named pipe"), ("socket", "socket"), ("endless", "character device")):
        assert f"{name}.png cannot be read: it is a {called}, not a file. The next image replaces it." in done.text


@pytest.mark.parametrize(
    "words",
    [("-cfg", "{pipe}"), ("-cfg", "configs/vit_digits.yaml", "DATA.EXCLUDE={pipe}", "-dataset", "digits")],
    ids=["-cfg", "exclude"],
)
def test_settings_that_name_a_pipe_are_refused(words: tuple[str, ...], tmp_path: Path, vitamp: Vitamp) -> None:
    odd(tmp_path / "pipe", "pipe")
    done = vitamp(*(word.format(pipe=tmp_path / "pipe") for word in words), timeout=SECONDS, code=2)
    assert "it is a named pipe, not a file" in done.text


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.pdparams", "w.npz"])
def test_weights_that_are_a_pipe_are_refused(tmp_path: Path, name: str) -> None:
    odd(tmp_path / name, "pipe")
    with pytest.raises(UserError, match=rf"{name}: it is a named pipe, not a file\.$"):
        locate(str(tmp_path / name), download=False)


@pytest.mark.parametrize(
    ("dataset", "place", "name"),
    [
        ("imagenet2012", "lists", "lists/train_list.txt"),
        ("csv", "table.csv", "table.csv"),
        ("imagefolder", "folder", "folder"),
        ("shards", "folder", "folder"),
        ("shards", ".", "dataset.json"),
        ("shards", ".", "index-train.npz"),
        ("hf:{root}", None, "train.parquet"),
    ],
)
def test_data_that_is_a_pipe_is_refused(tmp_path: Path, dataset: str, place: str | None, name: str) -> None:
    write_set(tmp_path)
    (tmp_path / "lists").mkdir()
    odd(tmp_path / name, "pipe")
    data = settings(
        DATASET=dataset.format(root=tmp_path),
        DATA_PATH=None if place is None else str(tmp_path / place),
        CACHE=str(tmp_path / "cache"),
    )
    with pytest.raises(UserError, match="is a named pipe, not a"):
        check_dataset(data, 3)


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
