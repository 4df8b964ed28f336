"""One process on one GPU, whoever starts it; and two processes on two."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import KIND, Run, Train, apart, far, needs, on_a_gpu_alone
from tests.launch.clusters import MULTI, Command, torchrun
from tests.program import Result
from tests.waiting import free_port

WORDS = ("-amp", "bf16", "TRAIN.MODEL_EMA=true", "MODEL.DROPOUT=0.1", "SPEED=+fused", "DETERMINISTIC=true")


@pytest.fixture
def alone(train: Train) -> Run:
    return train("alone", *WORDS)


def test_main_multi_gpu_with_one(train: Train, alone: Run) -> None:
    run = train("multi", *WORDS, "-ngpus", 1, script="main_multi_gpu.py")
    assert "One process: -ngpus 1." in run.text
    assert run.of("train") == alone.of("train")
    if KIND == "cuda" and torch.cuda.device_count() == 1:
        one = train("all", *WORDS, script="main_multi_gpu.py")
        assert "One process: one GPU is visible." in one.text


@needs(2)
def test_two_train_as_one_does_with_twice_the_micro_batches(train: Train) -> None:
    words = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1", "SPEED=+fused", "MODEL.DROPOUT=0.1")
    one = train("one", *words, "-batch_size", 16, "-accum_iter", 2)
    two = train("two", *words, "-batch_size", 16, "-ngpus", 2, script="main_multi_gpu.py")
    assert sorted(path.name for path in (two.folder / "ranks").iterdir()) == ["0.log", "1.log"]
    assert apart(two.losses, one.losses) < 1e-4
    assert far(two.weights(), one.weights()) < 1e-4


@on_a_gpu_alone
def test_more_than_there_are_is_refused(vitamp: Callable[..., Result], small: Path) -> None:
    number = torch.cuda.device_count() + 1
    done = vitamp("-cfg", small, "-ngpus", number, script="main_multi_gpu.py")
    assert (done.code, f"only {number - 1} GPU(s) are visible" in done.err) == (2, True), done.text


def test_torchrun_with_one_by_nccl(small: Path, alone: Run, tmp_path: Path) -> None:
    start = torchrun("--nproc_per_node", 1, "--master_port", free_port())
    backend = ["-backend", "nccl"] if KIND == "cuda" else []
    words = ["-cfg", small, "-output", tmp_path / "run", *WORDS, *backend, "TRAIN.MAX_UPDATES=12"]
    done = Command(*start, MULTI, *words, env={"OMP_NUM_THREADS": "1"}).end(180).expect(0)
    assert Run(tmp_path / "run", done).of("train") == alone.of("train")
