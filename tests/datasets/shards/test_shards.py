"""Shards: samples, order, and the saved index."""

import errno
import io
import json
import os
import pickle
import threading
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import check_dataset, open_dataset
from datasets.base import Unreadable
from datasets.shards.index import MOST_OPEN, Folder, from_bytes
from datasets.shards.source import pixels_of
from tests.datasets.opened import CPU, of_shards, part, pixels, settings
from tests.datasets.shards.tar_files import picture, samples, write_set, write_tar
from tests.program import Calls


def test_shards_give_the_same_pixels_as_folders(tmp_path: Path) -> None:
    """In training too: a sample's random numbers depend on its index, not on its storage."""
    write_set(tmp_path / "tars")
    lines = {"train": range(12), "val": range(12, 16)}
    for name, numbers in lines.items():
        (tmp_path / "files" / name).mkdir(parents=True)
        for k in numbers:
            (tmp_path / "files" / name / f"{k}.png").write_bytes(picture(k))
        (tmp_path / "files" / f"{name}_list.txt").write_text("".join(f"{name}/{k}.png {k % 3}\n" for k in numbers))
    files = settings(DATASET="imagenet2012", DATA_PATH=str(tmp_path / "files"))
    for train, count in ((True, 12), (False, 4)):
        here, there = (open_dataset(data, train, 3, 7, CPU) for data in (of_shards(tmp_path / "tars"), files))
        keys = [(2, k) for k in [*range(count), -1]]
        for ours, theirs in zip(here.__getitems__(keys), there.__getitems__(keys), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("train", "others"),
    [("train/0.tar", ["0.tar"]), ("a-train-0.tar", [f"part-{k}.tar" for k in range(7)])],
    ids=["beside folders", "beside names"],
)
def test_tar_files_in_no_split_are_named(
    tmp_path: Path, said: pytest.LogCaptureFixture, train: str, others: list[str]
) -> None:
    for name in (train, train.replace("train", "val"), *others):
        write_tar(tmp_path / name, samples(range(3)))
    assert len(part(of_shards(tmp_path))) == 3
    lines = [record.getMessage() for record in said.records if "skipping" in record.getMessage()]
    more = " and 2 more" if len(others) > 5 else ""
    assert lines == [
        f"{tmp_path}: skipping files that are neither in the training split nor in the validation split: "
        f"{', '.join(others[:5])}{more}"
    ]


@pytest.mark.parametrize("name", ["train/0.tar", "interval-trainval-0.tar"])
def test_shards_without_a_validation_split_are_split(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / name, samples(range(30)))
    data = of_shards(tmp_path, VAL_FRACTION=0.2)
    check_dataset(data, 3)
    train, val = part(data), part(data, train=False)
    names = [one.name(k) for one in (train, val) for k in range(len(one))]
    assert (len(train), len(val), len(set(names))) == (24, 6, 30)
    assert np.bincount(val.labels).tolist() == [2, 2, 2]
    for one in (train, val):
        for k in range(len(one)):
            number = int(Path(one.name(k)).stem)
            assert one.read(k) == picture(number)
            assert one.labels[k] == number % 3
        assert sorted(one.shuffled(np.random.default_rng(0))) == list(range(len(one)))


def test_shard_labels_as_text_or_json(tmp_path: Path) -> None:
    members = [
        ("a.b/x.png", picture(0)),
        ("a.b/x.cls", b"2\n"),
        ("a.b/x.seg.png", b"another thing about x"),
        ("y.cls", b"1"),
        ("y.JPG", picture(1, "JPEG")),
        ("z.json", json.dumps({"label": 0, "filename": "z.webp"}).encode()),
        ("z.webp", picture(2, "WEBP")),
        ("both.json", b'{"width": 3}'),
        ("both.cls", b"1"),
        ("both.png", picture(3)),
        ("notes.txt", b"no image"),
    ]
    write_tar(tmp_path / "train" / "0.tar", members)
    write_tar(tmp_path / "val" / "0.tar", samples([1]))
    (tmp_path / "classes.txt").write_text("ant\n\ncat\n \n")
    train = part(of_shards(tmp_path))
    assert train.labels.tolist() == [2, 1, 0, 1]
    assert train.classes == ["ant", "", "cat"]
    assert [Path(train.name(k)).name for k in range(4)] == ["x.png", "y.JPG", "z.webp", "both.png"]


@pytest.mark.parametrize(("height", "width", "channels"), [(20, 30, 3), (7, 7, 1), (9, 5, None)])
def test_npy_members_are_pixels(tmp_path: Path, height: int, width: int, channels: int | None) -> None:
    shape = (height, width) if channels is None else (height, width, channels)
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, array)
    grey = Image.fromarray(array.squeeze())
    png = io.BytesIO()
    grey.save(png, "PNG")
    for name, kind, content in (("arrays", "npy", file.getvalue()), ("files", "png", png.getvalue())):
        for of_part in ("train", "val"):
            members = [(f"0.{kind}", content), ("0.cls", b"0"), ("1.jpeg", picture(1, "JPEG")), ("1.cls", b"0")]
            write_tar(tmp_path / name / of_part / "0.tar", members)
    found = part(of_shards(tmp_path / "arrays")).read(0)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found.reshape(shape), array)
    arrays, files = (open_dataset(of_shards(tmp_path / name), True, 1, 0, CPU) for name in ("arrays", "files"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's warning of read-only memory
        assert torch.equal(pixels(arrays, 0, 1), pixels(files, 0, 1))


def test_open_files_are_limited(tmp_path: Path) -> None:
    """Also for raw pixels; a file that is cut off while in use causes an error, not a crash."""
    array = np.random.default_rng(0).integers(0, 256, (90, 12, 12, 3), dtype=np.uint8)
    for k in range(90):
        write_tar(tmp_path / "train" / f"{k:02d}.tar", [("0.npy", npy(array[k])), ("0.cls", b"0")])
    train = part(of_shards(tmp_path, VAL_FRACTION=0.01))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for k in range(len(train)):
            found = train.read(k)
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, array[int(Path(train.name(k)).parent.stem)])
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * MOST_OPEN + 1
    last = train.name(len(train) - 1)
    os.truncate(Path(last).parent, 600)
    with pytest.raises(Unreadable, match="ends before byte"):
        train.read(len(train) - 1)


def npy(array: np.ndarray, **how: object) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **how)  # pyright: ignore[reportArgumentType]
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        npy(np.zeros((4, 4, 3), np.float32)),
        npy(np.zeros((4, 4, 4), np.uint8)),
        npy(np.zeros((4, 0, 3), np.uint8)),
        npy(np.asfortranarray(np.zeros((4, 5, 3), np.uint8))),
        npy(np.array([Calls(os.mkdir, "exploded")], dtype=object), allow_pickle=True),
        npy(np.zeros((4, 4, 3), np.uint8))[:-5],
        npy(np.zeros((4, 4, 3), np.uint8))[:60],
        b"\x93NUMPY\x01\x00\x20\x00{'descr':__import__('os').mkdir('exploded')}",
        pickle.dumps(Calls(os.mkdir, "exploded")),
        b"",
    ],
    ids=["floats", "four channels", "empty", "columns first", "objects", "cut", "cut header", "code", "pickle", "none"],
)
def test_npy_members_that_are_not_pixels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unreadable):
        pixels_of(np.frombuffer(bytearray(content), dtype=np.uint8))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_epoch_reads_one_window_of_shards_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr("datasets.shards.source.WINDOW", window)
    sizes = [5, 1, 7, 0, 4, 3, 6]
    data = of_shards(write_set(tmp_path, sizes))
    train = part(data)
    home = np.repeat(np.arange(7), sizes)
    orders = [train.shuffled(np.random.default_rng(seed)) for seed in range(20)]
    most = 0
    for order in orders:
        assert sorted(order) == list(range(26))
        last = {shard: place for place, shard in enumerate(home[order].tolist())}
        inside, end = set[int](), 0
        for place, shard in enumerate(home[order].tolist()):
            inside.add(shard)
            end = max(end, last[shard])
            if place == end:  # none of these shards is read again
                most, inside = max(most, len(inside)), set()
    assert most == min(window, 6)
    assert len({tuple(order) for order in orders}) == 20
    assert np.array_equal(orders[3], part(data).shuffled(np.random.default_rng(3)))
    firsts = {int(home[order[0]]) for order in orders}
    assert len(firsts) > 3, "shards come in any order"


WHOLE = np.arange(5000, dtype=np.int32).astype(np.uint8)
PART = ("0.tar", 1000, 500)


def handles_of(file: Path) -> list[int]:
    """Open handles of this process for the file."""
    handles = [int(name) for name in os.listdir("/proc/self/fd")]
    return [handle for handle in handles if os.path.realpath(f"/proc/self/fd/{handle}") == str(file)]


def test_file_is_reopened_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a file system is mounted again, old handles fail for ever."""
    (tmp_path / "0.tar").write_bytes(WHOLE.tobytes())
    store, preadv = Folder(tmp_path), os.preadv
    store.range(PART)
    dead = handles_of(tmp_path / "0.tar")
    assert dead

    def failing(handle: int, *rest: Any) -> int:
        if handle in dead:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(handle, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Stale file handle"):
        store.range(PART)
    assert not handles_of(tmp_path / "0.tar"), "the dead one is closed"
    dead.clear()
    assert np.array_equal(store.range(PART), WHOLE[1000:1500])


def test_short_file_is_reopened(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(WHOLE[:1200].tobytes())
    store = Folder(tmp_path)
    assert len(store.range(PART)) == 200
    (tmp_path / "copy").write_bytes(WHOLE.tobytes())
    os.replace(tmp_path / "copy", tmp_path / "0.tar")
    assert np.array_equal(store.range(PART), WHOLE[1000:1500])


def test_index_is_made_once_and_again_after_a_change(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    data = of_shards(write_set(tmp_path))
    made = "Reading the headers"

    def makes() -> bool:
        said.clear()
        part(data)
        return made in said.text

    assert makes()
    assert not makes()
    os.utime(tmp_path / "train" / "0001.tar", ns=(1, 1))
    assert makes(), "written anew, perhaps with other content of the same size"
    write_tar(tmp_path / "train" / "0000.tar", samples(range(100, 103)))
    assert makes()
    assert part(data).read(0) == picture(100)
    write_tar(tmp_path / "train" / "0009.tar", samples(range(3)))
    assert makes()
    (tmp_path / "train" / "0001.tar").unlink()
    assert makes()
    assert len(part(data)) == 3 + 4 + 3
    (tmp_path / "index-train.npz").write_bytes((tmp_path / "index-train.npz").read_bytes()[:500])
    assert makes()
    assert not makes()


def test_index_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """A compressed index of 1 MB can take 1 GB of memory before its content is looked at."""
    file = tmp_path / "index-train.npz"
    np.savez_compressed(file, format=np.array(1), shard_sizes=np.zeros(1 << 25, dtype=np.int64))
    content = file.read_bytes()
    assert len(content) < 1 << 20
    tracemalloc.start()
    try:
        assert from_bytes(content) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_index_that_points_outside_is_rebuilt(tmp_path: Path) -> None:
    data = of_shards(write_set(tmp_path))
    part(data)
    file = tmp_path / "index-train.npz"
    with np.load(file) as sound:
        fields = dict(sound)
    for name, value in (
        ("offset", fields["offset"] + 10**9),
        ("size", -fields["size"]),
        ("shard", fields["shard"] + 5),
        ("shard", fields["shard"][::-1]),
        ("name_ends", fields["name_ends"] + 9),
        ("label", fields["label"][:-1]),
        ("label", fields["label"].astype(float)),
        ("shards", np.frombuffer(b"../a\n../b\n../c\n", np.uint8)),
        ("format", np.array(99)),
    ):
        np.savez(file, **{**fields, name: value})
        assert part(data).read(11) == picture(11), name
        with np.load(file) as anew:
            assert all(np.array_equal(anew[field], fields[field]) for field in fields), name


def test_index_is_made_by_one_process(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    data = of_shards(write_set(tmp_path, [40] * 10))
    threads = [threading.Thread(target=check_dataset, args=(data, 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.text.count("Reading the headers of 10") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "nothing half made is left"
