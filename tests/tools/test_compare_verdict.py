"""compare.py: the verdict on metrics of several runs."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from tools.compare.table import notes, sentences, table
from tools.compare.verdict import (
    ByMode,
    by_mode,
    interval,
    judge,
    points_of_accuracy,
    times_as_fast,
    times_the_memory,
    troubles,
)

MODES = ("fp32", "bf16")


def run(mode: str, seed: int, **metrics: Any) -> dict[str, Any]:
    usual = {
        "images_per_second": 1000.0,
        "seconds_per_epoch": 1.5,
        "peak_memory_gb": 2.0,
        "updates": 400,
        "skipped": 0,
        "diverged": False,
        "last_acc1": 97.5,
        "best_acc1": 98.0,
        "validation_images": 360,
        "start_up_counted": False,
        "device": "cuda: a GPU",
    }
    return {"mode": mode, "seed": seed, **usual, **metrics}


def runs(**by_name: dict[str, list[float]]) -> ByMode:
    """`runs(fp32={"last_acc1": [97, 98]}, ...)`: a metric for each seed."""
    return by_mode(
        run(mode, seed, **{key: values[seed] for key, values in metrics.items()})
        for mode, metrics in by_name.items()
        for seed in range(len(next(iter(metrics.values()))))
    )


def text_of(results: ByMode) -> str:
    (verdict,) = judge(results, MODES)
    return verdict["text"]


def test_verdict_of_a_gain() -> None:
    results = runs(
        fp32={"images_per_second": [1000, 1010, 990], "peak_memory_gb": [10] * 3, "last_acc1": [97.7, 97.9, 98.1]},
        bf16={"images_per_second": [1900, 1910, 1890], "peak_memory_gb": [6.2] * 3, "last_acc1": [97.5, 97.8, 98.1]},
    )
    assert text_of(results) == (
        "bf16: 1.9x faster, 38 % less memory, accuracy 97.8 ± 0.3 against 97.9 ± 0.2: difference within noise"
    )


def test_interval_equals_the_paired_t_test() -> None:
    ours, theirs = [97.1, 96.8, 97.9, 96.5], [97.6, 97.4, 98.2, 97.5]
    results = runs(fp32={"last_acc1": theirs}, bf16={"last_acc1": ours})
    for row in (*results["fp32"].values(), *results["bf16"].values()):
        row["validation_images"] = None  # without the grain of the validation set
    difference = points_of_accuracy(results["bf16"], results["fp32"], 1)
    assert difference is not None
    expected: Any = stats.ttest_rel(ours, theirs)
    assert (difference.low, difference.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert difference.seen


def test_seed_counts_only_in_pairs() -> None:
    """The effect of a seed is the same in both modes, so a seed that one mode lacks would look like a difference."""
    results = runs(fp32={"last_acc1": [90.0, 95.0, 99.0]}, bf16={"last_acc1": [90.0, 95.0]})
    for mode, base in (MODES, MODES[::-1]):
        difference = points_of_accuracy(results[mode], results[base], 1)
        assert difference is not None
        assert (difference.value, difference.runs) == (0.0, 2)


def test_clear_loss_of_accuracy_is_reported() -> None:
    results = runs(fp32={"last_acc1": [97.7, 97.9, 98.1]}, bf16={"last_acc1": [95.6, 95.9, 96.1]})
    assert "accuracy 95.9 ± 0.3 against 97.9 ± 0.2: 2.03 points lower" in text_of(results)


def test_details_bound_the_unseen_loss() -> None:
    results = runs(fp32={"last_acc1": [97.0, 98.0, 97.5]}, bf16={"last_acc1": [97.5, 97.2, 97.6]})
    (verdict,) = judge(results, MODES)
    low = verdict["accuracy"]["low"]
    assert low < -1
    assert "difference within noise" in verdict["text"]
    assert f"a drop in accuracy of up to {-low:.2f} points could be hidden in the noise" in verdict["details"]


def test_one_seed_is_too_few() -> None:
    results = runs(
        fp32={"images_per_second": [1000], "last_acc1": [98.0]}, bf16={"images_per_second": [1900], "last_acc1": [90.0]}
    )
    (verdict,) = judge(results, MODES)
    assert "1.9x faster in one run each" in verdict["text"]
    assert "accuracy 90.0 against 98.0: one seed is too few to compare accuracy" in verdict["text"]
    assert not verdict["speed"]["seen"]
    assert not verdict["accuracy"]["seen"]


def test_differences_of_one_image_are_noise() -> None:
    """Three equal differences of one image: a standard deviation of zero is not certainty."""
    image = 100 / 360
    results = runs(fp32={"last_acc1": [97.5] * 3}, bf16={"last_acc1": [97.5 - image] * 3})
    difference = points_of_accuracy(results["bf16"], results["fp32"], 1)
    assert difference is not None
    assert not difference.seen
    assert not interval([0.0, 0.0, 0.0], 1, grain=image).seen


def test_interval_widens_with_the_number_of_comparisons() -> None:
    alone, among_four = interval([1.0, 1.1, 1.3], 1), interval([1.0, 1.1, 1.3], 4)
    assert alone.low is not None
    assert among_four.low is not None
    assert among_four.low < alone.low


def test_speed_up_within_the_variation_of_a_mode_is_noise() -> None:
    """All pairs have a ratio of 1.1, but runs of fp32 alone vary by 1.3."""
    results = runs(fp32={"images_per_second": [1000, 1150, 1300]}, bf16={"images_per_second": [1100.0, 1266.0, 1430.0]})
    speed = times_as_fast(results["bf16"], results["fp32"], 1)
    assert speed is not None
    assert speed.low is not None
    assert speed.low > 1
    assert not speed.seen
    assert "speed within noise (1.10x)" in text_of(results)


def test_slower_mode_is_reported() -> None:
    results = runs(fp32={"images_per_second": [1000, 1001, 1002]}, bf16={"images_per_second": [800, 801, 802]})
    assert "bf16: 1.25x slower" in text_of(results)


def test_small_difference_in_memory_is_ignored() -> None:
    results = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [1.99, 1.99]})
    assert "the same memory" in text_of(results)
    results = runs(fp32={"peak_memory_gb": [2.0, 2.6]}, bf16={"peak_memory_gb": [1.5, 2.1]})
    memory = times_the_memory(results["bf16"], results["fp32"])
    assert memory is not None
    assert not memory.seen, "some run of bf16 took more than some of fp32"
    results = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [2.5, 2.5]})
    assert "25 % more memory" in text_of(results)


def test_memory_on_a_cpu_is_that_of_the_process() -> None:
    results = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [1.5, 1.5]})
    for row in results["bf16"].values():
        row["device"] = "cpu: a CPU, 1 thread"
    assert "25 % less process memory" in text_of(results)


def test_troubles_are_reported() -> None:
    results = runs(fp32={"skipped": [0, 0]}, bf16={"skipped": [40, 8]})
    results["bf16"][1]["diverged"] = True
    problems = troubles(results, {"bf16": ["exit code 1: the gradients stopped being numbers"]}, MODES)
    assert problems == [
        "bf16: 1 of 3 runs failed: exit code 1: the gradients stopped being numbers",
        "bf16: diverged with seed 1: the loss ended as NaN or well above its start",
        "bf16: with seed 0, 40 of 400 updates were skipped (10 %); docs/amp.md says what to do",
    ]


def test_mode_without_runs_gets_no_verdict() -> None:
    results = runs(fp32={"last_acc1": [97.0, 98.0]})
    assert text_of(results) == "bf16: no verdict, because bf16 and fp32 have no finished run with the same seed or fold"
    head, first, second = table(results, MODES)
    assert first[:2] == ["fp32", "2"]
    assert second[:3] == ["bf16", "0", "-"]
    assert len(head) == len(first) == len(second)


def test_table_and_notes() -> None:
    results = runs(
        fp32={"images_per_second": [1000, 1100], "last_acc1": [97, 98]},
        bf16={"images_per_second": [2000, 2200], "last_acc1": [96, 98]},
    )
    rows = [row for each in results.values() for row in each.values()]
    about = {"runs": rows, "device": "cpu: a CPU", "seeds": [0, 1], "compared": list(MODES), "troubles": ["a trouble"]}
    assert table(results, MODES)[2] == [
        *("bf16", "2", "2,100", "1.5", "2.00", "2.00 GB", "97.00 ± 1.41", "98.00 ± 0.00", "0"),
    ]
    lines = notes(about)
    assert "noise: the speed of runs of the same mode varied by up to 10 %" in lines
    assert "2 seeds are few: only large differences in accuracy show" in lines
    assert any(note.startswith("memory: peak of the whole process") for note in lines)
    assert not any("slow first updates" in note for note in lines)
    assert sentences({**about, "verdicts": judge(results, MODES)})[-1] == "a trouble"
