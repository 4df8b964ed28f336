"""DATA.SAMPLER by_machine: each machine reads tar files of its own."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from datasets import MicroBatch, OrderByMachine, open_dataset
from tests.datasets.opened import CPU, of_shards
from tests.datasets.shards.tar_files import write_set
from utils.config.data import DropLast

SIZES = np.array([7, 11, 3, 9, 14, 8, 10, 6, 12, 5, 13, 9, 4, 7])
BEGINS = np.cumsum([0, *SIZES])
SPLIT: Any = SimpleNamespace(file_begins=BEGINS, window=2)


def windows(
    machines: int, ranks: int, epoch: int = 1, split: Any = SPLIT, drop_last: DropLast = "batch", copies: int = 1
) -> list[list[list[MicroBatch]]]:
    """The micro-batches of each update, machine by machine; an update has 4 of each machine, of 2 images."""
    world = machines * ranks
    orders = [
        OrderByMachine(
            split,
            machines,
            samples=int(split.file_begins[-1]),
            batch_size=2,
            accum=4 // ranks,
            rank=rank,
            world=world,
            seed=3,
            drop_last=drop_last,
            copies=copies,
        )
        for rank in range(world)
    ]
    by_rank = zip(*(order.windows(epoch) for order in orders), strict=True)
    return [
        [[share for rank in shares[m * ranks :][:ranks] for share in rank] for m in range(machines)]
        for shares in by_rank
    ]


def files_of(updates: list[list[list[MicroBatch]]], machine: int) -> set[int]:
    """Of all that the machine reads, also what it computes with weight 0."""
    read = np.concatenate([share.indices for update in updates for share in update[machine]])
    return {*np.searchsorted(BEGINS, read % BEGINS[-1], side="right").tolist()}


@pytest.mark.parametrize("machines", [2, 3, 5])
@pytest.mark.parametrize("drop_last", ["batch", "update", False])
def test_each_image_once_and_each_machine_its_own_files(machines: int, drop_last: DropLast) -> None:
    epochs = [windows(machines, 2, epoch, drop_last=drop_last) for epoch in (1, 2)]
    for updates in epochs:
        shares = [share for update in updates for machine in update for share in machine if share.weight]
        seen = np.concatenate([share.indices for share in shares])
        unit = {"batch": 2, "update": 8 * machines, False: 1}[drop_last]
        assert len({*seen.tolist()}) == len(seen) == BEGINS[-1] // unit * unit
        assert all(
            sum(share.weight for machine in update for share in machine) == pytest.approx(1) for update in updates
        )
        read = Counter(file for machine in range(machines) for file in files_of(updates, machine))
        assert sum(read.values()) <= len(SIZES) + machines - 1, "neighbours share one file"
        assert len(seen) < BEGINS[-1] or {*read} == {*range(1, len(SIZES) + 1)}
    if drop_last == "update":  # what is left out differs
        return
    assert [files_of(epochs[0], m) for m in range(machines)] == [files_of(epochs[1], m) for m in range(machines)]
    first, second = (np.concatenate([s.indices for u in updates for s in u[0]]).tolist() for updates in epochs)
    assert first != second


@pytest.mark.parametrize(("drop_last", "copies"), [("batch", 1), (False, 1), ("batch", 3)])
def test_number_of_ranks_on_a_machine_changes_nothing(drop_last: DropLast, copies: int) -> None:
    def computed(ranks: int) -> list[list[tuple[int, list[int]]]]:
        of = windows(3, ranks, drop_last=drop_last, copies=copies)
        return [[(s.number, s.indices.tolist()) for machine in update for s in machine if s.weight] for update in of]

    assert computed(1) == computed(2) == computed(4)
    if copies > 1:
        seen = Counter(index % BEGINS[-1] for update in computed(1) for _, batch in update for index in batch)
        assert Counter(seen.values())[copies] > 0.8 * len(seen)


def test_images_that_are_left_out_leave_the_files_of_others(tmp_path: Path) -> None:
    root, listed = write_set(tmp_path / "set", [5, 1, 4, 6]), tmp_path / "exclude.txt"
    listed.write_text("train/0000.tar/0002.png\ntrain/0001.tar/0005.png\n")
    left = open_dataset(of_shards(root, EXCLUDE=str(listed)), True, 3, 5, CPU).single_images()
    assert left is not None
    assert left.file_begins.tolist() == [0, 4, 4, 8, 14]
    assert all(f"/000{number}.tar/" in left.name(left.file_begins[number]) for number in (0, 2, 3))
    assert [sum(s.weight > 0 for u in windows(2, 1, split=left) for s in u[m]) for m in (0, 1)] == [4, 3]
