"""TRAIN.CLASS_WEIGHTS: what each class counts for in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datasets.labels import images_of_classes
from engine.task.losses import loss_named
from utils.config.train import TrainConfig
from utils.errors import UserError, nearest
from vitamp.files import read_regular_text

BALANCED = "balanced"
KEY = "TRAIN.CLASS_WEIGHTS"
SMALLEST, LARGEST = 1e-12, 1e12
"""Sums of weighted losses over a batch stay within fp32's range."""


def class_weights(
    train: TrainConfig, classes: int, labels: np.ndarray | None, names: Sequence[str] | None, source: str
) -> np.ndarray | None:
    """Weight of each output of the classifier, float64; None without TRAIN.CLASS_WEIGHTS.

    `labels` and `names` are those of the training split; `source`: DATA.DATASET.
    """
    if train.CLASS_WEIGHTS is None or loss_named(train.LOSS).weighs == "nothing":
        return None
    if labels is None:
        raise UserError(
            f"{KEY}: the data set {source} is read as a stream, so the labels of its images are not known when an "
            f"epoch begins. Use {KEY}=null."
        )
    if train.CLASS_WEIGHTS == BALANCED:
        counts = images_of_classes(labels, classes)
        # Classes without images get 1: label smoothing alone ever asks for their weight.
        return np.where(counts > 0, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
    names = [str(name) for name in (range(classes) if names is None else names)]
    return _matched(read_weights(train.CLASS_WEIGHTS), names, classes, train.CLASS_WEIGHTS)


def check_class_weights(train: TrainConfig) -> None:
    """Raise UserError if the file of TRAIN.CLASS_WEIGHTS cannot be read."""
    if train.CLASS_WEIGHTS not in (None, BALANCED):
        read_weights(str(train.CLASS_WEIGHTS))


def read_weights(file: str) -> dict[str, float]:
    """Weights by class from lines NAME WEIGHT; a line that begins with # is a comment."""
    try:
        lines = read_regular_text(Path(file).expanduser(), "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"{KEY}: the file {file} {why}. Give null, {BALANCED}, or a file with a line NAME WEIGHT for each class."
        ) from None
    weights: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, text = line.strip().replace("\t", " ").rpartition(" ")
        name, weight = name.strip(), _number(text)
        if not name or not 0 < weight < math.inf:
            raise UserError(f"{file}:{number}: {line.strip()!r} is not a class and a weight above 0, as in: cat 2.5")
        if not SMALLEST <= weight <= LARGEST:
            raise UserError(
                f"{file}:{number}: the weight {weight:g} of class {name} is not between {SMALLEST:g} and {LARGEST:g}: "
                "the training loss would overflow in fp32. Give weights around 1."
            )
        if name in weights:
            raise UserError(f"{file}:{number}: the class {name} has a weight already; give each class one line.")
        weights[name] = weight
    return weights


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _matched(weights: dict[str, float], names: list[str], classes: int, file: str) -> np.ndarray:
    """Weights in the order of the labels. Outputs of the classifier beyond the classes get 1."""
    for name in weights:
        if name not in names:
            raise UserError(f"{file}: the data set has no class {name!r}.{nearest(name, names)}")
    if missing := [name for name in names if name not in weights]:
        raise UserError(
            f"{file}: {len(missing)} of {len(names)} classes have no weight (the first: {missing[0]}). Give each class "
            "a line NAME WEIGHT."
        )
    return np.array([weights[name] for name in names] + [1.0] * (classes - len(names)))


def describe_class_weights(train: TrainConfig, weights: np.ndarray) -> str:
    """For the banner of a run."""
    where = "on positives only, " if loss_named(train.LOSS).weighs == "positives" else ""
    weighed = f"class weights {train.CLASS_WEIGHTS}: {weights.min():.3g} to {weights.max():.3g}"
    return f"{weighed}, {where}in the training loss only"
