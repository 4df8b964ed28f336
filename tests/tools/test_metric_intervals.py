"""95 % intervals of balanced accuracy, macro F1, mAP and AUROC hold the true value about that often."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm

from engine.task.several import scores_of
from tools.common.evaluation import balanced_accuracy_interval, macro_f1_interval, ranking_intervals
from utils.text import Interval, wilson

REPEATS = 400
Drawn = tuple[np.ndarray, np.ndarray]


def drawn_classes(generator: np.random.Generator, sizes: list[int], recalls: list[float]) -> Drawn:
    """Labels, and guesses that are right with the class's recall, else any other class."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    other = (labels + generator.integers(1, len(sizes), len(labels))) % len(sizes)
    return labels, np.where(generator.random(len(labels)) < np.array(recalls)[labels], labels, other)


def true_values(sizes: list[int], recalls: list[float]) -> tuple[float, float]:
    """Balanced accuracy and macro F1 of infinitely many images of these proportions."""
    classes, shares = len(sizes), np.array(sizes, dtype=float)
    right = shares * recalls
    guessed = right + ((shares - right).sum() - (shares - right)) / (classes - 1)
    return 100 * float(np.mean(recalls)), 100 * float((2 * right / (shares + guessed)).mean())


@pytest.mark.parametrize(
    ("sizes", "recalls"),
    [
        ([90, 10], [0.9, 0.9]),
        ([90, 10], [0.95, 0.3]),
        ([20, 10, 5, 3, 2], [0.7] * 5),
        ([200, 50, 20, 10, 5], [0.95, 0.8, 0.6, 0.5, 0.3]),
        ([3] * 20, [0.5] * 20),
    ],
)
def test_class_metrics_are_covered(sizes: list[int], recalls: list[float]) -> None:
    generator, classes = np.random.default_rng(0), len(sizes)
    truths = true_values(sizes, recalls)
    held = np.zeros(2)
    for _ in range(REPEATS):
        drawn = drawn_classes(generator, sizes, recalls)
        for number, interval in enumerate((balanced_accuracy_interval, macro_f1_interval)):
            low, high = interval(*drawn, classes)
            held[number] += low <= truths[number] <= high
    assert (held / REPEATS >= 0.91).all(), held / REPEATS
    assert (held / REPEATS < 1).all(), "so wide that they say nothing"


def drawn_scores(generator: np.random.Generator, positives: int, images: int, classes: int, area: float) -> Drawn:
    truth = generator.permuted(np.arange(images)[:, None].repeat(classes, 1) < positives, axis=0)
    return generator.standard_normal(truth.shape) + np.sqrt(2) * norm.ppf(area) * truth, truth


@pytest.mark.parametrize(("positives", "images", "classes"), [(15, 30, 1), (10, 100, 1), (50, 500, 1), (20, 200, 5)])
@pytest.mark.parametrize("area", [0.75, 0.9])
def test_ranking_metrics_are_covered(positives: int, images: int, classes: int, area: float) -> None:
    generator = np.random.default_rng(0)
    many = drawn_scores(generator, 200_000 * positives // images, 200_000, 1, area)
    true_map = 100 * scores_of(*many).map
    held = np.zeros(2)
    for _ in range(REPEATS):
        of_map, of_area = ranking_intervals(*drawn_scores(generator, positives, images, classes, area))
        assert of_map is not None
        assert of_area is not None
        held += of_map.low <= true_map <= of_map.high, of_area.low <= 100 * area <= of_area.high
    assert (held / REPEATS >= 0.90).all(), held / REPEATS


@pytest.mark.parametrize("interval", [balanced_accuracy_interval, macro_f1_interval])
def test_all_right_is_not_certain(interval: Callable[[np.ndarray, np.ndarray, int], Interval]) -> None:
    """A bootstrap would say 100 to 100 %."""
    labels = np.repeat(np.arange(3), 12)
    assert interval(labels, labels, 3) == pytest.approx(wilson(100, 36))
    assert interval(np.zeros(4, dtype=int), np.ones(4, dtype=int), 2).high > 30


def test_ranking_without_error_and_without_classes() -> None:
    truth = np.arange(20)[:, None] < 5
    of_map, of_area = ranking_intervals(-np.arange(20.0)[:, None], truth)
    assert of_map is not None
    assert of_area is not None
    assert of_area.high == of_map.high == 100
    assert 50 < of_map.low < 95
    assert ranking_intervals(np.zeros((20, 1)), np.ones((20, 1), dtype=bool)) == (None, None)
    assert ranking_intervals(np.full((20, 1), np.nan), truth) == (None, None)
