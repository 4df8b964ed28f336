"""Losses for labels (TRAIN.LOSS), with their class weights. A teacher's loss is added in `engine/distill`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.labels import images_of_classes
from utils.config.train import TrainConfig
from utils.errors import UserError, nearest
from vitamp.files import read_regular_text
from vitamp.registry import own_named


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, as timm's `BinaryCrossEntropy` computes it.

    Labels are made one-hot. Smoothing mixes targets with 1 / `outcomes`. timm does that in its mixup; here the loss
    does it, with the same result. With one label, the outcomes are the classes; with several, each class has two, so
    that targets move towards 0.5, as timm's `smooth_dense` does.
    """

    positive_weights: Tensor | None

    def __init__(self, train: TrainConfig, outcomes: int, positive_weights: Tensor | None = None) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.smoothing, self.threshold = train.SMOOTHING, train.BCE_TARGET_THRESH
        self.register_buffer("positive_weights", positive_weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        targets = self._targets(logits, targets)
        total = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.positive_weights, reduction="sum")
        return total / logits.numel()

    def _targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            classes = torch.arange(logits.shape[-1], device=logits.device)
            targets = (targets.unsqueeze(1) == classes).to(logits.dtype)
        if self.smoothing:
            targets = targets * (1 - self.smoothing) + self.smoothing / self.outcomes
        return targets if self.threshold is None else (targets > self.threshold).to(targets.dtype)


class WeightedCrossEntropy(nn.Module):
    """Mean cross-entropy of a micro-batch, in which each image counts with the weight of its class.

    So the loss of an update is the sum of (class weight x loss) over all its images, divided by the sum of their class
    weights, however it is cut into micro-batches: `MicroBatch.weight` weighs those.

    For labels it is torch's. For mixed targets, one row of probabilities per image, torch divides by the number of
    images; this divides by the sum of the images' weights, each the mean of its classes' weights by their
    probabilities. So a target that is one class alone gives the same as its label.
    """

    weights: Tensor

    def __init__(self, weights: Tensor, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            return F.cross_entropy(logits, targets, self.weights, label_smoothing=self.smoothing)
        total = F.cross_entropy(logits, targets, self.weights, label_smoothing=self.smoothing, reduction="sum")
        # Not a matrix product, which autocast would compute in half precision.
        return total / (targets * self.weights).sum()


class OwnFunction(nn.Module):
    """A function (logits, targets) as a module."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.function(logits, targets)


class Loss(NamedTuple):
    """A loss that TRAIN.LOSS names."""

    build: Callable[[TrainConfig, int, Tensor | None], nn.Module]
    """(settings, outcomes as in `BinaryCrossEntropy`, float32 weights of the classes) -> (logits, targets) -> loss"""
    words: Callable[[TrainConfig], str]
    """For the banner of a run; '' for what is usual"""
    weighs: Literal["images", "positives", "nothing"]
    """What TRAIN.CLASS_WEIGHTS weigh"""


def _cross_entropy(train: TrainConfig, _outcomes: int, weights: Tensor | None) -> nn.Module:
    if weights is None:
        return nn.CrossEntropyLoss(label_smoothing=train.SMOOTHING)
    return WeightedCrossEntropy(weights, train.SMOOTHING)


def _describe_bce(train: TrainConfig) -> str:
    threshold = "" if train.BCE_TARGET_THRESH is None else f", targets above {train.BCE_TARGET_THRESH:g} count as 1"
    return f"loss bce, mean over classes{threshold}"


LOSSES = {
    "ce": Loss(_cross_entropy, lambda _train: "", "images"),
    "bce": Loss(BinaryCrossEntropy, _describe_bce, "positives"),
}


def loss_named(name: str) -> Loss:
    """One of ours, or of those that a file of USE registers."""
    if (row := LOSSES.get(name)) is not None:
        return row

    def build(_train: TrainConfig, _outcomes: int, _weights: Tensor | None) -> nn.Module:
        own = own_named("loss", name)
        assert own is not None  # checked with the settings
        made = own.made()
        return made if isinstance(made, nn.Module) else OwnFunction(made)

    return Loss(build, lambda _train: f"loss {name}, of your own", "nothing")


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
