"""Index of shards: made once, saved, and checked before use."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datasets import check_dataset
from datasets.shards.index import from_bytes
from tests.datasets.opened import part
from tests.datasets.shards.tar_files import picture, samples, write_set, write_tar
from utils.config.data import DataConfig


def test_index_is_made_once_and_again_after_a_change(
    tmp_path: Path, of_shards: Callable[..., DataConfig], said: pytest.LogCaptureFixture
) -> None:
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


def test_index_that_points_outside_is_rebuilt(tmp_path: Path, of_shards: Callable[..., DataConfig]) -> None:
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


def test_index_is_made_by_one_process(
    tmp_path: Path, of_shards: Callable[..., DataConfig], said: pytest.LogCaptureFixture
) -> None:
    data = of_shards(write_set(tmp_path, [40] * 10))
    threads = [threading.Thread(target=check_dataset, args=(data, 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.text.count("Reading the headers of 10") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "nothing half made is left"
