"""Evaluate a model on a split: metrics with their intervals, and classes, as evaluate.py and the report show them.

With one label per image, only a few numbers per image are kept: memory does not depend on the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import ImageDataset
from datasets.examine.trust import Doubt
from engine.report.outcome import strange
from engine.task.one import ClassCounts, correct
from engine.task.several import HALF, f1, scores_of
from engine.trained.model import Trained, batches_of, guesses
from tools.common.calibration_error import Bin, Chance, calibration
from tools.common.command_line import MEMORISED
from tools.common.tables import in_columns, shown
from tools.common.turns import progress_bar
from utils.record.history import plain
from utils.record.run_folder import FOLDS
from utils.statistics.classes import balanced_accuracy_interval, macro_f1_interval
from utils.statistics.groups import effective_images, variance_inflation
from utils.statistics.proportions import Interval, newcombe, wilson
from utils.statistics.ranking import ranking_intervals
from utils.text import some_of
from vitamp.metrics import AUROC, BALANCED, LOSS, MACRO_F1, MAP, ONE_LABEL, TOP1, TOP5, Metric, always_guessing
from vitamp.weights import FEW_IMAGES

ALL_SHOWN = 20
"""Most classes that are all listed"""
WORST_SHOWN = 10
"""Number of classes listed if there are more"""
MOST_IN_JSON = 1000
"""Most classes for which the JSON file has the confusion matrix"""
INTERVALS = (
    "In brackets: 95 % interval of the metric for other images like these. If several images show one thing, it is too "
    "narrow for new things, unless DATA.GROUP names them."
)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a split. Arrays have one value per class; fractions are in percent."""

    images: int
    support: np.ndarray
    """Number of images of the class"""
    predicted: np.ndarray
    """Number of images for which it is predicted"""
    right: np.ndarray
    """Number of images of the class for which it is predicted"""
    values: dict[Metric, float]
    """The metrics of a validation"""
    intervals: Mapping[str, Interval | None]
    """By the metric's name; None where classes have too few images"""
    not_finite: int
    """Number of images whose logits are NaN or infinite"""

    @property
    def precision(self) -> np.ndarray:
        """Precision of each class; 0 for a class that is never predicted."""
        return 100 * self.right / np.maximum(self.predicted, 1)

    @property
    def recall(self) -> np.ndarray:
        """Recall of each class; 0 for a class without images."""
        return 100 * self.right / np.maximum(self.support, 1)

    @property
    def f1(self) -> np.ndarray:
        """F1 of each class, in percent, hence 200: twice the images that are right, over both counts of the class."""
        return 200 * self.right / np.maximum(self.predicted + self.support, 1)

    @property
    def present(self) -> list[int]:
        """Labels of the classes that have images."""
        return np.flatnonzero(self.support).tolist()

    @property
    def shown(self) -> dict[Metric, float]:
        """The metrics to list: without top-5, if there are so few classes that it is always right."""
        return {metric: value for metric, value in self.values.items() if metric.trivial < len(self.support)}

    def remarks(self) -> list[str]:
        """Return sentences about metrics without an interval, and about images whose logits are not finite."""
        sentences = []
        finite = [metric for metric, value in self.values.items() if math.isfinite(value)]
        without_interval = [metric.words for metric in finite if self.intervals[metric.name] is None]
        if without_interval:
            sentences.append(f"No interval of {' and '.join(without_interval)}: too few images per class.")
        if self.not_finite:
            sentences.append(f"{self.not_finite} images have NaN or infinite logits.")
        return sentences

    def strange(self, trained: Trained, in_folds: float | None = None) -> list[Doubt]:
        """Return what looks wrong with the images, and likely causes; nothing with several labels.

        `in_folds`: top-1 in percent that a linear probe reached in cross-validation on the training images; None: the
        run's own probe, if it has one, is compared.
        """
        return []

    def _class_table(
        self, trained: Trained, worst: tuple[str, np.ndarray], cells: Callable[[int], dict[str, str]]
    ) -> list[str]:
        """Return the lines of a table with one row per class; if there are many classes, only of the worst ones.

        `worst`: name and values of the metric by which classes are the worst: those with its lowest values.
        `cells`: returns the cells of a class by heading, except its name and its number of images.
        """
        labels = self.present
        head = "Each class:"
        if len(labels) > ALL_SHOWN:
            metric, values = worst
            labels = sorted(labels, key=lambda label: (float(values[label]), label))[:WORST_SHOWN]
            head = f"The {WORST_SHOWN} classes with the lowest {metric}:"
        rows = list[list[str]]()
        for label in labels:
            row = {"class": shown(trained.name_of(label)), "images": f"{self.support[label]}", **cells(label)}
            if not rows:
                rows.append(list(row))  # the headings
            rows.append(list(row.values()))
        return [head] + in_columns(rows) if rows else []

    def _fields(self, of_class: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the fields of the JSON file that every evaluation has. `of_class`: name -> value of each class."""
        classes = {name: values.tolist() for name, values in {"images": self.support, **of_class}.items()}
        intervals = {name: interval and list(interval) for name, interval in self.intervals.items()}
        values = {metric.name: value for metric, value in self.values.items()}
        return {"images": self.images, **values, "intervals": intervals, "per_class": classes}

    def _scores(self, label: int) -> dict[str, str]:
        """Return precision, recall and F1 of a class as cells of a table, by heading."""
        columns = {"precision": self.precision, "recall": self.recall, "F1": self.f1}
        return {name: f"{of_class[label]:.1f} %" for name, of_class in columns.items()}


class Rows(NamedTuple):
    """Results for images with one label: a tensor on the host per kind of result, with one value per image."""

    label: Tensor
    guess: Tensor
    among_five: Tensor
    """Whether the label is among the five most probable classes"""
    confidence: Tensor
    """Probability of the guess"""
    nll: Tensor
    brier: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Rows:
        """Compute the results of a batch from its logits and labels."""
        # On the device, so that ties are resolved as in validation.
        _guess_is_right, among_five = correct(logits, labels)
        guess = guesses(logits)[:, 0].cpu()  # the most probable class
        losses = F.cross_entropy(logits, labels, reduction="none").cpu().double()
        logits = logits.cpu().double()
        labels = labels.cpu()
        probabilities = logits.softmax(-1)
        truth = F.one_hot(labels, logits.shape[-1])
        return cls(
            label=labels,
            guess=guess,
            among_five=among_five.cpu(),
            confidence=probabilities.gather(1, guess[:, None])[:, 0],  # that of the guessed class
            nll=losses,
            brier=(probabilities - truth).square().sum(1),
        )


@dataclass(frozen=True)
class OneLabel(Evaluation):
    """Metrics of a model for images with one label each."""

    rows: Rows
    """Results of each image, in the order of the images"""
    groups: Sequence[str]
    """Group of each image, as `ImageDataset.groups`"""
    nll: float
    """Mean negative log-likelihood: the validation loss without label smoothing."""
    brier: float
    """Mean squared error of the probabilities, summed over classes: 0 to 2."""
    ece: float
    bins: list[Bin]

    @classmethod
    def of(cls, trained: Trained, outputs: Iterable[tuple[Tensor, Tensor]], groups: Sequence[str] = ()) -> OneLabel:
        """Evaluate a model from (logits, labels) of each batch.

        `groups`: the group of each image, which widens the intervals; empty without groups.
        """
        batches = [Rows.of(logits, labels) for logits, labels in outputs]
        # Each field of all batches becomes one tensor.
        rows = Rows._make(map(torch.cat, zip(*batches, strict=True)))
        images = len(rows.label)
        classes = int(trained.config.MODEL.NUM_CLASSES)
        hit = rows.label == rows.guess
        label = rows.label.numpy()
        guess = rows.guess.numpy()

        support = np.bincount(label, minlength=classes)
        predicted = np.bincount(guess, minlength=classes)
        right = np.bincount(rows.label[hit].numpy(), minlength=classes)
        counts = ClassCounts(right.tolist(), support.tolist(), predicted.tolist())
        values = {
            TOP1: 100 * int(hit.sum()) / images,
            TOP5: 100 * int(rows.among_five.sum()) / images,
            BALANCED: 100 * counts.balanced_accuracy(),
            MACRO_F1: 100 * counts.macro_f1(),
        }
        intervals = {
            TOP1.name: wilson(values[TOP1], effective_images(hit.numpy(), groups)),
            TOP5.name: wilson(values[TOP5], effective_images(rows.among_five.numpy(), groups)),
            BALANCED.name: balanced_accuracy_interval(label, guess, classes, groups),
            MACRO_F1.name: macro_f1_interval(label, guess, classes, groups),
        }
        ece, bins = calibration(rows.confidence, hit)
        return cls(
            images=images,
            support=support,
            predicted=predicted,
            right=right,
            values=values,
            intervals=intervals,
            not_finite=int((~rows.nll.isfinite()).sum()),
            rows=rows,
            groups=groups,
            nll=float(rows.nll.sum()) / images,
            brier=float(rows.brier.sum()) / images,
            ece=ece,
            bins=bins,
        )

    def recall_interval(self, label: int) -> Interval:
        """Return the 95 % interval of a class's recall."""
        of_class = (self.rows.label == label).numpy()
        hit = (self.rows.guess.numpy() == label)[of_class]
        groups = np.array(self.groups)
        independent = effective_images(hit, groups[of_class] if len(groups) else ())
        return wilson(float(self.recall[label]), independent)

    @cached_property
    def chance(self) -> Chance:
        """Calibration error that chance alone gives on these images."""
        return Chance.of(self.rows.confidence, self.rows.label == self.rows.guess, self.groups)

    @property
    def largest_class_percent(self) -> float:
        """Top-1 of a model that always guesses the most frequent class."""
        return 100 * int(self.support.max()) / self.images

    def strange(self, trained: Trained, in_folds: float | None = None) -> list[Doubt]:
        """Return what looks wrong with the images: classes, and top-1 against that of a linear probe.

        Without `in_folds`, also top-1 against that of the run's own validation. `in_folds`: top-1 in percent that a
        probe reached in cross-validation on the training images; None: that of the run's own probe, if it has one.
        """
        chosen = trained.chosen
        top1_of_probe = in_folds
        # A run that selects by these metrics may give up top-1 for them, so top-1 below that of its probe is normal.
        gives_up_top1 = trained.config.SAVE_BEST_BY in (BALANCED.name, MACRO_F1.name)
        if in_folds is None and not gives_up_top1:
            top1_of_probe = chosen.choices.get(FOLDS)
        labels = self.rows.label.numpy()
        guesses = self.rows.guess.numpy()
        found = strange(labels, guesses, trained.names(), top1_of_probe, groups=self.groups)

        validated = chosen.meta.get("metrics", {}).get(f"{chosen.which.prefix}{TOP1.name}")
        validation_images = chosen.meta.get("val_images") or self.images  # older checkpoints do not store the number
        if in_folds is not None or validated is None or validation_images < FEW_IMAGES:
            return found
        if not trained.computes_as_validated:
            return found
        # The interval of the top-1 of the run's validation minus the top-1 here.
        # Validation images are taken to be grouped like these.
        inflation = variance_inflation(labels == guesses, self.groups)
        independent = [validation_images / inflation, self.images / inflation]
        low, high = newcombe((validated, self.values[TOP1]), independent)
        beyond_chance = "that here, more than chance explains"
        sentence = advice = ""
        if low > 0:
            sentence = f"validation had top-1 {validated:.1f} %, {low:.1f} to {high:.1f} points above {beyond_chance}"
            advice = (
                "The best of several validations flatters; those images may resemble the training images more than "
                "these do, as near copies or photographs of one place (DATA.GROUP keeps such images together); or "
                "these are from another source"
            )
        elif high < 0 and trained.config.DATA.PART not in MEMORISED:  # on training images, a higher top-1 is normal
            sentence = f"validation had top-1 {validated:.1f} %, {-high:.1f} to {-low:.1f} points below {beyond_chance}"
            advice = (
                "These images may be easier than those of validation, or training has seen them or near copies of them"
            )
        if sentence:
            points = self.values[TOP1] - validated
            found.append(Doubt("source", sentence, points, advice, effect_in_words="Unlike validation"))
        return found

    def words(self) -> str:
        """Describe what was evaluated, and what guessing would reach."""
        images = f"{self.images:,} images of {len(self.present)} classes; calibration in {len(self.bins)} bins"
        return f"{images}; {always_guessing(self.largest_class_percent, self.values[TOP1])}"

    def remarks(self) -> list[str]:
        sentences = super().remarks()
        absent = int(((self.predicted > 0) & (self.support == 0)).sum())
        if absent:
            are = "class without images is" if absent == 1 else "classes without images are"
            sentences.append(f"{absent} {are} predicted: 0 in macro F1, and not in the other means.")
        return sentences

    def cells(self) -> dict[str, str]:
        """Return the metrics as cells of a table, by name."""
        # Those of a validation, except top-5 if it is always right.
        of_validation = {
            metric.words: measured(value, self.intervals[metric.name]) for metric, value in self.shown.items()
        }
        return {
            **of_validation,
            "precision, macro": f"{self._macro(self.precision):.2f} %",
            "precision, weighted": f"{self._weighted(self.precision):.2f} %",
            "recall, weighted": f"{self._weighted(self.recall):.2f} %",
            "F1, weighted": f"{self._weighted(self.f1):.2f} %",
            "calibration error": f"{self.ece:.2f} %",
            "NLL": f"{self.nll:.4f}",
            "Brier": f"{self.brier:.4f}",
        }

    def class_table(self, trained: Trained) -> list[str]:
        """Return a table of the classes; if there are many, of those with the lowest recall."""

        def cells(label: int) -> dict[str, str]:
            recall = measured(float(self.recall[label]), self.recall_interval(label))
            mistaken = shown(self.mistaken_for(trained, label)) or "-"
            return {**self._scores(label), "recall": recall, "most often mistaken for": mistaken}

        return self._class_table(trained, worst=("recall", self.recall), cells=cells)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the JSON file; 'confusion' is None if there are too many classes."""
        of_class = {"precision": self.precision, "recall": self.recall, "f1": self.f1}
        confusion = None
        if len(self.support) <= MOST_IN_JSON:
            confusion = self.confusion(range(len(self.support))).tolist()
        fields = {
            **self._fields(of_class),
            **{f"{name}_macro": self._macro(values) for name, values in of_class.items()},
            **{f"{name}_weighted": self._weighted(values) for name, values in of_class.items()},
            "nll": self.nll,
            "brier": self.brier,
            "ece": self.ece,
            "ece_by_chance": self.chance._asdict(),
            "largest_class_percent": self.largest_class_percent,
            "bins": [bin._asdict() for bin in self.bins],
            "confusion": confusion,
        }
        return plain(fields)

    def confusion(self, chosen: Iterable[int]) -> np.ndarray:
        """Count images by true class (rows) and predicted class (columns), of the classes `chosen`."""
        labels = list(chosen)
        rows = []
        for label in labels:
            guessed = torch.bincount(self.rows.guess[self.rows.label == label], minlength=len(self.support))
            rows.append(guessed[labels])
        return torch.stack(rows).numpy()

    def mistaken_for(self, trained: Trained, label: int) -> str:
        """Name the class that is most often predicted for images of the class `label` by mistake, and how often.

        Several classes are named if they are equally frequent; '' if there is no mistake.
        """
        guess = self.rows.guess
        wrong = guess[(self.rows.label == label) & (guess != label)]
        counts = torch.bincount(wrong, minlength=len(self.support))
        most = int(counts.max())
        if most == 0:
            return ""
        names = [trained.name_of(other) for other in (counts == most).nonzero()[:, 0].tolist()]
        each = " each" if len(names) > 1 else ""
        return f"{some_of(names, 2)} ({most}{each})"

    def _macro(self, of_class: np.ndarray) -> float:
        """Mean over the classes that have images."""
        return float(of_class[self.support > 0].mean())

    def _weighted(self, of_class: np.ndarray) -> float:
        """Mean over classes, weighted by their number of images."""
        return float((of_class * self.support).sum() / self.support.sum())


@dataclass(frozen=True)
class SeveralLabels(Evaluation):
    """Metrics of a model for images with several labels each.

    A class is predicted if its probability reaches its threshold, which is from the model's last validation.
    """

    loss: float
    at_half: dict[str, float]
    """F1 and exact match at a threshold of 0.5"""
    at_thresholds: dict[str, float]
    """F1 and exact match at the threshold of each class"""
    average_precision: np.ndarray
    """NaN for a class without images"""
    aurocs: np.ndarray
    """NaN for a class that no image or every image has"""
    thresholds: np.ndarray
    unlabelled: int
    """Number of images without a label"""
    rows: tuple[np.ndarray, np.ndarray]
    """Probabilities and true labels, images x classes"""

    @classmethod
    def of(
        cls, trained: Trained, outputs: Iterable[tuple[Tensor, Tensor]], groups: Sequence[str] = ()
    ) -> SeveralLabels:
        """Evaluate a model from (logits, labels) of each batch.

        `groups`: the group of each image, which widens the intervals; empty without groups.
        """
        logits, labels = joined(outputs)
        logits = logits.double()
        labels = labels.double()
        probabilities = logits.sigmoid().numpy()
        truth = labels.numpy() > 0

        # F1 and exact match at the threshold of each class, and at 0.5.
        class_thresholds, _sentence = trained.thresholds()
        thresholds = np.array(class_thresholds)
        predicted = probabilities >= thresholds
        exact_at_thresholds = (predicted == truth).all(1)
        _of_classes, micro, macro = f1(predicted, truth)
        at_thresholds = _in_percent(micro, macro, float(exact_at_thresholds.mean()))
        scores = scores_of(probabilities, truth)
        exact_at_half = ((probabilities >= HALF) == truth).all(1)
        at_half = _in_percent(scores.f1_micro, scores.f1_macro, scores.exact_match)

        # Images of one group count as fewer independent images, which makes the intervals wider.
        independent_at_half = effective_images(exact_at_half, groups)
        independent_at_thresholds = effective_images(exact_at_thresholds, groups)
        map_interval, auroc_interval = ranking_intervals(probabilities, truth, groups)
        return cls(
            images=len(truth),
            support=truth.sum(0),
            predicted=predicted.sum(0),
            right=(predicted & truth).sum(0),
            values={MAP: 100 * scores.map, AUROC: 100 * scores.auroc},
            intervals={
                MAP.name: map_interval,
                AUROC.name: auroc_interval,
                "exact_match": wilson(at_half["exact_match"], independent_at_half),
                "exact_match_at_thresholds": wilson(at_thresholds["exact_match"], independent_at_thresholds),
            },
            not_finite=int((~logits.isfinite().all(1)).sum()),
            loss=float(F.binary_cross_entropy_with_logits(logits, labels)),
            at_half=at_half,
            at_thresholds=at_thresholds,
            average_precision=100 * scores.average_precision,
            aurocs=100 * scores.aurocs,
            thresholds=thresholds,
            unlabelled=int((~truth.any(1)).sum()),
            rows=(probabilities, truth),
        )

    def words(self) -> str:
        """Describe what was evaluated."""
        labels = f"{int(self.support.sum())} labels of {len(self.present)} classes"
        return f"{self.images:,} images with {labels}; {self.unlabelled} images without a label"

    def cells(self) -> dict[str, str]:
        """Return the metrics as cells of a table, by name."""
        cells = {metric.words: measured(value, self.intervals[metric.name]) for metric, value in self.values.items()}
        for mean in ("micro", "macro"):
            cells[f"F1 at 0.5, {mean}"] = measured(self.at_half[f"f1_{mean}"])
            cells[f"F1 at class thresholds, {mean}"] = measured(self.at_thresholds[f"f1_{mean}"])
        interval = self.intervals["exact_match"]
        cells["exact match at 0.5"] = measured(self.at_half["exact_match"], interval)
        interval = self.intervals["exact_match_at_thresholds"]
        cells["exact match at class thresholds"] = measured(self.at_thresholds["exact_match"], interval)
        return {**cells, LOSS.words: f"{self.loss:.4f}"}

    def class_table(self, trained: Trained) -> list[str]:
        """Return the lines of a table of the classes; if there are many, of those with the lowest average precision."""

        def cells(label: int) -> dict[str, str]:
            """Return the cells of a class by heading; `_scores` adds precision, recall and F1."""
            ranking = {"AP": f"{self.average_precision[label]:.1f} %", "AUROC": self.auroc_text(label)}
            return {**ranking, "threshold": f"{self.thresholds[label]:.3f}", **self._scores(label)}

        return self._class_table(trained, worst=("average precision", self.average_precision), cells=cells)

    def auroc_text(self, label: int) -> str:
        """Format the AUROC of a class; '-' if it is undefined."""
        auroc = self.aurocs[label]
        return f"{auroc:.1f} %" if math.isfinite(auroc) else "-"

    def as_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        of_class = {
            "average_precision": self.average_precision,
            "auroc": self.aurocs,
            "threshold": self.thresholds,
            "precision": self.precision,
            "recall": self.recall,
            "f1": self.f1,
        }
        fields = {
            **self._fields(of_class),
            "images_without_label": self.unlabelled,
            TOP1.name: None,  # with several labels, there is no top-1 and no top-5
            TOP5.name: None,
            LOSS.name: self.loss,
            **self.at_half,
            **{f"{name}_at_thresholds": value for name, value in self.at_thresholds.items()},
        }
        return plain(fields)


def _in_percent(f1_micro: float, f1_macro: float, exact_match: float) -> dict[str, float]:
    """Return these fractions in percent, under the names of the JSON file."""
    return {"f1_micro": 100 * f1_micro, "f1_macro": 100 * f1_macro, "exact_match": 100 * exact_match}


def evaluation_of(
    trained: Trained, outputs: Iterable[tuple[Tensor, Tensor]], groups: Sequence[str] = ()
) -> OneLabel | SeveralLabels:
    """Evaluate a model with one or several labels per image, as its task says.

    `outputs`: logits and labels, batch by batch. `groups`: the group of each image; empty without DATA.GROUP.
    """
    kind = OneLabel if trained.task.kind == ONE_LABEL else SeveralLabels
    return kind.of(trained, outputs, groups)


def with_bar(trained: Trained, dataset: ImageDataset) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels batch by batch, on the device, in the order of the images, with a progress bar."""
    with progress_bar(len(dataset), "images") as bar:
        for logits, labels, _ in batches_of(trained, dataset):
            yield logits, labels
            bar.update(len(labels))


def joined(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the logits and the labels of all batches on the host."""
    on_host = [(logits.cpu(), labels.cpu()) for logits, labels in batches]
    return torch.cat([logits for logits, _ in on_host]), torch.cat([labels for _, labels in on_host])


def table_of(found: OneLabel | SeveralLabels, title: str) -> list[str]:
    """Return the table of an evaluation's metrics, and the remarks on them. `title`: heading of the column."""
    rows = [["", title]] + [[name, cell] for name, cell in found.cells().items()]
    return in_columns(rows) + [INTERVALS] + found.remarks()


def measured(percent: float, interval: Interval | None = None) -> str:
    """Format a percentage and its interval: '98.33 % (96.41 to 99.24)'; '-' for NaN."""
    brackets = f" ({interval.words().removesuffix(' %')})" if interval else ""
    return f"{percent:.2f} %{brackets}" if math.isfinite(percent) else "-"
