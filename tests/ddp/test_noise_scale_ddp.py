"""TRAIN.NOISE_SCALE on two processes: each measures its own first micro-batch, and both report the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from engine.machine.context import Run
from engine.setup import ReadyToTrain, build_for_training
from tests.engine.measure.test_noise_scale import Sizes, Spy, averages_by_hand, averages_of, spied
from tests.engine.small import CPU
from tests.engine.small import train as train_updates
from tests.program import Result, metrics
from utils.config import load_config
from utils.distributed.world import ALONE, World

LEVELS = {
    "fp32": {},
    "O1 fp16": {"AMP.ENABLED": "true", "AMP.DTYPE": "fp16", "AMP.INIT_LOSS_SCALING": "1024"},
    "O2 fp16": {"AMP.ENABLED": "true", "AMP.DTYPE": "fp16", "AMP.INIT_LOSS_SCALING": "1024", "AMP.LEVEL": "O2"},
}
# So small steps that the rounding of sums in another order does not grow.
WORDS = {"TRAIN.NOISE_SCALE": "true", "TRAIN.BASE_LR": "1e-6", "DATA.BATCH_SIZE": "8", "TRAIN.OPTIMIZER.NAME": "SGD"}
UPDATES = 50
"""45 in an epoch, whose last has three micro-batches: one process then has one of weight 0."""


def ready_for(config_file: Path, words: dict[str, str], world: World) -> ReadyToTrain:
    torch.set_num_threads(1)
    config = load_config(str(config_file), words=words).config
    ready = build_for_training(Run(config, world, CPU, threads=1), None)
    ready.parts.assemble()
    return ready


def _rank(rank: int, folder: str, config_file: str, words: dict[str, str]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ready = ready_for(Path(config_file), words, World(rank, 2, rank, 2))
    train_updates(ready, UPDATES)
    torch.save(averages_of(ready.parts), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def on_two(tiny: Path, words: dict[str, str]) -> list[list[float]]:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_rank, args=(rank, str(tiny.parent), str(tiny), words)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(tiny.parent / f"{rank}.pt", weights_only=True) for rank in range(2)]


def of_two_ranks(spy: Spy) -> list[Sizes]:
    """From the gradients of one process: the second rank's first micro-batch is the third of the update."""
    found = []
    for (sums, shares), one in zip(spy.updates, spy.sizes(), strict=True):
        other = (sums[2] - sums[1]) / shares[2].weight
        small, per_small = float(other.square().sum()), 1 / len(shares[2].indices)
        found.append(one._replace(small=(one.small + small) / 2, per_small=(one.per_small + per_small) / 2))
    return found


@pytest.mark.parametrize("level", [*LEVELS])
def test_two_processes_measure_a_micro_batch_each(tiny: Path, level: str) -> None:
    words = WORDS | LEVELS[level]
    alone = ready_for(tiny, {**words, "TRAIN.ACCUM_ITER": "4"}, ALONE)
    spy = spied(alone)
    train_updates(alone, UPDATES)
    first, second = on_two(tiny, {**words, "TRAIN.ACCUM_ITER": "2"})
    assert first == second
    assert first == pytest.approx([*averages_by_hand(of_two_ranks(spy))], rel=1e-5)
    assert first[0] != pytest.approx(averages_of(alone.parts)[0], rel=1e-3), "which measures one micro-batch of four"


@pytest.mark.slow
def test_update_whose_only_gradient_is_summed_over_ranks_is_left_out(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    """The last of 33 updates per epoch has two micro-batches here, one per process."""
    words: tuple[Any, ...] = ("TRAIN.NOISE_SCALE=true", "REPORT_FREQ=1", "-ngpus", 2, "-batch_size", 11)
    done = vitamp(
        *("-cfg", tiny, "-output", tmp_path / "run", *words, "-accum_iter", 2, "TRAIN.MAX_UPDATES=34"),
        script="main_multi_gpu.py",
    )
    assert done.code == 0, done.text
    values = [line["noise_scale"] for line in metrics(tmp_path / "run", "train")]
    assert len(values) == 34
    assert values[32] == values[31] != values[33]
