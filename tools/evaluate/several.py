"""Output of scripts/evaluate.py for a model with several labels per image: text and JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from tools.common.label_figures import LabelFigures, label_figures_from, label_figures_of
from tools.common.parts import Part
from tools.common.tables import in_columns, shown
from tools.evaluate.one import ALL_SHOWN, WORST_SHOWN, measured, table_of, title_of
from utils.record.tasks import AUROC, LOSS, MAP, TOP1, TOP5
from utils.record.weight_sets import WeightSet

NO_MATRIX = "a confusion matrix needs one label per image; -json has each class's metrics"
CELLS = {
    MAP.words: lambda one: measured(100 * one.scores.map, one.intervals[MAP.name]),
    AUROC.words: lambda one: measured(100 * one.scores.auroc, one.intervals[AUROC.name]),
    "F1 at 0.5, micro": lambda one: measured(100 * one.scores.f1_micro),
    "F1 at 0.5, macro": lambda one: measured(100 * one.scores.f1_macro),
    "F1 at class thresholds, micro": lambda one: measured(one.f1_micro),
    "F1 at class thresholds, macro": lambda one: measured(one.f1_macro),
    "exact match at 0.5": lambda one: measured(100 * one.scores.exact_match, one.intervals["exact_match"]),
    "exact match at class thresholds": lambda one: measured(
        one.exact_match, one.intervals["exact_match_at_thresholds"]
    ),
    LOSS.words: lambda one: f"{one.loss:.4f}",
}


def evaluated(trained: Trained, part: Part, _bins: int) -> LabelFigures:
    return label_figures_of(trained, part)


def of_outputs(trained: Trained, logits: Tensor, labels: Tensor, _bins: int, averaged: bool = False) -> LabelFigures:
    return label_figures_from(trained, [(logits, labels)], averaged)


def text(trained: Trained, part: Part, found: dict[WeightSet, LabelFigures]) -> str:
    """Metrics of one or several sets of weights, and a table of classes."""
    first = next(iter(found.values()))
    counted = f"{part.title}: {part.counted} with {int(first.support.sum())} labels of "
    counted += f"{int((first.support > 0).sum())} classes; {first.unlabelled} images without a label"
    name, place = trained.config.MODEL.NAME, trained.chosen.origin
    what = f"{name} of {place}, in {trained.precision.name}; {thresholds_of(trained)[1]}"
    parts = [what, counted, "", *table_of(found, CELLS)]
    return "\n".join([*parts, "", *_classes(trained, first, title_of(next(iter(found))) if len(found) > 1 else "")])


def _classes(trained: Trained, figures: LabelFigures, of: str) -> list[str]:
    """One line per class; of many, those with the lowest average precision."""
    present = np.flatnonzero(figures.support).tolist()
    many = len(present) > ALL_SHOWN
    if many:
        present = sorted(present, key=lambda label: (figures.average_precision[label], label))[:WORST_SHOWN]
    head = f"The {WORST_SHOWN} classes with the lowest average precision" if many else "Each class"
    rows = [["class", "images", "AP", "AUROC", "threshold", "precision", "recall", "F1"]]
    for label in present:
        values = (figures.precision[label], figures.recall[label], figures.f1[label])
        rows.append(
            [
                shown(trained.name_of(label)),
                f"{figures.support[label]}",
                f"{figures.average_precision[label]:.1f} %",
                f"{auroc:.1f} %" if math.isfinite(auroc := figures.aurocs[label]) else "-",
                f"{figures.thresholds[label]:.3f}",
                *(f"{value:.1f} %" for value in values),
            ]
        )
    return [f"{head}{f' ({of})' if of else ''}:", "\n".join(in_columns(rows))]


def figures_as_json(one: LabelFigures) -> dict[str, Any]:
    scores = one.scores
    plain = {
        LOSS.name: one.loss,
        MAP.name: 100 * scores.map,
        AUROC.name: 100 * scores.auroc,
        "f1_micro": 100 * scores.f1_micro,
        "f1_macro": 100 * scores.f1_macro,
        "exact_match": 100 * scores.exact_match,
        "f1_micro_at_thresholds": one.f1_micro,
        "f1_macro_at_thresholds": one.f1_macro,
        "exact_match_at_thresholds": one.exact_match,
    }
    of_class = {
        "average_precision": one.average_precision,
        "auroc": one.aurocs,
        "threshold": one.thresholds,
        "precision": one.precision,
        "recall": one.recall,
        "f1": one.f1,
    }
    columns = {name: [_number(value) for value in values.tolist()] for name, values in of_class.items()}
    return {
        "images": one.images,
        "images_without_label": one.unlabelled,
        **dict.fromkeys((TOP1.name, TOP5.name)),  # those of one label
        **{name: _number(value) for name, value in {**plain, **one.own}.items()},
        "intervals": {name: interval and list(interval) for name, interval in one.intervals.items()},
        "per_class": {"images": one.support.tolist(), **columns},
    }


def _number(value: float) -> float | None:
    """JSON has no NaN: null takes its place."""
    return value if math.isfinite(value) else None
