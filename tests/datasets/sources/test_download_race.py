"""Four processes need Caltech-256 at once: torchvision downloads it from a web server once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torchvision.datasets.caltech as theirs

from datasets import check_dataset
from tests.datasets.shards.serving import serving
from tests.datasets.sources.published import MAKERS
from tests.waiting import until
from utils.config.data import DataConfig
from utils.log import start_log

FORK = multiprocessing.get_context("fork")
RACERS = 4


def archive(folder: Path) -> bytes:
    """The published tar file, with a generated tree."""
    MAKERS["caltech256"](folder)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder / "caltech256" / "256_ObjectCategories", "256_ObjectCategories")
    return packed.getvalue()


def race(root: Path, number: int) -> None:
    with open(root / f"heard{number}", "w", buffering=1) as heard:
        sys.stdout = sys.stderr = heard
        start_log(to_terminal=True)
        check_dataset(DataConfig(DATASET="caltech256", DATA_PATH=str(root / "data"), DOWNLOAD=True), 256)
    os._exit(0)


def waiting(root: Path) -> int:
    heard = [path.read_text() for path in root.glob("heard*")]
    return sum("Waiting for another process" in text for text in heard)


def test_four_processes_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tmp_path / "published")
    asked: list[str] = []
    all_here = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(self.path)
            self.do_HEAD()
            half = len(content) // 2
            with contextlib.suppress(
                ConnectionError
            ):  # torchvision first resolves redirects, and does not read the response
                self.wfile.write(content[:half])
                all_here.wait(90)
                self.wfile.write(content[half:])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as address:
        real = theirs.download_and_extract_archive

        def from_here(_url: str, root: str, filename: str, md5: str) -> None:
            assert md5
            real(f"{address}/{filename}", root, filename=filename, md5=hashlib.md5(content).hexdigest())

        monkeypatch.setattr(theirs, "download_and_extract_archive", from_here)
        (tmp_path / "data").mkdir()
        racers = [FORK.Process(target=race, args=(tmp_path, number), daemon=True) for number in range(RACERS)]
        for racer in racers:
            racer.start()
        # Three processes wait for the complete data set and do not use the half that exists.
        until(lambda: waiting(tmp_path) == RACERS - 1)
        assert not (tmp_path / "data" / "caltech256").exists()
        all_here.set()
        for racer in racers:
            racer.join(120)
    assert [racer.exitcode for racer in racers] == [0] * RACERS
    assert asked == ["/256_ObjectCategories.tar"] * 2, "whither, and the file"
    assert sum("Fetching " in path.read_text() for path in tmp_path.glob("heard*")) == 1
    assert sorted(os.listdir(tmp_path / "data")) == [".caltech256.lock", "caltech256"]
    assert os.listdir(tmp_path / "data" / "caltech256") == ["256_ObjectCategories"]
