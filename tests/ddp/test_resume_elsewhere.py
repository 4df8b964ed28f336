"""A run that goes on with another number of processes is the run it would have been."""

import shutil
from pathlib import Path

import pytest

from tests.program import Vitamp, last_weights, metrics

WORDS = ("DATA.BATCH_SIZE=16", "REPORT_FREQ=5", "MODEL.DROPOUT=0.1")


@pytest.fixture
def stopped(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> Path:
    """A run of one process with two micro-batches an update, stopped within its second epoch."""
    run = tmp_path / "stopped"
    vitamp("-cfg", tiny, *WORDS, "-accum_iter", 2, "TRAIN.MAX_UPDATES=50", "-output", run, code=0)
    return run


def test_the_global_batch_is_kept_and_every_bit_with_it(vitamp: Vitamp, stopped: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(stopped, elsewhere)
    vitamp("-resume", stopped, "TRAIN.MAX_UPDATES=60", code=0)
    there = vitamp("-resume", elsewhere, "TRAIN.MAX_UPDATES=60", "-ngpus", 2, script="main_multi_gpu.py", code=0)
    assert "TRAIN.ACCUM_ITER is 1 instead of 2, so that the global batch stays 32" in there.out
    assert last_weights(stopped) == last_weights(elsewhere)
    assert metrics(stopped, "train") == metrics(elsewhere, "train")
    shutil.rmtree(elsewhere / "checkpoints" / "step-000000060")
    (elsewhere / "checkpoints" / "index.json").unlink()
    vitamp("-resume", elsewhere, "-dry_run", code=0)  # as if it had been killed before it saved


def test_the_same_command_keeps_the_global_batch_in_a_second_resume_on_fewer_processes(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    """The settings ask for one micro-batch per update, as on the two processes that the run began with."""
    run = tmp_path / "run"
    words = ("-cfg", tiny, *WORDS, "-output", run, "-resume", "auto")
    vitamp(*words, "-ngpus", 2, "TRAIN.MAX_UPDATES=20", script="main_multi_gpu.py", code=0)
    first, again = (vitamp(*words, f"TRAIN.MAX_UPDATES={updates}", code=0) for updates in (30, 60))
    for resumed in (first, again):
        assert "TRAIN.ACCUM_ITER is 2 instead of 1, so that the global batch stays 32" in resumed.out
    assert "Number of processes: 1 instead of 2" in first.out
    assert "Number of processes" not in again.out
    assert [line["update"] for line in metrics(run, "train")] == [1, *range(5, 65, 5)]


def test_what_cannot_keep_it_is_refused(vitamp: Vitamp, stopped: Path) -> None:
    done = vitamp("-resume", stopped, "-ngpus", 3, script="main_multi_gpu.py", code=2)
    assert done.err.count("trained with a global batch of 32 on 1 process;") == 1
