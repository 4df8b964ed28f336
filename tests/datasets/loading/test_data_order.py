from collections.abc import Iterable

import numpy as np
import pytest

from datasets import EpochOrder, MicroBatch, validation_batches
from utils.config.data import DropLast
from utils.errors import UserError


def order(samples: int = 100, batch: int = 5, accum: int = 1, rank: int = 0, world: int = 1, **more) -> EpochOrder:
    return EpochOrder(samples, batch, accum, rank, world, **{"seed": 3, "drop_last": "batch", **more})


def global_windows(samples: int, accum: int, world: int, **more) -> list[list[tuple[int, list[int]]]]:
    """Micro-batches of all ranks with their numbers, for each update."""
    ranks = [list(order(samples, accum=accum, rank=r, world=world, **more).windows(2)) for r in range(world)]
    return [
        sorted((s.number, s.indices.tolist()) for rank in window for s in rank if s.weight)
        for window in zip(*ranks, strict=True)
    ]


def all_indices(shares: Iterable[MicroBatch]) -> list[int]:
    return sorted(int(i) for share in shares for i in share.indices)


@pytest.mark.parametrize(
    ("samples", "drop_last", "seen", "updates"),
    [
        *((100, "batch", 100, 7), (103, "batch", 100, 7), (103, False, 103, 7), (106, False, 106, 8)),
        *((103, "update", 90, 6), (105, "update", 105, 7), (104, "update", 90, 6)),
    ],
)
def test_epoch_has_every_sample_once(samples: int, drop_last: DropLast, seen: int, updates: int) -> None:
    one = order(samples, accum=3, drop_last=drop_last)
    windows = list(one.windows(0))
    assert one.updates == len(windows) == updates
    assert [one.samples_of(update) for update in range(updates)] == [len(all_indices(w)) for w in windows]
    shares = [share for window in windows for share in window]
    indices = all_indices(shares)
    assert len(indices) == len(set(indices)) == seen
    assert set(indices) <= set(range(samples))


def test_order_depends_on_seed_and_epoch() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return next(order(seed=seed).windows(epoch))[0].indices.tolist()

    assert first(1, 1) == first(1, 1)
    assert len({tuple(first(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize("samples", [80, 100, 65, 83])
@pytest.mark.parametrize("drop_last", ["batch", "update", False])
def test_micro_batches_do_not_depend_on_world_size(samples: int, drop_last: DropLast) -> None:
    alone = global_windows(samples, 4, 1, drop_last=drop_last)
    assert alone == global_windows(samples, 2, 2, drop_last=drop_last)
    assert alone == global_windows(samples, 1, 4, drop_last=drop_last)


def test_a_full_window_goes_to_the_ranks_in_order() -> None:
    window = [next(order(accum=2, rank=rank, world=3).windows(0)) for rank in range(3)]
    assert [[share.number for share in shares] for shares in window] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("samples", [41, 45, 50, 55, 60])
def test_last_window_runs_equally_often_on_every_rank(samples: int) -> None:
    last = [list(order(samples, accum=2, rank=r, world=4).windows(0))[-1] for r in range(4)]
    assert len({len(shares) for shares in last}) == 1
    numbers = [share.number for shares in last for share in shares]
    assert len(numbers) == len(set(numbers)), "a blank pass must not share the random numbers of a real one"
    real = [share for shares in last for share in shares if share.weight]
    assert len(real) == samples // 5 % 8 or len(real) == 8
    blank = [share for shares in last for share in shares if not share.weight]
    first = next(share for share in real if share.number == 0)
    assert all(share.indices.tolist() == first.indices.tolist() for share in blank)


@pytest.mark.parametrize(
    ("samples", "drop_last"), [(40, "batch"), (45, "batch"), (5, "batch"), (84, False), (3, False)]
)
@pytest.mark.parametrize("world", [1, 4])
def test_weights_make_the_sum_over_ranks_the_mean_of_the_window(samples: int, drop_last: DropLast, world: int) -> None:
    """Every sample of a window has the same weight, in an incomplete micro-batch too."""
    ranks = [order(samples, accum=2, rank=rank, world=world, drop_last=drop_last) for rank in range(world)]
    for update, window in enumerate(zip(*(rank.windows(0) for rank in ranks), strict=True)):
        real = [share for shares in window for share in shares if share.weight]
        assert sum(len(share.indices) for share in real) == ranks[0].samples_of(update)
        each = [share.weight / len(share.indices) for share in real]
        assert each == pytest.approx([1 / ranks[0].samples_of(update)] * len(real))


def test_complete_micro_batches_have_exactly_the_same_weight() -> None:
    """Not only to rounding: a run without incomplete ones computes the same bits as ever."""
    for accum in range(1, 60):
        (window,) = order(7 * accum, batch=7, accum=accum).windows(0)
        assert [share.weight for share in window] == [1 / accum] * accum


def test_start_of_a_run_says_what_an_epoch_leaves_out_and_how_small_its_last_update_is() -> None:
    imagenet = {"samples": 1_281_167, "batch": 256, "world": 1000}
    one = order(**imagenet)
    assert one.words() == "6 updates per epoch, the last of 1,024 images; 143 images left out"
    assert "The last update of each epoch has 1,024 images, the others 256,000" in "".join(one.warnings())
    assert order(**imagenet, drop_last="update").words() == "5 updates per epoch; 1,167 images left out"
    small = order(740, batch=512)
    assert small.words() == "1 update per epoch; 228 images left out"
    assert "leaves out 228 of the 740 training images" in "".join(small.warnings())
    few = order(12, batch=32, drop_last=False)
    assert few.words() == "1 update per epoch, which is of 12 images"
    for quiet in (few, order(**imagenet, drop_last="update"), order(100), order(103, drop_last=False)):
        assert not list(quiet.warnings())


def test_start_resumes_an_epoch() -> None:
    one = order(103, accum=2, drop_last=False)
    whole = list(one.windows(4))
    assert len(whole) == one.updates == 11
    for start in (0, 1, 7, 11):
        rest = list(one.windows(4, start))
        assert len(rest) == 11 - start
        for expected, got in zip(whole[start:], rest, strict=True):
            assert [s.indices.tolist() for s in expected] == [s.indices.tolist() for s in got]


def test_batch_larger_than_the_data_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"DATA\.BATCH_SIZE is 200.*only 100 images.*100 or less.*DROP_LAST=false"):
        order(100, batch=200)
    assert order(100, batch=200, drop_last=False).updates == 1
    for samples, remedy in ((100, "batch"), (10, "false")):
        with pytest.raises(UserError, match=rf"takes 160 images.*only {samples}: not one full update.*={remedy}\."):
            order(samples, batch=20, accum=2, world=4, drop_last="update")
    with pytest.raises(UserError, match="The training set is empty"):
        order(0, drop_last=False)


@pytest.mark.parametrize("samples", [1, 7, 64, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_validation_covers_every_sample_once(samples: int, world: int) -> None:
    ranks = [validation_batches(samples, 16, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len({batch.shape for batches in ranks for batch in batches}) == 1
    assert ranks[0][0].size <= 16
    indices = np.concatenate([batch for batches in ranks for batch in batches])
    assert sorted(indices[indices >= 0]) == list(range(samples))
    assert set(indices[indices < 0]) <= {-1}
