"""Rows in several files, who writes them, and what is dealt out at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from engine.checkpoint.shard_files import Joined, files_of, shard_name
from engine.checkpoint.sharded_saver import SECONDS_BETWEEN_LOOKS, Helper, Orders
from engine.measure.progress import Best
from models.blocks import blocks_of

ROWS = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(1)}


def test_rows_of_several_files_are_one_tensor(tmp_path: Path) -> None:
    parts = [{"a": ROWS["a"][:2], "b": ROWS["b"]}, {"a": ROWS["a"][2:]}]
    paths = [tmp_path / shard_name("model.safetensors", nth, 2) for nth in range(2)]
    for path, part in zip(paths, parts, strict=True):
        safetensors.torch.save_file({name: rows.contiguous() for name, rows in part.items()}, path)
    joined = Joined(paths)
    assert set(joined) == {"a", "b"}
    assert torch.equal(joined["a"], ROWS["a"])
    assert torch.equal(joined["b"], ROWS["b"])
    assert (joined.shape("a"), joined.shape("b")) == ((3, 2), (1,))


def test_shards_count_only_together_and_in_order() -> None:
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
def test_blocks_are_gathered_one_at_a_time(name: str, units: set[str]) -> None:
    with torch.device("meta"):
        assert {unit for unit, _ in blocks_of(timm.create_model(name))} == units


class Writing:
    """Rank 0 and one helper, in one process, with a store between them."""

    def __init__(self, root: Path) -> None:
        store = HashStore()
        self.orders, self.helper = Orders(store, 2), Helper(root, 1, store, pinned=False)
        self.root = root

    def snapshot(self, update: int, value: float) -> None:
        tensors = {"model.shard-2-of-2.safetensors": {"a": torch.full((2,), value)}}
        self.helper.wait_for_writer()
        self.helper.save(tensors, {}, {"update": update}, Best(), 0.0)

    def write(self, folder: Path, update: int = 1) -> None:
        state = {"position": {"update": update}}
        self.orders.write(folder, {"model.shard-1-of-2.safetensors": {"a": torch.zeros(3)}}, state)


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    both = Writing(tmp_path)
    yield both
    both.helper._over.set()


def test_all_have_written_when_rank_0_returns(writing: Writing, tmp_path: Path) -> None:
    for update, value in ((1, 5.0), (2, 7.0)):
        folder = tmp_path / f".tmp-{update}"
        folder.mkdir()
        writing.snapshot(update, value)
        writing.write(folder, update)
        assert len(list(folder.iterdir())) == 3
        assert safetensors.torch.load_file(folder / "model.shard-2-of-2.safetensors")["a"].tolist() == [value, value]


def test_a_rank_that_is_behind_does_not_write_what_it_held_before(writing: Writing, tmp_path: Path) -> None:
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


def test_what_another_rank_could_not_write_is_told_and_tried_again(writing: Writing, tmp_path: Path) -> None:
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


def test_rank_0_waits_for_the_others_even_where_it_fails_itself(writing: Writing, tmp_path: Path) -> None:
    """Its folder is removed after that; nobody is to be writing there."""
    folder = tmp_path / ".tmp-1"
    folder.mkdir()
    (folder / "model.shard-1-of-2.safetensors").mkdir()
    writing.snapshot(1, 5.0)
    with pytest.raises(OSError, match="irectory"):
        writing.write(folder)
    assert (folder / "model.shard-2-of-2.safetensors").is_file()


def test_a_machine_that_does_not_see_the_folder_is_named(writing: Writing, tmp_path: Path) -> None:
    writing.snapshot(1, 5.0)
    answer = writing.helper._written(tmp_path / "elsewhere", {})
    assert answer is not None
    assert "all machines see them" in answer[1]
