"""Sharded checkpoints: their files, the ranks that write them, and the units that FSDP shards."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from engine.checkpoint.saver import Snapshot
from engine.checkpoint.sharded_saver import SECONDS_BETWEEN_LOOKS, ShardedSaver, ShardWriter
from models.parts import blocks_of
from utils.config.schema import Config
from vitamp.checkpoints import files_of, shard_name
from vitamp.tensors import JoinedShards

ROWS = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(1)}


def test_shards_are_joined_by_rows(tmp_path: Path) -> None:
    parts = [{"a": ROWS["a"][:2], "b": ROWS["b"]}, {"a": ROWS["a"][2:]}]
    paths = [tmp_path / shard_name("model.safetensors", nth, 2) for nth in range(2)]
    for path, part in zip(paths, parts, strict=True):
        safetensors.torch.save_file({name: rows.contiguous() for name, rows in part.items()}, path)
    joined = JoinedShards(paths)
    assert set(joined) == {"a", "b"}
    assert torch.equal(joined["a"], ROWS["a"])
    assert torch.equal(joined["b"], ROWS["b"])
    assert (joined.shape("a"), joined.shape("b")) == ((3, 2), (1,))


def test_incomplete_shards_are_ignored() -> None:
    twelve = [shard_name("model.safetensors", nth, 12) for nth in range(12)]
    assert files_of("model.safetensors", sorted(twelve)) == twelve
    assert files_of("model.safetensors", twelve[:-1]) == []
    assert files_of("ema.safetensors", twelve) == []
    assert files_of("model.safetensors", ["model.safetensors", "state.pt"]) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("vit_tiny_patch16_224", {f"blocks.{n}" for n in range(12)}),
        (
            "swin_tiny_patch4_window7_224",
            {f"layers.{s}.blocks.{n}" for s, d in enumerate((2, 2, 6, 2)) for n in range(d)},
        ),
        ("resnet18", {f"layer{s}.{n}" for s in (1, 2, 3, 4) for n in (0, 1)}),
    ],
)
def test_fsdp_units_are_the_blocks(name: str, units: set[str]) -> None:
    with torch.device("meta"):
        assert {unit for unit, _ in blocks_of(timm.create_model(name))} == units


class Writing:
    """Savers of rank 0 and rank 1, in one process, with a store between them."""

    def __init__(self, root: Path) -> None:
        store = HashStore()
        self.first = ShardedSaver(root, Config(), pinned=False, store=store, ranks=2)
        self.helper = ShardWriter(root, 1, store, pinned=False)

    def snapshot(self, update: int, value: float) -> None:
        tensors = {"model.shard-2-of-2.safetensors": {"a": torch.full((2,), value)}}
        self.helper.wait_for_writer()
        self.helper.save(Snapshot(tensors, {}, {"update": update}, None))

    def write(self, folder: Path, update: int = 1) -> None:
        tensors = {"model.shard-1-of-2.safetensors": {"a": torch.zeros(3)}}
        self.first.write(folder, Snapshot(tensors, {}, {"update": update}, None))


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    both = Writing(tmp_path)
    yield both
    both.helper._superseded.set()


def test_all_ranks_have_written_when_rank_0_returns(writing: Writing, tmp_path: Path) -> None:
    for update, value in ((1, 5.0), (2, 7.0)):
        folder = tmp_path / f".tmp-{update}"
        folder.mkdir()
        writing.snapshot(update, value)
        writing.write(folder, update)
        assert len(list(folder.iterdir())) == 3
        assert safetensors.torch.load_file(folder / "model.shard-2-of-2.safetensors")["a"].tolist() == [value, value]


def test_rank_behind_does_not_write_its_older_snapshot(writing: Writing, tmp_path: Path) -> None:
    """Rank 0 may have copied an update that another has yet to copy."""
    folder = tmp_path / ".tmp-2"
    folder.mkdir()
    writing.snapshot(1, 5.0)
    ahead = threading.Thread(target=writing.write, args=(folder, 2))
    ahead.start()
    ahead.join(3 * SECONDS_BETWEEN_LOOKS)
    assert ahead.is_alive(), "it waits for the other"
    writing.snapshot(2, 7.0)
    ahead.join(10)
    assert safetensors.torch.load_file(folder / "model.shard-2-of-2.safetensors")["a"].tolist() == [7.0, 7.0]


def test_write_error_on_another_rank_is_raised_and_retried(writing: Writing, tmp_path: Path) -> None:
    folder = tmp_path / ".tmp-1"
    folder.mkdir()
    in_the_way = folder / "model.shard-2-of-2.safetensors"
    in_the_way.mkdir()
    writing.snapshot(1, 5.0)
    with pytest.raises(OSError, match=r"\(rank 1\)") as caught:
        writing.write(folder)
    assert "model.shard-2" in str(caught.value.filename)
    in_the_way.rmdir()
    writing.write(folder)
    assert safetensors.torch.load_file(in_the_way)["a"].tolist() == [5.0, 5.0]


def test_rank_0_waits_for_other_ranks_even_if_it_fails(writing: Writing, tmp_path: Path) -> None:
    """Rank 0 then removes the folder, in which nobody may be writing any more."""
    folder = tmp_path / ".tmp-1"
    folder.mkdir()
    (folder / "model.shard-1-of-2.safetensors").mkdir()
    writing.snapshot(1, 5.0)
    with pytest.raises(OSError, match="irectory"):
        writing.write(folder)
    assert (folder / "model.shard-2-of-2.safetensors").is_file()


def test_folder_missing_on_another_machine_is_an_error(writing: Writing, tmp_path: Path) -> None:
    writing.snapshot(1, 5.0)
    answer = writing.helper._write(tmp_path / "elsewhere", {})
    assert answer is not None
    assert "a file system that all machines share" in answer[1]
