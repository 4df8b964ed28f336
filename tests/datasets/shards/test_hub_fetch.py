"""Data sets of the hub are downloaded once; afterwards they need no network."""

import importlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from datasets import check_dataset
from tests.datasets.opened import content, of_hub, part
from tests.datasets.shards.parquet_files import write
from tests.datasets.shards.serving import serving
from tests.datasets.shards.tar_files import picture
from utils.errors import UserError


class Hub(BaseHTTPRequestHandler):
    """The requests of the hub that a download uses."""

    protocol_version = "HTTP/1.1"
    commit = "0123456789abcdef0123456789abcdef01234567"
    root: Path
    asked: list[str]
    """Revisions whose files were listed"""
    fetched: set[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        name = self.path.partition("?")[0]
        if name.startswith("/api/datasets/owner/flowers/revision/"):
            about = {"id": "owner/flowers", "sha": self.commit, "siblings": [{"rfilename": file} for file in files]}
            return self._answer(json.dumps(about).encode())
        if name.startswith("/api/datasets/owner/flowers/tree/"):
            self.asked.append(name.rpartition("/tree/")[2])
            sizes = {file: (self.root / file).stat().st_size for file in files}
            tree = [{"type": "file", "path": file, "size": size, "oid": str(size)} for file, size in sizes.items()]
            return self._answer(json.dumps(tree).encode())
        prefix = f"/datasets/owner/flowers/resolve/{self.commit}/"
        if name.startswith(prefix) and name.removeprefix(prefix) in files:
            self.fetched.add(name.removeprefix(prefix))
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
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A server like the hub, with owner/flowers in tmp_path/hub."""
    handler = type("Handler", (Hub,), {"root": tmp_path / "hub", "asked": [], "fetched": set()})
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "home"))
    with serving(handler) as place:
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
            there = getattr(importlib.import_module(constants), name)
            monkeypatch.setattr(f"{constants}.{name}", there.replace("https://huggingface.co", place))
        yield handler


def test_hub_data_set_needs_no_network_after_its_copy(tmp_path: Path, hub: type[Hub]) -> None:
    write(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", range(12))
    write(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", range(4))
    (tmp_path / "hub" / "README.md").write_text("not fetched")
    train = part(of_hub("owner/flowers", DOWNLOAD=True))
    assert content(train) == [picture(k) for k in range(12)]
    assert not list((tmp_path / "home").rglob("README.md"))
    with pytest.raises(UserError, match=r"owner/nothing could not be fetched .*Not Found"):
        check_dataset(of_hub("owner/nothing", DOWNLOAD=True), 3)
    assert not any(name.endswith(".md") for name in hub.fetched)
    shutil.rmtree(tmp_path / "hub")
    shutil.rmtree(tmp_path / "home")
    assert len(part(of_hub("owner/flowers"), train=False)) == 4


def test_hub_asks_for_a_configuration_before_it_fetches(
    tmp_path: Path, hub: type[Hub], said: pytest.LogCaptureFixture
) -> None:
    for name in ("large", "small"):
        write(tmp_path / "hub" / name / "train-0.parquet", range(12))
        write(tmp_path / "hub" / name / "test-0.parquet", range(4))
        write(tmp_path / "hub" / name / "unlabelled-0.parquet", range(4))
    with pytest.raises(UserError, match=r"several data sets: large, small\. Name one of them, as in hf:owner/f"):
        check_dataset(of_hub("owner/flowers", DOWNLOAD=True), 3)
    assert not hub.fetched
    assert len(part(of_hub("owner/flowers/small", DOWNLOAD=True))) == 12
    assert hub.fetched == {"small/train-0.parquet", "small/test-0.parquet"}, "only the splits that are used"
    assert "Fetching 2 parquet files (0.00 GB) of owner/flowers/small" in said.text
    assert f"to get the same files again, name its revision: hf:owner/flowers/small@{Hub.commit}" in said.text


def test_hub_revision_can_be_named(tmp_path: Path, cache: Path, hub: type[Hub]) -> None:
    write(tmp_path / "hub" / "a" / "train-0.parquet", range(12))
    latest, older = (of_hub(f"owner/flowers{more}", DOWNLOAD=True, VAL_FRACTION=0.25) for more in ("", "/a@v1.0"))
    assert (len(part(latest)), len(part(older))) == (9, 9)
    assert [revision for revision in hub.asked if revision != Hub.commit] == ["main", "v1.0"]
    copies = [path.name for path in (cache / "hf").iterdir() if path.is_dir()]
    assert {name.rpartition("-")[0] for name in copies} == {"owner-flowers", "owner-flowers-a-v1.0"}
