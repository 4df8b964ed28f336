"""Files that are no images, by their names; links in circles; pipes and devices in place of files."""

import contextlib
import os
import socket
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
from tests.program import ROOT, Vitamp, save_image
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
    assert [os.path.relpath(path, tmp_path) for path in find_images([str(tmp_path)], DataConfig())] == paths
    assert f" {' '.join(ENDINGS)};" in (ROOT / "docs" / "data.md").read_text(encoding="utf-8").replace("\n", " ")
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
        class_files(tmp_path, ["one"]) if walk == "training" else find_images([str(tmp_path)], DataConfig())
    line = "skipped .heic 3 (b.HEIC, c.heic, ...), .txt 1 (notes.txt), hidden files 1 (.hidden), no extension 1"
    assert said.text.count(f"{tmp_path}: {line}") == 1


def test_circular_links_are_not_followed(tmp_path: Path) -> None:
    save_image(tmp_path / "one" / "a.png", seed=0)
    for name in ("back", "again"):
        (tmp_path / "one" / name).symlink_to(tmp_path)
    (tmp_path / "one" / "self").symlink_to("self")
    assert list(class_files(tmp_path, ["one"]).paths) == ["one/a.png"]
    assert find_images([str(tmp_path)], DataConfig()) == [str(tmp_path / "one" / "a.png")]


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


SECONDS = 60
"""Many times what each test takes: a program that waits for a pipe never ends."""
SMALL = (
    *("-cfg", "configs/vit_digits.yaml", "-num_classes", "2", "-image_size", "16", "-batch_size", "4"),
    *("-num_workers", "0", "-device", "cpu", "DATA.IMAGE_CHANNELS=3", "DATA.MAX_BAD=3", "TRAIN.NUM_EPOCHS=1"),
    *("MODEL.PATCH_SIZE=8", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=1"),
)
OWN = """\
from pathlib import Path
from vitamp import dataset

@dataset
def mine(split, data_path):
    files = sorted(Path(data_path, split).glob("*/*.png"))
    return files, [int(file.parent.name[-1]) for file in files], ["0", "1"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes with eight training and two validation images each, and three that are not files."""
    for part, count in (("train", 8), ("val", 2)):
        for number in range(2 * count):
            save_image(tmp_path / "tree" / part / f"class_{number % 2}" / f"{number}.png", seed=number + 100 * count)
    folder = tmp_path / "tree" / "train" / "class_0"
    os.mkfifo(folder / "pipe.png")
    (folder / "endless.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(folder):  # a socket's path has room for 107 bytes
        one.bind("socket.png")
    return tmp_path / "tree"


@pytest.mark.parametrize("ranks", [1, 2])
def test_listing_skips_pipes_and_devices(tree: Path, tmp_path: Path, vitamp: Vitamp, ranks: int) -> None:
    script, words = ("main_single_gpu.py", ()) if ranks == 1 else ("main_multi_gpu.py", ("-ngpus", 2))
    words = (*SMALL, *words, "-dataset", "imagefolder", "-data_path", tree, "-output", tmp_path / "run")
    done = vitamp(*words, script=script, timeout=SECONDS, code=0)
    assert "train: skipped pipes and devices 3 (endless.png, pipe.png, ...)" in done.text


def test_own_data_set_does_not_read_pipes_and_devices(tree: Path, tmp_path: Path, vitamp: Vitamp) -> None:
    (tmp_path / "own.py").write_text(OWN)
    save_image(tree / "train" / "class_0" / "one_more.png", seed=1)  # five full batches, so that every image is read
    words = ("-use", tmp_path / "own.py", "-dataset", "mine", "-data_path", tree, "-output", tmp_path / "run")
    done = vitamp(*SMALL, *words, timeout=SECONDS, code=0)
    for name in ("pipe", "socket", "endless"):
        assert f"{name}.png cannot be read: it is a pipe or device, not a file. The next image replaces" in done.text


@pytest.mark.parametrize(
    "words",
    [
        ("-cfg", "x.yaml"),
        ("-cfg", "configs/vit_digits.yaml", "DATA.EXCLUDE=x.txt"),
        ("-cfg", "configs/vit_digits.yaml", "-pretrained", "x.pth"),
        ("-cfg", "configs/vit_digits.yaml", "-pretrained", "x.safetensors"),
    ],
    ids=["-cfg", "exclude", "pth", "safetensors"],
)
def test_settings_and_weights_that_are_pipes_are_refused(
    words: tuple[str, ...], tmp_path: Path, vitamp: Vitamp
) -> None:
    name = words[-1].rpartition("=")[2]
    os.mkfifo(tmp_path / name)
    given = [word.replace(name, str(tmp_path / name)) for word in words]
    assert "it is a pipe or device, not a file" in vitamp(*given, timeout=SECONDS, code=2).err


@pytest.mark.parametrize(
    ("dataset", "place", "name"),
    [
        ("imagenet2012", "lists", "lists/train_list.txt"),
        ("csv", "table.csv", "table.csv"),
        ("shards", ".", "dataset.json"),
        ("shards", ".", "index-train.npz"),
        ("hf:{root}", None, "train.parquet"),
    ],
)
def test_data_that_is_a_pipe_is_refused(tmp_path: Path, dataset: str, place: str | None, name: str) -> None:
    write_set(tmp_path)
    (tmp_path / "lists").mkdir()
    os.mkfifo(tmp_path / name)
    data = settings(
        DATASET=dataset.format(root=tmp_path),
        DATA_PATH=None if place is None else str(tmp_path / place),
        CACHE=str(tmp_path / "cache"),
    )
    with pytest.raises(UserError):
        check_dataset(data, 3)
