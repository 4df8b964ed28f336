"""Folds, the balanced sampler and class weights, as a user meets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import ROOT, Result, metrics
from tests.waiting import until

Vitamp = Callable[..., Result]
BALANCED = ("DATA.SAMPLER=balanced", "TRAIN.CLASS_WEIGHTS=balanced", "DATA.SHIFT=0.1", "MODEL.DROPOUT=0.1")
SHORT = ("DATA.BATCH_SIZE=16", "REPORT_FREQ=5", "TRAIN.MAX_UPDATES=60", "-accum_iter", "2")


def weights(run: Path) -> bytes:
    return (run / "checkpoints/step-000000060/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    from tests.program import train_tiny

    return train_tiny(tmp_path_factory.mktemp("whole"), *BALANCED, *SHORT)


def test_log_names_sampler_and_weights(whole: Path) -> None:
    log = (whole / "log.txt").read_text()
    assert "sampler balanced: 143 or 144 images of each of 10 classes per epoch, each image at most 2 times" in log
    assert "class weights balanced: 0.98" in log
    assert "TRAIN.CLASS_WEIGHTS balanced weighs their images besides" in log, "rare classes would count twice"


@pytest.mark.parametrize("word", BALANCED[:2])
def test_only_sampler_and_weights_together_are_warned_of(vitamp: Vitamp, tiny: Path, word: str) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", word)
    assert done.code == 0, done.text
    assert "weighs their images besides" not in done.text


def test_stopped_and_resumed_run_equals_a_whole_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *BALANCED, *SHORT)
    assert vitamp(*words, "TRAIN.MAX_UPDATES=50").code == 0
    again = vitamp(*words, "-resume", "auto")
    assert again.code == 0, again.text
    assert weights(run) == weights(whole)
    assert metrics(run, "train") == metrics(whole, "train")


@pytest.mark.slow
def test_killed_and_resumed_run_equals_a_whole_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    words = ["-cfg", tiny, "-output", run, *BALANCED, *SHORT]
    command = [sys.executable, ROOT / "main_single_gpu.py", *words, "SAVE_EVERY_UPDATES=2"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as process:
        until(lambda: any((run / "checkpoints").glob("step-*")))
        process.kill()
    again = vitamp(*words, "-resume", "auto")
    assert again.code == 0, again.text
    assert "resuming from" in again.out
    assert weights(run) == weights(whole)


@pytest.mark.slow  # test_multi_label_runs.py tests the same of another sampler
def test_two_processes_equal_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *BALANCED, *SHORT, "-accum_iter", 1, "-ngpus", 2)
    done = vitamp(*words, script="main_multi_gpu.py")
    assert done.code == 0, done.text
    assert weights(run) == weights(whole)
    assert metrics(run, "train") == metrics(whole, "train")


def test_other_sampler_within_an_epoch_is_refused(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", *SHORT)
    assert vitamp(*words, "TRAIN.MAX_UPDATES=10").code == 0
    done = vitamp(*words, "DATA.SAMPLER=balanced", "-resume", "auto")
    assert done.code == 2, done.text
    assert "1437 as before, in another order. They depend on SEED, DATA.SAMPLER, DATA.EXCLUDE" in done.err


def test_other_fold_is_refused_on_resuming(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """At the end of an epoch, too: the run would be validated on images that it was trained on."""
    words = ("-cfg", tiny, "-output", tmp_path / "run", "DATA.BATCH_SIZE=128")
    first = vitamp(*words, "DATA.FOLD=2/5", "TRAIN.NUM_EPOCHS=1")
    assert first.code == 0, first.text
    assert "1,437 training and 360 validation images" in first.out
    assert "validation on fold 2/5" in first.out
    for other in ("DATA.FOLD=3/5", "DATA.FOLD=null", "DATA.SPLIT_SEED=1"):
        done = vitamp(*words, "DATA.FOLD=2/5", other, "-resume", "auto")
        assert done.code == 2, done.text
        assert "trained with DATA.FOLD 2/5 and DATA.SPLIT_SEED 0" in done.err
    done = vitamp("-eval", "-resume", tmp_path / "run")
    assert done.code == 0, done.text
    assert "validation split: 360 of 1,797 images" in done.out, "the run's own fold"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["DATA.FOLD=6/5"],
            ["DATA.FOLD: expected K/N (fold K of N, with N >= 2 and K from 1 to N, such as 2/5) or null, got 6/5"],
        ),
        (["-dataset", "synthetic", "DATA.FOLD=1/5"], ["DATA.FOLD 1/5: the data set synthetic", "Leave DATA.FOLD out"]),
        (["DATA.SAMPLER=balance"], ["DATA.SAMPLER", "shuffle or balanced"]),
        (["TRAIN.CLASS_WEIGHTS=none.txt"], ["TRAIN.CLASS_WEIGHTS: the file none.txt does not exist"]),
    ],
)
def test_impossible_settings_are_refused(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, words: list[str], said: list[str]
) -> None:
    done = vitamp("-cfg", tiny, *words, cwd=tmp_path)
    assert done.code == 2, done.text
    assert done.err.count("error:") == 1
    for part in said:
        assert part in done.err
