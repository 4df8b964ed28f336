"""Numbers in words: with their nouns, and with Wilson's interval as SciPy computes it."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from engine.evaluation.start import (
    AT_LAST,
    PROBE_IS_BEST,
    TO_GAIN,
    beside_probe,
    gain_over_probe,
    probe_is_best,
)
from engine.report.outcome import in_context
from utils.record.history import History
from utils.record.predictions import write_predictions
from utils.statistics.paired import mcnemar
from utils.statistics.proportions import wilson
from utils.text import counted
from vitamp.metrics import BALANCED, LOSS, MACRO_F1, MAP, TOP1


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        *((1, "update", "1 update"), (0, "update", "0 updates"), (1.0, "minute", "1 minute")),
        *((1234, "training image", "1,234 training images"), (0.5, "minute", "0.5 minutes")),
        *((2, "process", "2 processes"), (2, "batch", "2 batches"), (2, "epoch", "2 epochs")),
    ],
)
def test_noun_follows_its_number(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("right", "images"), [(0, 1), (1, 1), (10, 10), (30, 30), (7, 30), (354, 360), (49_000, 50_000)]
)
def test_wilsons_interval_equals_scipys(right: int, images: int) -> None:
    theirs = binomtest(right, images).proportion_ci(method="wilson")
    ours = wilson(100 * right / images, images)
    assert ours == pytest.approx((100 * theirs.low, 100 * theirs.high), abs=1e-9)
    assert ours.low <= 100 * right / images <= ours.high


def test_words_for_the_end_of_a_run() -> None:
    guess, images = 34.9, np.repeat([0, 2, 3], [60, 38, 2])
    assert in_context(TOP1, 90.0, guess, images) == (
        "Top-1 90.00 % on 100 images: 95 % interval 82.56 to 94.48 %; always guessing the largest class: 34.9 % top-1."
    )
    singles = [f"{number}" for number in range(100)]
    assert in_context(TOP1, 90.0, guess, images, images, singles) == in_context(TOP1, 90.0, guess, images), "not alike"
    unknown = in_context(TOP1, 90.0, guess, images, groups=["a", "b"] * 50)
    assert "on 100 images: `" in unknown
    assert "evaluate.py` computes its interval; always" in unknown, "of an earlier start"
    assert in_context(TOP1, 34.9, guess, images).endswith("34.9 % top-1: this model is as good as guessing.")
    assert in_context(LOSS, 0.5, guess, images) == "Always guessing the largest class: 34.9 % top-1."
    assert in_context(TOP1, None, None, images) == in_context(MAP, 80.0, None, images) == ""
    said = in_context(BALANCED, 100.0, guess, images, images)
    assert said.startswith(
        "Balanced accuracy 100.00 % on 100 images, of which the smallest of 3 classes has 2: 95 % int"
    )
    assert said.endswith(" to 100.00 %; always guessing one class: 33.3 %.")
    assert "evaluate.py` computes its interval." in in_context(MACRO_F1, 9.0, guess, images), "of an earlier start"
    two = np.repeat([0, 1], [60, 3])
    assert "too few images per class for an interval" in in_context(MACRO_F1, 100.0, guess, two, two)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (2, "18 more of 100 images than {} (95 % interval +10 to +25), which is beyond chance."),
        (19, "1 more of 100 images than {} (95 % interval -2 to +4), which may be chance. {}"),
        (21, "1 fewer of 100 images than {} (95 % interval -4 to +2), which may be chance. {}"),
        (40, "20 fewer of 100 images than {} (95 % interval -28 to -12), which is beyond chance. {}"),
    ],
)
def test_words_for_the_gain_over_the_probe(wrong: int, said: str) -> None:
    images = np.arange(100)
    advice = TO_GAIN
    said = said.format("the linear probe that training began with", advice)
    assert (
        beside_probe(TOP1, validated(), np.zeros(100, int), images < 20, images < wrong) == f"{AT_LAST} right on {said}"
    )


@pytest.mark.parametrize(("lost", "beyond"), [(5, False), (4, True)])
def test_a_gain_over_the_probe_needs_an_exact_test(lost: int, beyond: bool) -> None:
    """14 images won and 5 lost: McNemar's exact test says 6.4 %, though an approximate interval leaves out 0."""
    images, labels = np.arange(200), np.zeros(200, int)
    probe, guesses = (images >= 150) & (images < 164), images < lost
    said = beside_probe(TOP1, validated(), labels, probe, guesses)
    assert ("which is beyond chance." in said) is beyond
    assert ("interval +0 to" in said) is not beyond
    exact = binomtest(lost, lost + 14).pvalue
    assert mcnemar(guesses == labels, probe == labels) == pytest.approx(exact)
    pairs = mcnemar(np.repeat(guesses == labels, 2), np.repeat(probe == labels, 2), np.arange(400) // 2)
    assert exact < pairs < 1.5 * exact, "images twice say no more; Student's t is a little wider"


def test_gain_over_the_probe_is_that_of_the_last_validation(tmp_path: Path) -> None:
    """The best of several is the luckiest on these images; where the probe is the best, its interval is said too."""
    labels = np.zeros(100, np.uint8)
    table = {"labels": labels, "probe_guess": np.arange(100) < 20, "guess": np.arange(100) < 21}
    write_predictions(tmp_path, 18, table)
    lines = [{"event": "val", "update": 9 * at, "epoch": at, "acc1": acc1} for at, acc1 in enumerate((80, 98, 79))]
    gain = gain_over_probe(TOP1, History(lines), tmp_path)
    assert gain.startswith(f"{AT_LAST} right on 1 fewer of 100 images than the linear probe")
    assert probe_is_best(TOP1, History([lines[0], lines[2]]), gain) == f"{PROBE_IS_BEST} {gain}"
    assert "(95 % interval -4 to +2), which may be chance." in gain
    assert gain_over_probe(TOP1, History(lines[:2]), tmp_path) == "", "of another validation"
    assert gain_over_probe(TOP1, History(lines[:1]), tmp_path) == "", "of the probe itself"


def validated(**values: tuple[float, float]) -> History:
    """Of a run that began with a probe and was validated once more; in metrics.jsonl."""
    each = [{name: both[at] for name, both in values.items()} for at in (0, 1)]
    return History([{"event": "val", "update": 9 * at, "epoch": at, **each[at]} for at in (0, 1)])


@pytest.mark.parametrize("images", [20, 400])
def test_gain_over_the_probe_is_judged_by_the_metric_that_chose_the_best(images: int) -> None:
    """The probe is right on all of the large class and none of the small; training on 3 in 4 and 1 in 2."""
    number = np.arange(images)
    labels, probe = np.where(number < images * 4 // 5, 0, 1), np.zeros(images, int)
    guesses = np.where(labels == 0, number % 4 == 0, number % 2)
    history = validated(acc1=(80.0, 70.0), balanced_acc=(50.0, 62.5), loss=(0.7, 0.5))
    said = beside_probe(BALANCED, history, labels, probe, guesses)
    than = "the linear probe that training began with"
    assert said.startswith(f"{AT_LAST} by balanced accuracy, 62.50 % against 50.00 % of {than}")
    assert "(+12.50 points, 95 % interval " in said
    assert ("may be chance; top-1 70.00 % against 80.00 %. More images" in said) is (images == 20)
    assert said.endswith("which is beyond chance; top-1 70.00 % against 80.00 %.") is (images == 400)
    said = f"by loss, 0.5000 against 0.7000 of {than}; top-1 70.00 % against 80.00 %."
    assert beside_probe(LOSS, history, labels, probe, guesses) == f"{AT_LAST} {said}"
    assert beside_probe(LOSS, History([]), labels, probe, guesses) == "", "metrics.jsonl was lost"


def test_a_probe_that_stays_the_best_by_its_metric_alone_is_said_with_top1() -> None:
    history = validated(acc1=(36.0, 80.0), balanced_acc=(40.0, 30.0))
    rose = "It is the best by balanced accuracy; top-1 rose from 36.00 % to 80.00 % (epoch 1)."
    assert probe_is_best(BALANCED, history) == f"{PROBE_IS_BEST} {rose} {TO_GAIN}"
    for by, top1 in ((TOP1, 80.0), (BALANCED, 30.0)):
        assert probe_is_best(by, validated(acc1=(36.0, top1))) == f"{PROBE_IS_BEST} {TO_GAIN}"
    stopped = History([{"event": "val", "update": 0, "epoch": 0, "acc1": 36.0}])
    assert "nothing was validated after an update" in probe_is_best(TOP1, stopped)
