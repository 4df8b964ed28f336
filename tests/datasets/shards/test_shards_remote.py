"""Shards at a URL and in an object store."""

import socket
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, TrainLoader, check_dataset, open_dataset
from datasets.images import Images
from datasets.variants import Repeated
from tests.datasets.opened import CPU, of_shards, pixels
from tests.datasets.processes import in_order
from tests.datasets.shards.serving import ByteRanges, Hostile, serving
from tests.datasets.shards.tar_files import write_set
from tests.datasets.shards.test_shards_bad import manifest
from tests.program import Vitamp
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.text import redacted, redacted_values


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A web server over tmp_path."""
    with serving(partial(ByteRanges, directory=str(tmp_path))) as place:
        yield place


def batches(data: DataConfig, workers: int) -> list[tuple[list[int], list[int], bytes]]:
    train = open_dataset(data, True, 3, 5, CPU)
    order = EpochOrder(len(train), 4, 1, 0, 1, seed=5, drop_last=True, shuffled=train.shuffled)
    loader = TrainLoader(train, order, 5, workers, CPU)
    try:
        return in_order(loader)
    finally:
        loader.close()


def test_remote_shards_equal_local_ones(
    tmp_path: Path, address: str, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in loading processes, which have their own connections."""
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    write_set(tmp_path / "set", [6, 5, 9])
    here, there = of_shards(tmp_path / "set"), of_shards(f"{address}/set/")
    check_dataset(there, 3)
    expected = batches(here, 0)
    assert len(expected) == 5
    (tmp_path / "set" / "index-train.npz").unlink()
    said.clear()
    for workers in (0, 2):
        assert batches(there, workers) == expected
    assert "Reading the headers" not in said.text, "the index is kept on this machine"
    manifest(tmp_path / "set")
    monkeypatch.setattr(ByteRanges, "list_directory", lambda self, _: self.send_error(403))  # as nginx by default
    assert batches(there, 0) == expected


def test_remote_shards_are_fetched_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    write_set(tmp_path)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/bucket/set", recursive=True)
    try:
        data = of_shards("memory://bucket/set", CACHE_GB=0)
        check_dataset(data, 3)
        train = open_dataset(data, True, 3, 0, CPU)
        assert isinstance(train, Images)
        asked: list[int] = []
        whole = type(store).cat_ranges
        monkeypatch.setattr(
            type(store), "cat_ranges", lambda *a, **k: (asked.append(len(a[1])), whole(*a, **k))[1], raising=False
        )
        expected = open_dataset(of_shards(tmp_path), True, 3, 0, CPU)
        assert torch.equal(pixels(train, 3, 8, 1, 3), pixels(expected, 3, 8, 1, 3))
        keys = [(1, 3), (1, 3 + len(train)), (1, 8)]
        assert torch.equal(*(Repeated(split, 2).__getitems__(keys).images for split in (train, expected)))
        assert asked == [2, 2], "each image once, and those near each other together"
        everything = open_dataset(of_shards("memory://bucket/set", PART="all", CACHE_GB=0), False, 3, 0, CPU)
        assert len(pixels(everything, *range(len(everything)))) == 16
        assert asked[4:] == [3, 1], "-part all, too: one of each tar file, after one that tries the server"
        store.rm("/bucket/set/train/0001.tar")
        with pytest.raises(OSError, match="0001"):
            train.samples.read(6)
    finally:
        store.rm("/bucket", recursive=True)


def test_server_that_ignores_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before training, and the server is blamed: else each image would be a whole tar file, and damaged."""
    monkeypatch.setattr("datasets.shards.index.PAUSES", (0.0,))
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    write_set(tmp_path / "set", [3])
    for folder in ("other", "set"):
        with serving(partial(Handler, directory=str(tmp_path))) as place:
            if folder == "set":  # with an index, no header would be read
                open_dataset(of_shards(tmp_path / "set"), True, 3, 0, CPU)
            with pytest.raises(UserError, match="/set cannot be read: the server ignores requests for a part"):
                check_dataset(of_shards(f"{place}/set"), 3)


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    monkeypatch.setattr("datasets.shards.index.PAUSES", (0.0,))
    monkeypatch.setattr("datasets.shards.index.SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts connections; nothing reads them
        place, began = f"http://127.0.0.1:{silent.getsockname()[1]}/set", time.monotonic()
        with pytest.raises(UserError, match="/set cannot be read: it does not answer"):
            check_dataset(of_shards(place), 3)
    assert time.monotonic() - began < 60


SLOW = r"is too slow \(\d+ bytes in \d+ s; the least is 1,000 bytes per second\)"


@pytest.mark.parametrize(
    ("fault", "of", "message"),
    [
        ("endless", "/dataset.json", "/dataset.json has more than 16,777,216 bytes"),
        ("endless", "/index-train.npz", "/index-train.npz has more than 16,777,216 bytes"),
        ("endless", "/train", "/train has more than 16,777,216 bytes"),
        ("endless", "/0000.tar", "ignores requests for a part of a file"),
        ("gzip", "/dataset.json", "Content-Encoding 'gzip', which was not asked for"),
        ("gzip", "/0000.tar", "Content-Encoding 'gzip', which was not asked for"),
        ("slow", "/dataset.json", f"/dataset.json {SLOW}"),
        ("slow", "/0000.tar", f"/0000.tar {SLOW}"),
        ("slow headers", "/dataset.json", r"/dataset.json is too slow \(no complete headers in 0.3 s\)"),
    ],
)
def test_answers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, of: str, message: str
) -> None:
    """In size and time; one that is encoded could become any size."""
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    monkeypatch.setattr("datasets.shards.index.PAUSES", (0.0,))
    monkeypatch.setattr("datasets.shards.web.SECONDS_OF_SPEED", 0.2)
    monkeypatch.setattr("datasets.shards.web.SECONDS_OF_HEADERS", 0.3)
    monkeypatch.setattr("datasets.shards.web.LARGEST_ANSWER", 16 << 20)
    write_set(tmp_path / "set", [3])
    Hostile.poured = 0
    server = serving(partial(Hostile, fault=fault, of=of, directory=str(tmp_path)))
    with server as place, pytest.raises(UserError, match=message):
        check_dataset(of_shards(f"{place}/set"), 3)
    assert Hostile.poured < 32 << 20


def test_hostile_server_is_refused_before_training(tmp_path: Path, vitamp: Vitamp) -> None:
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    write_set(tmp_path / "set", [3])
    Hostile.poured = 0
    with serving(partial(Hostile, fault="endless", of="/dataset.json", directory=str(tmp_path))) as place:
        words = ("-dataset", "shards", "-data_path", f"{place}/set", "-num_classes", 3, "-device", "cpu")
        refused = vitamp(*words, "-output", tmp_path / "run", f"DATA.CACHE={tmp_path / 'cache'}", code=2)
    assert f"{place}/set/dataset.json has more than 16,777,216 bytes" in refused.err


def test_header_that_claims_to_be_huge_is_not_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    monkeypatch.setattr("datasets.shards.index.PAUSES", (0.0,))
    monkeypatch.setattr("datasets.shards.index.LARGEST_READ", 6 << 20)
    huge = tarfile.TarInfo("pax")
    huge.type, huge.size = tarfile.XHDTYPE, 20 << 20
    (tmp_path / "all.tar").write_bytes(huge.tobuf() + bytes(21 << 20))
    server = serving(partial(ByteRanges, directory=str(tmp_path)))
    with server as place, pytest.raises(UserError, match=r"all\.tar cannot be read: a header has [\d,]+ bytes"):
        check_dataset(of_shards(place), 3)


def test_redirect_to_another_host_is_logged_once(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    write_set(tmp_path / "set", [3])
    with serving(partial(Hostile, fault="redirect", of="", directory=str(tmp_path))) as place:
        check_dataset(of_shards(f"{place}/set"), 3)
    other = place.replace("127.0.0.1", "localhost")
    assert said.text.count("redirects to another host") == 1
    assert f"{place} redirects to another host: {other}. That one is read." in said.text


def test_password_of_a_url_reaches_no_file(tmp_path: Path, vitamp: Vitamp, address: str) -> None:
    """Neither of the log, nor of the settings: a resume needs the URL again, and says so."""
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    write_set(tmp_path / "set", [6, 6])
    url = address.replace("://", "://ann:geheim@") + "/set"
    run = tmp_path / "run"
    model = ("MODEL.NAME=t", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")
    words = (*model, "DATA.IMAGE_SIZE=8", "-num_classes", 3, "-batch_size", 4, "-device", "cpu", "THREADS=1")
    cache = f"DATA.CACHE={tmp_path / 'cache'}"
    first = vitamp("-dataset", "shards", "-data_path", url, *words, cache, "TRAIN.NUM_EPOCHS=1", "-output", run, code=0)
    again = ("-resume", run, "TRAIN.NUM_EPOCHS=2")
    without = vitamp(*again, code=2)
    assert "is without its password. Give the whole URL: -data_path" in without.err
    vitamp(*again, "-data_path", url, code=0)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"log.txt", "run.json", "config.yaml", "meta.json", "metrics.jsonl"} <= {path.name for path in files}
    assert "DATA.DATA_PATH" not in (run / "log.txt").read_text(encoding="utf-8"), "the URL has not changed"
    for path in (*files, *(tmp_path / "cache").rglob("*")):
        assert path.is_dir() or b"geheim" not in path.read_bytes(), path
    assert "geheim" not in first.text + without.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://ann:pw@host:80/a b", "at http://***@host:80/a b"),
        ('"https://token@host/x"', '"https://***@host/x"'),
        ("'https://h/a.tar?X-Amz-Signature=1&b=2' z", "'https://h/a.tar?***' z"),
        ('see "https://h/a?token=1", "b"', 'see "https://h/a?***", "b"'),
        ("https://h/a?page=2 and me@example.org", "https://h/a?page=2 and me@example.org"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
    ],
)
def test_urls_are_shown_without_secrets(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown
    assert redacted_values({"tag": [text]}) == {"tag": [shown]}
