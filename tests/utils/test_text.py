"""Numbers in words: with their nouns, and with Wilson's interval as SciPy computes it."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from engine.report.outcome import in_context
from utils.text import counted, wilson
from vitamp.metrics import BALANCED, MAP, TOP1


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


@pytest.mark.parametrize(("right", "images"), [(0, 1), (1, 1), (30, 30), (7, 30), (354, 360), (49_000, 50_000)])
def test_wilsons_interval_equals_scipys(right: int, images: int) -> None:
    theirs = binomtest(right, images).proportion_ci(method="wilson")
    assert wilson(100 * right / images, images) == pytest.approx((100 * theirs.low, 100 * theirs.high), abs=1e-9)


def test_words_for_the_end_of_a_run() -> None:
    guess = 34.9
    assert in_context(TOP1, 90.0, 100, guess) == (
        "Top-1 90.00 % on 100 images: 95 % interval 82.56 to 94.48 %; always guessing the largest class: 34.9 % top-1."
    )
    assert in_context(TOP1, 34.9, 100, guess).endswith("34.9 % top-1: this model is as good as guessing.")
    assert in_context(BALANCED, 20.0, 100, guess) == "Always guessing the largest class: 34.9 % top-1."
    assert in_context(TOP1, None, 100, None) == in_context(MAP, 80.0, 100, None) == ""
