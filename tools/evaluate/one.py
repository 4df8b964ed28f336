"""Output of scripts/evaluate.py for a model with one label per image: text, JSON, confusion matrix as CSV or PNG."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.saved.trained import Trained
from tools.common.figures import Figures, Rows, figures_from, figures_of
from tools.common.output_file import writing
from tools.common.parts import Part
from tools.common.tables import in_columns, shown
from utils.intervals import Interval
from utils.record.tasks import LOSS, ONE_LABEL, TOP1, Metric, always_guessing
from utils.record.weight_sets import WeightSet

ALL_SHOWN, WORST_SHOWN = 20, 10
MOST_IN_JSON = 1000
"""Most classes for which the JSON file has the confusion matrix"""
NAMES_IN_PICTURE, NUMBERS_IN_PICTURE = 60, 20
NO_MATRIX = ""
"""Why there is no confusion matrix; '': there is one"""
AT_ONCE = 1024
"""Images whose probabilities are in memory at once"""
evaluated = figures_of


def of_outputs(trained: Trained, logits: Tensor, labels: Tensor, bins: int, _averaged: bool = False) -> Figures:
    """Metrics of logits on the host, of one model or averaged ones."""
    rows = [Rows.of(*pair) for pair in zip(logits.split(AT_ONCE), labels.split(AT_ONCE), strict=True)]
    seen = Rows(*(torch.cat(column) for column in zip(*rows, strict=True)))
    return figures_from(seen, trained.config.MODEL.NUM_CLASSES, bins)


def text(trained: Trained, part: Part, found: dict[WeightSet, Figures]) -> str:
    """Metrics of one or several sets of weights, and a table of classes."""
    first = next(iter(found.values()))
    counted = f"{part.title}: {part.counted} of {int((first.support > 0).sum())} classes"
    counted += f"; calibration in {len(first.bins)} bins; {always_guessing(first.largest_class_percent)}"
    what = f"{trained.config.MODEL.NAME} of {trained.chosen.origin}, in {trained.precision.name}"
    parts = [what, counted, "", *table_of(found, CELLS)]
    parts += ["", *_classes(trained, first, title_of(next(iter(found))) if len(found) > 1 else "")]
    return "\n".join(parts)


def table_of(
    found: Mapping[WeightSet, Any] | Mapping[str, Any], cells: Mapping[str, Callable[[Any], str]]
) -> list[str]:
    """A table with a column for each set of weights or name, and a line for each with logits that are not finite."""
    rows = [["", *(title_of(which) for which in found)]]
    rows += [[name, *(cell(figures) for figures in found.values())] for name, cell in cells.items()]
    own = next(iter(found.values())).own
    rows += [[name, *(f"{figures.own[name]:.4f}" for figures in found.values())] for name in own]
    return [
        *in_columns(rows),
        INTERVALS,
        *(
            f"{figures.not_finite} images have NaN or infinite logits ({title_of(which)})."
            for which, figures in found.items()
            if figures.not_finite
        ),
    ]


INTERVALS = "In brackets: 95 % interval of the metric, as chance in which images are evaluated gives it."


def measured(percent: float, interval: Interval | None = None) -> str:
    """'98.33 % (96.41 to 99.24)'"""
    brackets = f" ({interval.words().removesuffix(' %')})" if interval else ""
    return f"{percent:.2f} %{brackets}" if math.isfinite(percent) else "-"


def title_of(which: WeightSet | str) -> str:
    return which if isinstance(which, str) else which.mark or which.name


def _measured_in_validation(one: Any, metric: Metric) -> str:
    return measured(one.values[metric], one.intervals[metric.name])


CELLS = {
    **{metric.words: partial(_measured_in_validation, metric=metric) for metric in ONE_LABEL.metrics if metric != LOSS},
    "precision, macro": lambda one: f"{one.macro(one.precision):.2f} %",
    "precision, weighted": lambda one: f"{one.weighted(one.precision):.2f} %",
    "recall, weighted": lambda one: f"{one.weighted(one.recall):.2f} %",
    "F1, weighted": lambda one: f"{one.weighted(one.f1):.2f} %",
    "calibration error": lambda one: f"{one.ece:.2f} %",
    "NLL": lambda one: f"{one.nll:.4f}",
    "Brier": lambda one: f"{one.brier:.4f}",
}


def _classes(trained: Trained, figures: Figures, of: str) -> list[str]:
    """One line per class; of many, those with the lowest recall."""
    present = torch.nonzero(figures.support)[:, 0].tolist()
    many = len(present) > ALL_SHOWN
    if many:
        present = sorted(present, key=lambda label: (float(figures.recall[label]), label))[:WORST_SHOWN]
    head = f"The {WORST_SHOWN} classes with the lowest recall" if many else "Each class"
    rows = [["class", "images", "precision", "recall", "F1", "most often mistaken for"]]
    for label in present:
        values = (figures.precision[label], figures.recall[label], figures.f1[label])
        rows.append(
            [
                shown(trained.name_of(label)),
                f"{int(figures.support[label])}",
                *(f"{float(value):.1f} %" for value in values),
                _mistaken_for(trained, figures, label),
            ]
        )
    return [f"{head}{f' ({of})' if of else ''}:", "\n".join(in_columns(rows))]


def _mistaken_for(trained: Trained, figures: Figures, label: int) -> str:
    other, times = figures.taken_for(label)
    return f"{shown(trained.name_of(other))} ({times})" if times else "-"


def figures_as_json(one: Figures) -> dict[str, Any]:
    of_class = {"precision": one.precision, "recall": one.recall, "f1": one.f1}
    means = {f"{name}_macro": one.macro(values) for name, values in of_class.items()}
    means |= {f"{name}_weighted": one.weighted(values) for name, values in of_class.items()}
    whole = one.classes <= MOST_IN_JSON
    plain = {
        **{metric.name: value for metric, value in one.values.items()},
        **means,
        "nll": one.nll,
        "brier": one.brier,
        "ece": one.ece,
    }
    return {
        "images": one.images,
        **_numbers(plain),
        **_numbers(one.own),
        "intervals": {name: list(interval) for name, interval in one.intervals.items()},
        "largest_class_percent": one.largest_class_percent,
        "bins": [_numbers(bin._asdict()) for bin in one.bins],
        "per_class": {"images": one.support.tolist(), **{name: values.tolist() for name, values in of_class.items()}},
        "confusion": one.confusion().tolist() if whole else None,
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: null takes its place."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def write_matrix(path: Path, figures: Figures, names: list[str]) -> None:
    with writing(path, "-confusion"):
        (_write_picture if path.suffix.lower() == ".png" else _write_table)(path, figures, names)


def _write_table(path: Path, figures: Figures, names: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("actual / predicted", *names))
        for name, row in zip(names, figures.confusion().tolist(), strict=True):
            writer.writerow((name, *row))


def _write_picture(path: Path, figures: Figures, names: list[str]) -> None:
    """Colours are percent of the true class, so that rare classes are visible too."""
    from matplotlib.figure import Figure

    counts = figures.confusion()
    shares = 100 * counts.double() / figures.support.clamp(min=1)[:, None]
    side = min(16.0, max(5.0, 0.35 * len(names) + 2))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=100)
    axes.set(
        xlabel="predicted", ylabel="actual", title=f"{figures.images} images, {TOP1.words} {TOP1.number(figures.top1)}"
    )
    if len(names) <= NAMES_IN_PICTURE:
        places, labels = range(len(names)), [shown(name)[:30] for name in names]
        axes.set_xticks(places, labels, rotation=90, parse_math=False)
        axes.set_yticks(places, labels, parse_math=False)
    if len(names) <= NUMBERS_IN_PICTURE:
        for row, column in torch.nonzero(counts).tolist():
            colour = "white" if shares[row, column] > 50 else "black"
            axes.text(column, row, f"{int(counts[row, column])}", ha="center", va="center", color=colour)
    figure.colorbar(image, ax=axes, label="% of the class", shrink=0.7)
    figure.savefig(path, dpi=120)
