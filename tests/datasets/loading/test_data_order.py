from __future__ import annotations

import numpy as np
import pytest

from datasets import EpochOrder, Share, validation_batches
from utils.errors import UserError


def order(samples: int = 100, batch: int = 5, accum: int = 1, rank: int = 0, world: int = 1, **more) -> EpochOrder:
    return EpochOrder(samples, batch, accum, rank, world, **{"seed": 3, "drop_last": True, **more})


def global_windows(samples: int, accum: int, world: int, **more) -> list[list[tuple[int, list[int]]]]:
    """Micro-batches of all ranks with their numbers, for each update."""
    ranks = [list(order(samples, accum=accum, rank=r, world=world, **more).windows(2)) for r in range(world)]
    return [
        sorted((s.number, s.indices.tolist()) for rank in window for s in rank if s.weight)
        for window in zip(*ranks, strict=True)
    ]


def all_indices(shares: list[Share]) -> list[int]:
    return sorted(int(i) for share in shares for i in share.indices)


@pytest.mark.parametrize(("samples", "drop_last", "seen"), [(100, True, 100), (103, True, 100), (103, False, 103)])
def test_epoch_has_every_sample_once(samples: int, drop_last: bool, seen: int) -> None:
    shares = [s for window in order(samples, accum=3, drop_last=drop_last).windows(0) for s in window]
    indices = all_indices(shares)
    assert len(indices) == len(set(indices)) == seen
    assert set(indices) <= set(range(samples))


def test_order_depends_on_seed_and_epoch() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return next(order(seed=seed).windows(epoch))[0].indices.tolist()

    assert first(1, 1) == first(1, 1)
    assert len({tuple(first(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize("samples", [80, 100, 65, 83])
@pytest.mark.parametrize("drop_last", [True, False])
def test_micro_batches_do_not_depend_on_world_size(samples: int, drop_last: bool) -> None:
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


@pytest.mark.parametrize("samples", [40, 45, 55, 5])
def test_weights_make_the_sum_over_ranks_the_mean_of_the_window(samples: int) -> None:
    ranks = [list(order(samples, accum=2, rank=r, world=4).windows(0)) for r in range(4)]
    for window in zip(*ranks, strict=True):
        weights = [share.weight for shares in window for share in shares]
        assert sum(weights) == pytest.approx(1)
        assert len({weight for weight in weights if weight}) == 1


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


def test_empty_training_set_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
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
