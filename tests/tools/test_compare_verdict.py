"""What figures of several runs are taken to say, and what they are not."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from tools.compare.table import notes, sentences, table
from tools.compare.verdict import (
    ByMode,
    between,
    by_mode,
    judge,
    points_of_accuracy,
    times_as_fast,
    times_the_memory,
    troubles,
)

MODES = ("fp32", "bf16")


def run(mode: str, seed: int, **figures: Any) -> dict[str, Any]:
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
    return {"mode": mode, "seed": seed, **usual, **figures}


def runs(**by_name: dict[str, list[float]]) -> ByMode:
    """`runs(fp32={"last_acc1": [97, 98]}, ...)`: a figure for each seed."""
    return by_mode(
        run(mode, seed, **{key: values[seed] for key, values in figures.items()})
        for mode, figures in by_name.items()
        for seed in range(len(next(iter(figures.values()))))
    )


def text_of(found: ByMode) -> str:
    (verdict,) = judge(found, MODES)
    return verdict["text"]


def test_the_sentence_of_a_gain() -> None:
    found = runs(
        fp32={"images_per_second": [1000, 1010, 990], "peak_memory_gb": [10] * 3, "last_acc1": [97.7, 97.9, 98.1]},
        bf16={"images_per_second": [1900, 1910, 1890], "peak_memory_gb": [6.2] * 3, "last_acc1": [97.5, 97.8, 98.1]},
    )
    assert text_of(found) == (
        "bf16: 1.9x faster, 38 % less memory, accuracy 97.8 ± 0.3 against 97.9 ± 0.2: no difference seen"
    )


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    ours, theirs = [97.1, 96.8, 97.9, 96.5], [97.6, 97.4, 98.2, 97.5]
    found = runs(fp32={"last_acc1": theirs}, bf16={"last_acc1": ours})
    for row in (*found["fp32"].values(), *found["bf16"].values()):
        row["validation_images"] = None  # without the grain of the validation set
    difference = points_of_accuracy(found["bf16"], found["fp32"], 1)
    assert difference is not None
    expected: Any = stats.ttest_rel(ours, theirs)
    assert (difference.low, difference.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert difference.seen


def test_a_seed_counts_only_with_its_partner() -> None:
    """What a seed does to a run it does to both: seeds that one mode lacks would be taken for a difference."""
    found = runs(fp32={"last_acc1": [90.0, 95.0, 99.0]}, bf16={"last_acc1": [90.0, 95.0]})
    for mode, base in (MODES, MODES[::-1]):
        difference = points_of_accuracy(found[mode], found[base], 1)
        assert difference is not None
        assert (difference.value, difference.runs) == (0.0, 2)


def test_a_clear_loss_is_told_as_one() -> None:
    found = runs(fp32={"last_acc1": [97.7, 97.9, 98.1]}, bf16={"last_acc1": [95.6, 95.9, 96.1]})
    assert "accuracy 95.9 ± 0.3 against 97.9 ± 0.2: 2.03 points lower" in text_of(found)


def test_what_could_have_been_missed_is_said() -> None:
    found = runs(fp32={"last_acc1": [97.0, 98.0, 97.5]}, bf16={"last_acc1": [97.5, 97.2, 97.6]})
    (verdict,) = judge(found, MODES)
    low = verdict["accuracy"]["low"]
    assert low < -1
    assert "no difference seen" in verdict["text"]
    assert f"a loss of up to {-low:.2f} points could have gone unseen" in verdict["details"]


def test_one_seed_claims_nothing() -> None:
    found = runs(
        fp32={"images_per_second": [1000], "last_acc1": [98.0]}, bf16={"images_per_second": [1900], "last_acc1": [90.0]}
    )
    (verdict,) = judge(found, MODES)
    assert "1.9x faster in one run each" in verdict["text"]
    assert "accuracy 90.0 against 98.0: one seed is no ground for a claim" in verdict["text"]
    assert not verdict["speed"]["seen"]
    assert not verdict["accuracy"]["seen"]


def test_equal_differences_of_one_image_are_no_proof() -> None:
    """Three times the same single image: a spread of zero must not pass for certainty."""
    image = 100 / 360
    found = runs(fp32={"last_acc1": [97.5] * 3}, bf16={"last_acc1": [97.5 - image] * 3})
    difference = points_of_accuracy(found["bf16"], found["fp32"], 1)
    assert difference is not None
    assert not difference.seen
    assert not between([0.0, 0.0, 0.0], 1, grain=image).seen


def test_more_comparisons_ask_for_more() -> None:
    alone, among_four = between([1.0, 1.1, 1.3], 1), between([1.0, 1.1, 1.3], 4)
    assert alone.low is not None
    assert among_four.low is not None
    assert among_four.low < alone.low


def test_a_speed_up_within_what_the_same_mode_varies_by_is_not_one() -> None:
    """All pairs say 1.1, and surely so; but runs of fp32 themselves lie 1.3 apart."""
    found = runs(fp32={"images_per_second": [1000, 1150, 1300]}, bf16={"images_per_second": [1100.0, 1266.0, 1430.0]})
    speed = times_as_fast(found["bf16"], found["fp32"], 1)
    assert speed is not None
    assert speed.low is not None
    assert speed.low > 1
    assert not speed.seen
    assert "no difference in speed seen (1.10x)" in text_of(found)


def test_slower_is_said_as_plainly() -> None:
    found = runs(fp32={"images_per_second": [1000, 1001, 1002]}, bf16={"images_per_second": [800, 801, 802]})
    assert "bf16: 1.25x slower" in text_of(found)


def test_memory_that_hardly_differs_is_the_same() -> None:
    found = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [1.99, 1.99]})
    assert "as much memory" in text_of(found)
    found = runs(fp32={"peak_memory_gb": [2.0, 2.6]}, bf16={"peak_memory_gb": [1.5, 2.1]})
    memory = times_the_memory(found["bf16"], found["fp32"])
    assert memory is not None
    assert not memory.seen, "some run of bf16 took more than some of fp32"
    found = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [2.5, 2.5]})
    assert "25 % more memory" in text_of(found)


def test_on_a_cpu_it_is_the_memory_of_the_process() -> None:
    found = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [1.5, 1.5]})
    for row in found["bf16"].values():
        row["device"] = "cpu: a CPU, 1 thread"
    assert "25 % less memory of the process" in text_of(found)


def test_trouble_is_told() -> None:
    found = runs(fp32={"skipped": [0, 0]}, bf16={"skipped": [40, 8]})
    found["bf16"][1]["diverged"] = True
    told = troubles(found, {"bf16": ["exit code 1: the gradients stopped being numbers"]}, MODES)
    assert told == [
        "bf16: 1 of 3 runs failed: exit code 1: the gradients stopped being numbers",
        "bf16: diverged with seed 1: the loss ended above where it began",
        "bf16: with seed 0 40 of 400 updates were skipped (10 %); docs/amp.md says what to do",
    ]


def test_a_mode_without_runs_gets_no_verdict() -> None:
    found = runs(fp32={"last_acc1": [97.0, 98.0]})
    assert text_of(found) == "bf16: no verdict, for want of runs"
    head, first, second = table(found, MODES)
    assert first[:2] == ["fp32", "2"]
    assert second[:3] == ["bf16", "0", "-"]
    assert len(head) == len(first) == len(second)


def test_the_table_and_its_notes() -> None:
    found = runs(
        fp32={"images_per_second": [1000, 1100], "last_acc1": [97, 98]},
        bf16={"images_per_second": [2000, 2200], "last_acc1": [96, 98]},
    )
    rows = [row for each in found.values() for row in each.values()]
    about = {"runs": rows, "device": "cpu: a CPU", "seeds": [0, 1], "compared": list(MODES), "troubles": ["a trouble"]}
    assert table(found, MODES)[2] == [
        *("bf16", "2", "2,100", "1.5", "2.00", "2.00 GB", "97.00 ± 1.41", "98.00 ± 0.00", "0"),
    ]
    told = notes(about)
    assert "runs of the same mode differed by up to 10 % in speed, by chance" in told
    assert "2 seeds are few: only large differences in accuracy show" in told
    assert any(note.startswith("memory: the most that the whole process took") for note in told)
    assert not any("start" in note for note in told[1:])
    assert sentences({**about, "verdicts": judge(found, MODES)})[-1] == "a trouble"
