"""compare.py -folds: cross-validation of each mode, paired by fold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from tests.tools.test_compare_verdict import ACCURACY, run
from tools.common.comparison.verdict import ByName, by_name, difference_in_metric, judge, troubles
from tools.compare import train
from tools.compare.command import main, notes
from utils.config import load_config

Compare = Callable[..., int]
MODES = ("fp32", "bf16")


def folds(count: int, **modes: list[float]) -> ByName:
    return by_name(
        run(mode, 0, fold=f"{number}/{count}", last_acc1=value, validation_images=None)
        for mode, values in modes.items()
        for number, value in enumerate(values, start=1)
    )


def test_modes_are_compared_fold_by_fold() -> None:
    """Folds differ by more than modes do: unpaired, the difference would be within noise."""
    results = folds(4, fp32=[90.0, 94.0, 97.0, 99.0], bf16=[88.0, 92.1, 94.9, 97.0])
    (verdict,) = judge(results, MODES, ACCURACY)
    assert "accuracy 93.0 ± 3.9 against 95.0 ± 3.9: 2.00 points lower" in verdict["text"]
    assert "(95 % interval, 4 folds)" in verdict["details"]


def test_interval_is_nadeau_and_bengios() -> None:
    ours, theirs = [97.1, 96.8, 97.9, 96.5, 97.0], [97.6, 97.4, 98.2, 97.5, 97.3]
    results = folds(5, fp32=theirs, bf16=ours)
    found = difference_in_metric(results["bf16"], results["fp32"], 1, ACCURACY)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    spread: float = math.sqrt(sum((d - sum(differences) / 5) ** 2 for d in differences) / 4)
    reach = float(stats.t.ppf(0.975, 4)) * spread * math.sqrt(1 / 5 + 1 / 4)
    assert (found.high - found.low) / 2 == pytest.approx(reach)


def test_folds_are_named_in_troubles_and_notes() -> None:
    results = folds(5, fp32=[97.0, 98.0], bf16=[97.0, 98.0])
    results["bf16"][2] |= {"diverged": True, "skipped": 40}
    assert troubles(results, {}, MODES) == [
        "bf16: diverged with fold 2: the loss ended as NaN or well above its start",
        "bf16: with fold 2, 40 of 400 updates were skipped (10 %); docs/amp.md says what to do",
    ]
    rows = [row for each in results.values() for row in each.values()]
    lines = notes({"runs": rows, "device": "cuda: a GPU", "seeds": [0], "folds": 3})
    assert "accuracy: after the last epoch, mean ± standard deviation over the folds" in lines
    assert "3 folds are few: only large differences in accuracy show" in lines
    (verdict,) = judge(folds(5, fp32=[97.0], bf16=[98.0]), MODES, ACCURACY)
    assert "one fold is too few to compare accuracy" in verdict["text"]


@pytest.fixture
def compare(tiny: Path, tmp_path: Path) -> Compare:
    def call(*words: object) -> int:
        small = ("TRAIN.MAX_UPDATES=2", "REPORT_FREQ=1", "DATA.BATCH_SIZE_EVAL=360")
        return main(["-cfg", str(tiny), "-output", str(tmp_path / "out"), *map(str, words), *small])

    return call


def test_each_mode_is_trained_on_each_fold(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def fails(command: list[str], _output: object) -> Any:
        started.append(Path(command[command.index("-output") + 1]).name)
        return SimpleNamespace(wait=lambda _: 1)

    monkeypatch.setattr(train, "start", fails)
    assert compare("-modes", "fp32,bf16", "-folds", 3) == 1
    assert started == ["fp32-fold1", "bf16-fold1", "bf16-fold2", "fp32-fold2", "fp32-fold3", "bf16-fold3"]
    settings = load_config(str(tmp_path / "out/bf16-fold2.yaml")).config
    assert (settings.DATA.FOLD, settings.SEED, settings.AMP.DTYPE) == ("2/3", 0, "bf16")
    said = capsys.readouterr()
    assert "6 runs: fp32, bf16, each on 3 folds, with seed 0; in" in said.out
    assert "fp32, fold 1/3 failed" in said.err
    results = json.loads((tmp_path / "out/compare.json").read_text())
    assert (results["seeds"], results["folds"]) == ([0], 3)
    assert compare("-modes", "fp32,bf16", "-folds", 5) == 2
    assert "fp32-fold1: was trained with other settings: DATA.FOLD: 1/3 -> 1/5" in capsys.readouterr().err


@pytest.mark.slow
def test_folds_are_trained_and_compared(compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("-modes", "fp32,bf16", "-folds", 2, "-seeds", "7,") == 0
    results = json.loads((tmp_path / "out/compare.json").read_text())
    found = {(row["mode"], row["fold"], row["seed"]): row["validation_images"] for row in results["runs"]}
    assert found == {
        ("fp32", "1/2", 7): 899,
        ("fp32", "2/2", 7): 898,
        ("bf16", "1/2", 7): 899,
        ("bf16", "2/2", 7): 898,
    }
    assert "(95 % interval, 2 folds)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-folds", "1"], "-folds 1: takes a whole number from 2 on"),
        (["-folds", "x"], "takes a whole number from 2 on"),
        (["-folds", "5", "-seeds", "3"], "-folds 5 -seeds 3: with -folds, all runs have the same seed"),
        (
            ["-folds", "5", "DATA.FOLD=1/5"],
            "DATA.FOLD (on the command line): cannot be given here; leave out DATA.FOLD",
        ),
        (["-folds", "5", "-dataset", "synthetic"], "DATA.FOLD 1/5: the data set synthetic"),
    ],
)
def test_bad_folds_are_refused(
    words: list[str], said: str, compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("-modes", "fp32,bf16", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
