"""Balanced accuracy and macro F1 equal scikit-learn's, with any batches, on one process and on several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor

from datasets import PADDING, Batch, validation_batches
from engine.task.one import OneLabel, ValidationMeans, _Accuracy
from tests.engine.small import CPU
from utils.distributed.world import ALONE

SAMPLES, CLASSES = 211, 9
NO_IMAGE, NEVER_PREDICTED, NEITHER = 3, 5, 7


def made() -> tuple[Tensor, Tensor]:
    """Logits and labels of unequal classes. One class has no image, one is never predicted, one is neither."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([40.0, 20, 10, 0, 5, 5, 2, 0, 1])
    labels = torch.multinomial(shares, SAMPLES, replacement=True, generator=generator)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator) + 1.5 * F.one_hot(labels, CLASSES)
    logits[:, [NEVER_PREDICTED, NEITHER]] = -20
    return logits, labels


def by_sklearn(guesses: Tensor, labels: Tensor) -> tuple[float, float]:
    return 100 * float(balanced_accuracy_score(labels, guesses)), 100 * float(
        f1_score(labels, guesses, average="macro", zero_division=0)  # pyright: ignore[reportArgumentType]
    )


def tallied(logits: Tensor, labels: Tensor, batch_size: int, ranks: int) -> ValidationMeans:
    """Metrics of a validation on so many ranks, with padded batches, from the sum of the ranks' counts."""
    tallies = [OneLabel(CLASSES).tally(SAMPLES, CPU) for _ in range(ranks)]
    for rank, tally in enumerate(tallies):
        for plan in validation_batches(SAMPLES, batch_size, rank, ranks):
            indices = torch.from_numpy(plan)
            real = indices != PADDING
            tally.add(logits[indices], Batch(torch.empty(0), labels[indices] * real, indices))
    first = tallies[0]
    assert isinstance(first, _Accuracy)
    for other in tallies[1:]:
        assert isinstance(other, _Accuracy)
        first._sums += other._sums
        first._of_classes += other._of_classes
    found = first.metrics(ALONE)
    assert isinstance(found, ValidationMeans)
    return found


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("batch_size", "ranks"), [(211, 1), (10, 1), (10, 2), (7, 3)])
def test_metrics_equal_scikit_learn(batch_size: int, ranks: int) -> None:
    logits, labels = made()
    guesses = logits.argmax(1)
    assert (guesses == NO_IMAGE).any()
    assert not (labels == NO_IMAGE).any()
    found = tallied(logits, labels, batch_size, ranks)
    assert (found.balanced_acc, found.macro_f1) == pytest.approx(by_sklearn(guesses, labels), abs=1e-9)
    assert found.balanced_acc < found.acc1, "the rare classes are harder"
