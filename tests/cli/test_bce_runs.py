"""TRAIN.LOSS bce, as a user meets it: resumed, on two processes, in every precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, metrics, train_tiny

Vitamp = Callable[..., Result]
BCE = ("TRAIN.LOSS=bce", "TRAIN.BCE_TARGET_THRESH=0", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0")
SHORT = ("DATA.BATCH_SIZE=16", "REPORT_FREQ=5", "TRAIN.MAX_UPDATES=60", "-accum_iter", "2")


def weights(run: Path) -> bytes:
    return (run / "checkpoints/step-000000060/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    return train_tiny(tmp_path_factory.mktemp("whole"), *BCE, "TRAIN.CLASS_WEIGHTS=balanced", *SHORT)


def test_log_names_the_loss(whole: Path) -> None:
    log = (whole / "log.txt").read_text()
    assert "; loss bce, mean over classes, targets above 0 count as 1" in log
    assert ", on positives only, in the training loss only" in log
    losses = [line["loss"] for line in metrics(whole, "train")]
    assert 0.6 < losses[0] < 0.8, "log 2, of ten classes that are all undecided"
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_stopped_and_resumed_run_equals_a_whole_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *BCE, "TRAIN.CLASS_WEIGHTS=balanced", *SHORT)
    assert vitamp(*words, "TRAIN.MAX_UPDATES=50").code == 0
    again = vitamp(*words, "-resume", "auto")
    assert again.code == 0, again.text
    assert weights(run) == weights(whole)
    assert metrics(run, "train") == metrics(whole, "train")


@pytest.mark.slow
def test_two_processes_equal_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *BCE, "TRAIN.CLASS_WEIGHTS=balanced", *SHORT, "-accum_iter", 1, "-ngpus", 2)
    done = vitamp(*words, script="main_multi_gpu.py")
    assert done.code == 0, done.text
    assert weights(run) == weights(whole)
    assert metrics(run, "train") == metrics(whole, "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-amp", "bf16"),
        ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e8"),
        ("-amp", "O2"),
        ("TRAIN.COMPILE=whole",),
        ("TRAIN.COMPILE=blocks", "-amp", "bf16"),
    ],
)
def test_every_precision_learns(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    more = ("TRAIN.BASE_LR=0.01", "TRAIN.BCE_SUM=true", "TRAIN.LOSS=bce")
    done = vitamp("-cfg", tiny, "-output", run, *more, *words, timeout=300)
    assert done.code == 0, done.text
    assert metrics(run, "val")[-1]["acc1"] > 20, "chance is 10"
    if "fp16" in words:
        assert metrics(run, "train")[-1]["skipped"] > 0
        assert "was skipped" in done.out
