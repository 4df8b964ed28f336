"""Metrics of several labels per sample equal scikit-learn's, on one process and on several."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import Tensor

from datasets import PADDING, Batch, validation_batches
from engine.measure.meters import TrainMeters
from engine.task import several
from engine.task.one import OneLabel
from engine.task.several import (
    HALF,
    F1Means,
    LabelMetrics,
    SeveralLabels,
    _ScoreTable,
    describe_untuned,
    rank,
    scores_of,
)
from engine.trained.model import load_trained
from tests.engine.small import CPU
from tests.label_sets import write_recipe, write_set
from tests.predicted import validation_predictions
from tests.program import Vitamp, metrics
from utils.distributed.world import ALONE
from utils.errors import AllRanksError

SAMPLES, CLASSES = 103, 6
LEAST = 20
NO_POSITIVE = 4


def made(coarse: bool = False) -> tuple[Tensor, Tensor]:
    """Logits that know something of their labels. One class has no positive; `coarse` logits are often equal."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(SAMPLES, CLASSES, generator=generator) < 0.3).float()
    labels[:, NO_POSITIVE] = 0
    logits = torch.randn(SAMPLES, CLASSES, generator=generator) + 2 * labels - 1
    return (logits.round() if coarse else logits), labels


def by_sklearn(logits: Tensor, labels: Tensor) -> dict[str, float]:
    scores, truth = logits.double().sigmoid().numpy(), labels.numpy().astype(int)
    present = np.flatnonzero(truth.any(0))
    chosen = (scores >= 0.5).astype(int)
    return {
        "map": 100 * float(average_precision_score(truth[:, present], scores[:, present], average="macro")),
        "auroc": 100 * float(roc_auc_score(truth[:, present], scores[:, present], average="macro")),
        "f1_micro": 100 * float(f1_score(truth, chosen, average="micro")),
        "f1_macro": 100 * float(f1_score(truth[:, present], chosen[:, present], average="macro")),
        "exact_match": 100 * float((chosen == truth).all(1).mean()),
        "loss": float(F.binary_cross_entropy_with_logits(logits.double(), labels.double())),
    }


def tallied(logits: Tensor, labels: Tensor, batch_size: int, ranks: int) -> LabelMetrics:
    """Metrics of a validation on so many ranks, with padded batches, as the ranks' sums give them."""
    tallies = [_ScoreTable(SAMPLES, SeveralLabels(CLASSES), CPU) for _ in range(ranks)]
    for rank_number, tally in enumerate(tallies):
        for plan in validation_batches(SAMPLES, batch_size, rank_number, ranks):
            indices = torch.from_numpy(plan)
            real = (indices != PADDING).float().unsqueeze(1)
            # A padded row has the logits of a black image, and no label.
            rows = logits[indices] * real + 3.0 * (1 - real)
            tally.add(rows, Batch(torch.empty(0), labels[indices] * real, indices))
    first, *others = tallies
    for other in others:
        assert sum(map(len, other._table._rows)) <= -(-SAMPLES // ranks), "its own samples only"
        first._table._rows += other._table._rows
        first._table._indices += other._table._indices
    return first.metrics(ALONE)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("batch_size", "ranks"), [(103, 1), (10, 1), (10, 2), (7, 3)])
def test_metrics_equal_scikit_learn(batch_size: int, ranks: int, coarse: bool) -> None:
    logits, labels = made(coarse)
    found = tallied(logits, labels, batch_size, ranks)
    for name, value in by_sklearn(logits, labels).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_equals_scikit_learn(vitamp: Vitamp, tmp_path: Path, processes: int) -> None:
    """A class of the validation images has no positive, and their number is divided by neither batch nor processes."""
    write_set(tmp_path)
    table = tmp_path / "val.csv"
    table.write_text(re.sub(r"north;|;?north", "", table.read_text()))
    run, words = tmp_path / "run", ("TRAIN.NUM_EPOCHS=2", "DATA.BATCH_SIZE_EVAL=7", "-device", "cpu")
    recipe = write_recipe(tmp_path)
    vitamp("-ngpus", processes, "-cfg", recipe, "-output", run, *words, script="main_multi_gpu.py", code=0)
    trained = load_trained(max((run / "checkpoints").glob("step-*")), "model", device="cpu")
    found = validation_predictions(trained)
    assert len(found) == 61
    assert not found.labels[:, 1].any()
    val = metrics(run, "val")[-1]
    expected = by_sklearn(found.logits, found.labels)
    del expected["loss"]
    assert 30 < expected["map"] < 99
    assert {name: val[name] for name in expected} == pytest.approx(expected, abs=1e-9)


def test_several_ranks_give_the_same_bits_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = tallied(*made(), 10, 1)
    assert one == tallied(*made(), 10, 2) == tallied(*made(), 7, 3)
    monkeypatch.setattr(several, "BYTES_AT_ONCE", 1000)  # 103 rows in many parts
    assert one == tallied(*made(), 7, 3)
    assert set(one.fields()) >= {"loss", "acc1", "acc5", "map", "f1_micro_tuned", "exact_match"}
    assert one.fields()["acc1"] is None
    assert "thresholds" not in one.fields()


def test_a_sample_counted_twice_or_never_is_an_error() -> None:
    logits, labels = made()
    for indices in (torch.arange(SAMPLES - 1), torch.tensor([*range(SAMPLES), 0])):
        tally = SeveralLabels(CLASSES).tally(SAMPLES, CPU)
        tally.add(logits[indices], Batch(torch.empty(0), labels[indices], indices))
        with pytest.raises(AllRanksError, match="validation counted 102 samples, not 103"):
            tally.metrics(ALONE)


@pytest.mark.parametrize("coarse", [False, True])
def test_thresholds_have_the_highest_f1(coarse: bool) -> None:
    logits, labels = made(coarse)
    scores, truth = logits.double().sigmoid().numpy(), labels.numpy() > 0
    found = scores_of(scores, truth)
    expected = []
    for label in range(CLASSES):
        if label == NO_POSITIVE:
            assert found.thresholds[label] == HALF
            assert np.isnan(found.average_precision[label])
            continue
        chosen = scores[:, label] >= found.thresholds[label]
        every = (scores[:, label] >= score for score in scores[:, label])
        expected.append(max(float(f1_score(truth[:, label], guesses)) for guesses in every))
        assert float(f1_score(truth[:, label], chosen)) == pytest.approx(expected[-1], abs=1e-12)
        assert found.thresholds[label] not in scores[:, label], "halfway between two scores"
    assert found.f1_macro_tuned == pytest.approx(float(np.mean(expected)), abs=1e-12)
    assert found.f1_macro_tuned >= found.f1_macro


def test_rare_classes_keep_a_threshold_of_a_half() -> None:
    """A threshold that was chosen on a few positives is worse on other images than 0.5, again and again."""
    generator = np.random.default_rng(0)
    truth = np.zeros((400, 2), dtype=bool)
    truth[:LEAST, 0] = truth[: LEAST - 1, 1] = True
    scores = 0.3 * generator.random((400, 2)) + 0.1 * truth
    found = scores_of(scores, truth)
    assert found.thresholds[0] < 0.4
    assert found.thresholds[1] == HALF
    assert found.average_precision[1] > 0
    assert describe_untuned([1], ["ant", "bee"]) == (
        "1 of 2 classes keep a threshold of 0.5, with fewer than 20 validation images: bee"
    )
    assert describe_untuned(range(12), range(80)).endswith(": 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")


def test_rank_of_odd_scores() -> None:
    yes, no = np.array([True, True]), np.array([False, False])
    assert rank(np.array([0.2, 0.9]), no)[1] == HALF
    assert rank(np.array([0.2, 0.9]), yes)[:2] == (1.0, 0.1)
    assert np.isnan(rank(np.array([0.2, 0.9]), yes)[2]), "no negative to rank the positives above"
    equal = rank(np.array([0.7, 0.7]), np.array([True, False]))
    assert (equal[0], equal[2]) == (0.5, 0.5)
    assert np.isnan(rank(np.array([np.nan, 0.9]), yes)[0])
    near = np.nextafter(0.5, 1)
    assert rank(np.array([near, 0.5]), np.array([True, False])) == (1.0, near, 1.0), "no number is between them"


def test_auroc_leaves_out_classes_without_positives_or_negatives() -> None:
    logits, labels = made()
    labels[:, 0] = 1
    scores, truth = logits.double().sigmoid().numpy(), labels.numpy() > 0
    found = scores_of(scores, truth)
    both = [label for label in range(CLASSES) if label not in (0, NO_POSITIVE)]
    assert np.isnan(found.aurocs).nonzero()[0].tolist() == [0, NO_POSITIVE]
    for label in both:
        assert found.aurocs[label] == pytest.approx(roc_auc_score(truth[:, label], scores[:, label]), abs=1e-12)
    assert found.auroc == pytest.approx(found.aurocs[both].mean(), abs=1e-12)
    assert found.map == pytest.approx(found.average_precision[[0, *both]].mean(), abs=1e-12)


def test_split_without_any_label_has_no_map() -> None:
    found = scores_of(np.full((3, 2), 0.1), np.zeros((3, 2), dtype=bool))
    assert np.isnan(found.map)
    assert np.isnan(found.f1_micro)
    assert found.exact_match == 1


def test_training_f1_counts_all_decisions() -> None:
    logits, labels = made()
    meters = TrainMeters(CPU, ALONE, SeveralLabels(CLASSES))
    for rows in torch.arange(SAMPLES).split(25):
        meters.add(torch.ones(()), logits[rows], labels[rows], 0.2)
    meters.close_update(1, torch.zeros(()), True, False)
    read = meters.read(torch.ones(()), 0.1)
    assert isinstance(read.epoch, F1Means)
    expected = 100 * float(f1_score(labels.numpy().astype(int), (logits >= 0).numpy().astype(int), average="micro"))
    assert read.epoch.f1_micro == pytest.approx(expected, abs=1e-9)
    assert read.epoch.loss == pytest.approx(1.0)
    assert isinstance(OneLabel(4).training_metrics(1.0, (1.0, 2.0), 2.0).fields()["acc1"], float)
