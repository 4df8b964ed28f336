"""The confusion matrix of evaluate.py, as CSV or PNG."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from tools.common.evaluation import OneLabel
from tools.common.tables import shown
from vitamp.metrics import TOP1

NAMES_IN_PICTURE, NUMBERS_IN_PICTURE = 60, 20


def write_table(path: Path, found: OneLabel, names: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("actual / predicted", *names))
        for name, row in zip(names, found.confusion(range(len(names))).tolist(), strict=True):
            writer.writerow((name, *row))


def write_picture(path: Path, found: OneLabel, names: list[str]) -> None:
    """Colours are percent of the true class, so that rare classes are visible too."""
    from matplotlib.figure import Figure

    counts = found.confusion(range(len(names)))
    shares = 100 * counts / np.maximum(found.support, 1)[:, None]
    side = min(16.0, max(5.0, 0.35 * len(names) + 2))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    top1 = f"{TOP1.words} {TOP1.number(found.values[TOP1])}"
    axes.set(xlabel="predicted", ylabel="actual", title=f"{found.images} images, {top1}")
    if len(names) <= NAMES_IN_PICTURE:
        places, labels = range(len(names)), [shown(name)[:30] for name in names]
        axes.set_xticks(places, labels, rotation=90, parse_math=False)
        axes.set_yticks(places, labels, parse_math=False)
    if len(names) <= NUMBERS_IN_PICTURE:
        for row, column in np.argwhere(counts).tolist():
            colour = "white" if shares[row, column] > 50 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour)
    figure.colorbar(image, ax=axes, label="% of the class", shrink=0.7)
    figure.savefig(path, dpi=120)
