"""Whole tar files of a URL that are kept on this machine, and stores that fail."""

import hashlib
import json
import os
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from datasets import EpochOrder, TrainLoader, ValLoader, open_dataset
from datasets.shards import cache as caches
from datasets.shards.cache import HASH, ShardCache
from datasets.shards.index import Remote, ShardFile
from tests.datasets.opened import CPU, of_shards
from tests.datasets.processes import in_order
from tests.datasets.shards.serving import ByteRanges, FaultyStore, serving
from tests.datasets.shards.tar_files import write_set
from tests.program import Vitamp
from tests.waiting import until
from utils.errors import TrainingError, UserError

pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")

USAGE = namedtuple("USAGE", "free")  # as shutil.disk_usage says it
TINY_MODEL = (
    *("MODEL.NAME=t", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2"),
    *("DATA.IMAGE_SIZE=8", "DATA.NUM_WORKERS=0", "-num_classes", 3, "-batch_size", 4, "-device", "cpu"),
    *("THREADS=1", "TRAIN.NUM_EPOCHS=1"),
)
FAULTS = ("503", "truncated", "shorter", "429", "whole")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve tar files; failed requests for them are repeated at once."""
    monkeypatch.setattr("datasets.shards.index.PAUSES", (0.0,) * 6)
    monkeypatch.setattr("datasets.shards.index.LONGEST_PAUSE", 0.05)  # the store asks for a day
    FaultyStore.sent.clear()
    return write_set(tmp_path / "set", [4] * 12, val=12)


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    with serving(partial(FaultyStore, directory=str(root.parent), every=9, faults=FAULTS)) as place:
        yield f"{place}/set"


def of_tars(suffix: str = ".tar") -> list[int]:
    """Bytes of each answer with a part of a training file."""
    return [size for path, size in FaultyStore.sent if path.startswith("/set/train/") and path.endswith(suffix)]


def epochs(place: object, workers: int, world: int = 1, **more: object) -> list[object]:
    """The batches of three epochs, of one rank after the other."""
    found: list[object] = []
    for rank in range(world):
        train = open_dataset(of_shards(place, **more), True, 3, 5, CPU)
        order = EpochOrder(len(train), 4, 1, rank, world, seed=5, drop_last=True, shuffled=train.shuffled)
        loader = TrainLoader(train, order, 5, workers, CPU)
        try:
            found += [in_order(loader, epoch) for epoch in (1, 2, 3)]
        finally:
            loader.close()
    return found


def manifest_with_hashes(root: Path, wrong: str = "") -> None:
    """The manifest that packing would write; `wrong`: the file whose hash is another."""
    parts = {}
    for part in ("train", "val"):
        shards = []
        for tar in sorted((root / part).iterdir()):
            name = f"{part}/{tar.name}"
            digest = "0" * 64 if name == wrong else hashlib.sha256(tar.read_bytes()).hexdigest()
            shards.append({"name": name, "bytes": tar.stat().st_size, "sha256": digest})
        parts[part] = {"shards": shards}
    about = {"made_by": "vitamp", "classes": None, "parts": parts}
    (root / "dataset.json").write_text(json.dumps(about))


def cached(address: str, root: Path, folder: Path, limit: float = 1e9, stamps: bool = False) -> ShardCache:
    folder.mkdir(exist_ok=True)
    tars = sorted((root / "train").iterdir())
    hashes = [HASH + hashlib.sha256(tar.read_bytes()).hexdigest() if stamps else "" for tar in tars]
    files = [ShardFile(f"train/{tar.name}", tar.stat().st_size, one) for tar, one in zip(tars, hashes, strict=True)]
    return ShardCache(Remote(address), files, folder, limit)


@pytest.mark.parametrize(("world", "workers", "gigabytes"), [(1, 0, 50), (2, 2, 50), (3, 1, 50), (4, 0, 50), (2, 2, 0)])
def test_batches_equal_those_of_local_files(
    root: Path, address: str, cache: Path, said: pytest.LogCaptureFixture, world: int, workers: int, gigabytes: float
) -> None:
    """Although every ninth request fails. Each tar file is downloaded once, by whichever rank."""
    assert epochs(address, workers, world, CACHE_GB=gigabytes) == epochs(root, 0, world)
    assert f"{address} fails at times: " in said.text
    if not gigabytes:
        assert "images are requested by ranges of tar files: DATA.CACHE_GB is 0" in said.text
        assert not (cache / "tars").exists()
        return
    assert "whole tar files are downloaded ahead into" in said.text
    until(lambda: epochs(address, workers) and len([*(cache / "tars").glob("*.tar")]) == 12)
    FaultyStore.sent.clear()
    assert epochs(address, workers) == epochs(root, 0)
    assert len(of_tars()) <= 2, "another run only asks whether the server sends parts of files"


def test_near_ranges_are_one_request(address: str) -> None:
    val = open_dataset(of_shards(address, CACHE_GB=0), False, 3, 5, CPU)
    FaultyStore.sent.clear()
    assert sum(int((batch.indices >= 0).sum()) for batch in ValLoader(val, 6, 0, 1, 0, CPU)) == 12
    assert len(FaultyStore.sent) <= 3, "two batches, and at most one failure"


@pytest.mark.parametrize(
    ("part", "free", "why"),
    [(1e-6, 1e12, "there is room for"), (0.9, 100, "there is room for"), (0.9, 1e12, "reads 33 % of them")],
)
def test_whole_files_are_not_downloaded_in_vain(
    root: Path,
    address: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    part: float,
    free: float,
    why: str,
) -> None:
    """`part`: of the set, for which DATA.CACHE_GB has room."""
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: USAGE(free))
    sizes = sum(path.stat().st_size for path in (root / "train").iterdir())
    train = open_dataset(of_shards(address, CACHE_GB=part * sizes / 1e9), True, 3, 5, CPU).single_images()
    assert train is not None
    train.machines, train.window = 3, 2  # pyright: ignore[reportAttributeAccessIssue]
    assert train.look_ahead() is None
    assert why in said.text


def test_download_resumes_where_a_killed_process_left_it(root: Path, address: str, tmp_path: Path) -> None:
    """Two processes that want the same file share one download."""
    one, other = (cached(address, root, tmp_path / "kept", stamps=True) for _ in range(2))
    content = (root / "train" / "0003.tar").read_bytes()
    path = one._path(3)
    path.with_suffix(".part").write_bytes(content[:5000])
    for either in (one, other):
        either.announce([3], 16)
    until(path.exists)
    time.sleep(0.1)
    assert path.read_bytes() == content
    assert set(of_tars("0003.tar")) == {len(content) - 5000}
    assert [kept.name for kept in path.parent.iterdir()] == [path.name]
    os.truncate(path, 5000)
    assert not one.has(3)
    assert one.range(3, 4000, 2000) is None


def test_download_that_another_process_has_finished_is_left_alone(
    root: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached(address, root, tmp_path / "kept")
    path, unfinished = cache._path(3), cache._path(3).with_suffix(".part")
    lock = caches.fcntl.flock

    def after_the_other(opened: object, how: int) -> None:
        unfinished.rename(path)
        lock(opened, how)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(caches.fcntl, "flock", after_the_other)
    cache._download(3, unfinished)
    assert not FaultyStore.sent
    assert [kept.name for kept in path.parent.iterdir()] == [path.name]


def test_file_in_the_cache_is_of_one_version_and_any_password(tmp_path: Path) -> None:
    def path(user: str, stamp: str) -> Path:
        return ShardCache(Remote(f"http://{user}@host/set"), [ShardFile("0.tar", 1, stamp)], tmp_path, 1)._path(0)

    assert path("me:one", "v1") == path("me:two", "v1") != path("me:two", "v2")


@pytest.mark.parametrize("lost", ["train/0000-nothing.tar", "train/0001.tar"])
def test_ranges_that_fail_are_requested_again_alone(root: Path, lost: str) -> None:
    """A file that is missing does not keep others from being requested again."""
    wanted = [(name, 0, 600) for name in (lost, *(f"train/{number:04d}.tar" for number in (2, 3, 4)))]
    with serving(partial(FaultyStore, directory=str(root), every=3, faults=("503",))) as place:
        next(count for count in FaultyStore.counts if count % 3 == 2)
        found = Remote(place).ranges(wanted)
    assert {*found} == {one for one in wanted if (root / one[0]).exists()}
    assert len(FaultyStore.sent) == len(found) + 1


def test_cache_is_bounded_and_drops_the_file_unused_for_longest(
    root: Path, address: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    limit = 3.5 * (root / "train" / "0000.tar").stat().st_size
    cache = cached(address, root, tmp_path / "kept", limit)
    (abandoned := cache.folder / f"{'0' * 32}-{limit:.0f}.part").touch()
    os.utime(abandoned, (0, 0))
    for number in (0, 1, 2, 0, 3):
        cache.announce([number], 1)
        until(lambda number=number: cache.has(number))
        time.sleep(0.02)
    assert [number for number in range(12) if cache._path(number).exists()] == [0, 2, 3]
    assert cache.bytes_used() <= limit
    assert not abandoned.exists()
    cache.announce([4, 5, 6, 7], 4)
    until(lambda: "there is no room" in said.text)
    assert cache.bytes_used() <= limit, "nor does it remove what is needed now"


def test_images_are_read_without_a_cache_on_a_full_disk(
    root: Path, address: str, cache: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "SECONDS_TO_REST", 0.0)
    expected = epochs(root, 0)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: USAGE(20_000))
    monkeypatch.setattr("datasets.shards.source.ShardSamples._why_in_parts", lambda _: "")
    assert epochs(address, 1) == expected
    assert "there is no room" in said.text
    assert not [*(cache / "tars").glob("*.tar")]
    shutil.rmtree(cache / "tars")


def test_tar_files_with_another_hash_are_refused_before_training(root: Path, cache: Path, vitamp: Vitamp) -> None:
    manifest_with_hashes(root, wrong="train/0011.tar")
    output = root / "run"
    words = (*TINY_MODEL, f"DATA.CACHE={cache}", "-output", output)
    with serving(partial(ByteRanges, directory=str(root))) as address:
        refused = vitamp("-dataset", "shards", "-data_path", address, *words, code=2)
    assert f"{address}/train/0011.tar has another hash (sha256) than in dataset.json" in refused.err
    assert not output.exists()
    assert len([*(cache / "tars").glob("*-*.tar")]) == 11
    assert not [*(cache / "tars").glob("*.part")]


def test_another_hash_found_later_ends_training(root: Path, address: str, tmp_path: Path) -> None:
    """Such a file is downloaded once more before."""
    cache = cached(address, root, tmp_path / "kept", stamps=True)
    wrong = root / "train" / "0003.tar"
    wrong.write_bytes(wrong.read_bytes()[::-1])
    cache.announce([3], 16)
    until(lambda: cache.refusal)
    with pytest.raises(TrainingError, match=r"train/0003\.tar has another hash"):
        cache.has(0)
    assert of_tars("0003.tar")[-2:] == [wrong.stat().st_size] * 2
    assert not [*cache.folder.iterdir()]


def test_cached_file_is_hashed_at_its_first_use_in_a_run(
    root: Path, address: str, tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the processes of a machine. A file with other bytes is removed."""
    digest, hashed = caches.hashlib.file_digest, []
    monkeypatch.setattr(caches.hashlib, "file_digest", lambda *a: (hashed.append(a), digest(*a))[1])
    folder = tmp_path / "kept"
    before = cached(address, root, folder, stamps=True)
    for number in (2, 3):
        tar = root / "train" / f"{number:04d}.tar"
        content = tar.read_bytes()
        path = before._path(number)
        path.write_bytes(content if number == 2 else content[::-1])
        os.utime(path, (0, 0))
    one, other = (cached(address, root, folder, stamps=True) for _ in range(2))
    assert all(cache.has(2) for cache in (one, other, one, other))
    assert other._check(2, other._path(2)), "as when both begin at once, and one waits for the other"
    assert len(hashed) == 1
    assert one.range(3, 0, 600) is None
    assert not one._path(3).exists()
    assert "is damaged (its sha256 is not the one in dataset.json), so it is downloaded again" in said.text
    one.check(3)
    assert other.has(3)
    assert one._path(3).read_bytes() == (root / "train" / "0003.tar").read_bytes()


def test_only_files_that_the_cache_wrote_are_removed(root: Path, tmp_path: Path, vitamp: Vitamp) -> None:
    """In a folder of the user, and in its own."""
    place, other = tmp_path / "cache", "0" * 32
    sizes = [tar.stat().st_size for tar in (root / "train").iterdir()]
    names = ["imagenet-train-000000.tar", "imagenet-train-000001.tar", "old-12345.part", f"{other}-30000.tar"]
    own = place / "tars-vitamp"
    for folder in (place / "tars", own):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(bytes(30000))
            os.utime(folder / name, (0, 0))
    (own / caches.MARK).touch()
    (own / f"{other}-30000.tar").rename(own / f"{other}-31000.tar")
    manifest_with_hashes(root)
    words = (*TINY_MODEL, f"DATA.CACHE={place}", f"DATA.CACHE_GB={(sum(sizes) + 5000) / 1e9}")
    with serving(partial(ByteRanges, directory=str(root))) as address:
        done = vitamp("-dataset", "shards", "-data_path", address, *words, "-output", root / "run", code=0)
    assert f"{place}/tars has files that this cache did not write; they are left alone." in done.text
    assert sorted(path.name for path in (place / "tars").iterdir()) == sorted(names)
    left = {path.name for path in own.iterdir()}
    assert {*names[:3], f"{other}-31000.tar"} <= left
    assert len(left) > 5, "tar files are kept beside them"


def test_cache_in_folders_of_the_user_is_refused(tmp_path: Path) -> None:
    for name in ("tars", "tars-vitamp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.tar").touch()
    with pytest.raises(UserError, match="tars-vitamp has files that vitamp did not write"):
        caches.tar_folder(of_shards("http://host", CACHE=str(tmp_path)))
