"""`hf:`: image sets in parquet files, copied once and then read like any shards."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.images import Images
from tests.datasets.tar_files import picture
from utils.config.schema import DataConfig
from utils.errors import UserError
from utils.log import log, start_log

pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")

CPU = torch.device("cpu")
NOTES = {
    "image": {"_type": "Image"},
    "label": {"_type": "ClassLabel", "names": ["ant", "bee", "cat"]},
}


def write(
    path: Path,
    numbers: range,
    *,
    notes: dict[str, Any] | None = NOTES,
    labels: list[Any] | None = None,
    columns: tuple[str, str] = ("image", "label"),
    struct: bool = True,
    kind: str = "PNG",
) -> Path:
    """A parquet file as the hub has them: image k has the label k modulo 3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [picture(k, kind) for k in numbers]
    as_struct = pa.array(
        [{"bytes": image, "path": f"{k}.png"} for k, image in zip(numbers, images, strict=True)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table(
        {
            "id": list(numbers),
            columns[0]: as_struct if struct else pa.array(images, pa.binary()),
            columns[1]: labels if labels is not None else [k % 3 for k in numbers],
        }
    )
    if notes is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": notes}})})
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.fixture
def of(settings: Callable[..., DataConfig], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DataConfig]:
    """The settings for a set of parquet files, with a cache of the test's own."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda place, **more: settings(DATASET=f"hf:{place}", **{"CACHE": str(cache), **more})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def part(data: DataConfig, train: bool = True) -> Any:
    check_dataset(data, 3)
    dataset = open_dataset(data, train, 3, 0, CPU)
    assert isinstance(dataset, Images)
    return dataset.samples


def content(samples: Any) -> list[bytes]:
    return [samples.read(k) for k in range(len(samples))]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_images_are_copied_unchanged_with_their_labels(
    tmp_path: Path, of: Callable[..., DataConfig], kind: str
) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", range(10), kind=kind)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", range(10, 15), kind=kind)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", range(20, 24), kind=kind)
    train, val = part(of(tmp_path)), part(of(tmp_path), train=False)
    assert content(train) == [picture(k, kind) for k in range(15)]
    assert content(val) == [picture(k, kind) for k in range(20, 24)]
    assert train.labels.tolist() == [k % 3 for k in range(15)]
    assert val.labels.tolist() == [k % 3 for k in range(20, 24)]
    assert train.classes == ["ant", "bee", "cat"]
    ending = "jpg" if kind == "JPEG" else kind.lower()
    assert train.name(12).endswith(f"/train/00000.tar/00001/00000002.{ending}")
    assert open_dataset(of(tmp_path), True, 3, 0, CPU).__getitems__([(0, 3)]).images.any()


@pytest.mark.parametrize(
    "names",
    [("train/0000.parquet", "validation/0000.parquet"), ("a-train.parquet", "a-val.parquet"), ("x.parquet", None)],
)
def test_parts_by_file_or_folder(tmp_path: Path, of: Callable[..., DataConfig], names: tuple[str, str | None]) -> None:
    write(tmp_path / names[0], range(12))
    if names[1]:
        write(tmp_path / names[1], range(20, 24))
        write(tmp_path / names[1].replace("val", "test"), range(30, 34))
    data = of(tmp_path, VAL_FRACTION=0.25)
    train, val = content(part(data)), content(part(data, train=False))
    if names[1]:
        assert (train, val) == ([picture(k) for k in range(12)], [picture(k) for k in range(20, 24)])
    else:
        assert (len(train), len(val)) == (9, 3)
        assert sorted(train + val) == sorted(picture(k) for k in range(12))


def test_columns_by_the_hubs_notes_or_by_their_names(tmp_path: Path, of: Callable[..., DataConfig]) -> None:
    notes = {"pixels": {"_type": "Image"}, "species": {"_type": "ClassLabel", "names": ["a", "b", "c"]}}
    write(tmp_path / "noted" / "train.parquet", range(9), notes=notes, columns=("pixels", "species"))
    write(tmp_path / "plain" / "train.parquet", range(9), notes=None, struct=False, columns=("img", "target"))
    names = ["cat", "ant", "bee"] * 3
    write(tmp_path / "named" / "train.parquet", range(9), notes=None, labels=names)
    for name, classes in (("noted", ["a", "b", "c"]), ("plain", None), ("named", ["ant", "bee", "cat"])):
        train = part(of(tmp_path / name, VAL_FRACTION=0.4))
        numbers = [next(k for k in range(9) if picture(k) == image) for image in content(train)]
        assert train.classes == classes
        shift = 2 if name == "named" else 0
        assert train.labels.tolist() == [(k + shift) % 3 for k in numbers]


def test_the_copy_is_made_once_and_anew_when_the_files_change(
    tmp_path: Path, of: Callable[..., DataConfig], said: pytest.LogCaptureFixture
) -> None:
    data = of(tmp_path / "set")
    write(tmp_path / "set" / "train.parquet", range(12))
    part(data)
    assert "copying its images into" in said.text
    assert "12 images copied" in said.text
    said.clear()
    part(data)
    assert "copying" not in said.text
    write(tmp_path / "set" / "train.parquet", range(30, 45))
    assert len(part(data)) + len(part(data, train=False)) == 15
    assert "15 images copied" in said.text


def test_the_order_of_an_epoch_mixes_everything(tmp_path: Path, of: Callable[..., DataConfig]) -> None:
    """Files of the hub are often sorted by class: a window of a few would be one class."""
    write(tmp_path / "train.parquet", range(12))
    write(tmp_path / "val.parquet", range(3))
    train = part(of(tmp_path, SHARD_WINDOW=1))
    orders = [train.shuffled(np.random.default_rng(seed)).tolist() for seed in range(5)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def _prepare(data: DataConfig, out: Path) -> None:
    sys.stdout = out.open("w")
    start_log(speaks=True)
    check_dataset(data, 3)
    sys.stdout.flush()


def test_several_processes_copy_once_and_a_broken_off_copy_is_made_anew(
    tmp_path: Path, of: Callable[..., DataConfig]
) -> None:
    """They begin together; what a killed one left behind is in their way."""
    write(tmp_path / "set" / "train.parquet", range(24))
    write(tmp_path / "set" / "test.parquet", range(4))
    data = of(tmp_path / "set")
    check_dataset(data, 3)
    (copied,) = (path for path in Path(data.CACHE or "", "hf").iterdir() if path.is_dir())
    before = {path.name: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    half = copied.with_name(f".{copied.name}.part")
    copied.rename(half)
    (half / "dataset.json").unlink()
    (half / "train" / "00000.tar").write_bytes(b"half")
    outs = [tmp_path / f"out{number}" for number in range(3)]
    processes = [multiprocessing.get_context("fork").Process(target=_prepare, args=(data, out)) for out in outs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted("copying its images" in out.read_text() for out in outs) == [False, False, True]
    assert {path.name: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    assert not half.exists()


def test_an_image_without_bytes_is_left_to_training_to_name(tmp_path: Path, of: Callable[..., DataConfig]) -> None:
    table = pq.read_table(write(tmp_path / "other" / "x.parquet", range(6)))
    images = table["image"].to_pylist()
    images[2], images[4] = None, {"bytes": None, "path": "gone.png"}
    column = pa.array(images, table.schema.field("image").type)
    (tmp_path / "set").mkdir()
    pq.write_table(table.set_column(1, "image", column), tmp_path / "set" / "train.parquet")
    write(tmp_path / "set" / "val.parquet", range(3))
    found = content(part(of(tmp_path / "set")))
    assert [len(image) == 0 for image in found] == [False, False, True, False, True, False]


def no_images(root: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), root / "train.parquet")


def no_labels(root: Path) -> None:
    pq.write_table(pa.table({"image": [b"a"], "caption": ["a"]}), root / "train.parquet")


def paths_only(root: Path) -> None:
    pq.write_table(pa.table({"image": ["a.jpg"], "label": [0]}), root / "train.parquet")


def float_labels(root: Path) -> None:
    write(root / "train.parquet", range(3), labels=[0.5, 1.5, 2.5])


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
        (paths_only, "the column of images is string; it must hold their bytes"),
        (float_labels, "the column label of .* is double; labels are numbers or names"),
        (missing_label, r"train\.parquet, row 1: the label in the column label is missing"),
        (large_label, "label of 00000/00000001.png is 3, which does not fit"),
        (hidden_labels, "label of 00000/00000000.png is -1, which does not fit"),
        (cut_off, r"train\.parquet is no parquet file that can be read"),
        (flipped, r"train\.parquet is no parquet file that can be read"),
        (several, r"holds several data sets: large, small\. Name one of them, as in hf:.*/large"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_read(
    tmp_path: Path, of: Callable[..., DataConfig], make: Callable[[Path], None], message: str
) -> None:
    data = of(tmp_path)
    make(tmp_path)
    with pytest.raises(UserError, match=f"(?s){message}"):
        check_dataset(data, 3)
    copies = [path.name for path in Path(data.CACHE or "", "hf").iterdir() if path.is_dir()]
    assert not any(name.endswith(".part") for name in copies), "nothing half copied is left"


def test_places_that_cannot_be(tmp_path: Path, of: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for place, message in (
        ("", "needs a name or a folder"),
        (tmp_path / "nowhere", "there is no folder"),
        ("owner/name", "not on this machine.*DATA.DOWNLOAD=true fetches it"),
    ):
        with pytest.raises(UserError, match=message):
            check_dataset(of(place), 3)
    write(tmp_path / "train.parquet", range(9))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"needs 0\.0 GB; 0\.0 GB are free"):
            check_dataset(of(tmp_path), 3)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        check_dataset(of(tmp_path), 3)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as fetching a data set asks for."""

    protocol_version = "HTTP/1.1"
    commit = "0123456789abcdef0123456789abcdef01234567"
    root: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        name = self.path.partition("?")[0]
        if name.startswith("/api/datasets/owner/flowers/revision/"):
            about = {"id": "owner/flowers", "sha": self.commit, "siblings": [{"rfilename": file} for file in files]}
            return self._answer(json.dumps(about).encode())
        if name == f"/api/datasets/owner/flowers/tree/{self.commit}":
            sizes = {file: (self.root / file).stat().st_size for file in files}
            tree = [{"type": "file", "path": file, "size": size, "oid": str(size)} for file, size in sizes.items()]
            return self._answer(json.dumps(tree).encode())
        prefix = f"/datasets/owner/flowers/resolve/{self.commit}/"
        if name.startswith(prefix) and name.removeprefix(prefix) in files:
            content = (self.root / name.removeprefix(prefix)).read_bytes()
            return self._answer(content, {"ETag": f'"{len(content)}"', "X-Repo-Commit": self.commit})
        return self._answer(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, code=404)

    def _answer(self, body: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A server like the hub, with owner/flowers in tmp_path/hub."""
    handler = type("Handler", (Hub,), {"root": tmp_path / "hub"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_set_of_the_hub_is_fetched_copied_and_then_needs_no_network(
    tmp_path: Path, hub: str, of: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", range(12))
    write(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", range(4))
    (tmp_path / "hub" / "README.md").write_text("not fetched")
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "home"))
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        there = getattr(importlib.import_module(constants), name)
        monkeypatch.setattr(f"{constants}.{name}", there.replace("https://huggingface.co", hub))
    train = part(of("owner/flowers", DOWNLOAD=True))
    assert content(train) == [picture(k) for k in range(12)]
    assert not list((tmp_path / "home").rglob("README.md"))
    with pytest.raises(UserError, match=r"owner/nothing could not be fetched .*Not Found"):
        check_dataset(of("owner/nothing", DOWNLOAD=True), 3)
    shutil.rmtree(tmp_path / "hub")
    shutil.rmtree(tmp_path / "home")
    assert len(part(of("owner/flowers"), train=False)) == 4
