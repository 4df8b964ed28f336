"""Losses for labels (TRAIN.LOSS) and class weights (TRAIN.CLASS_WEIGHTS). `engine/distill` adds a teacher's loss."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.labels import images_of_classes
from utils.config.train import TrainConfig
from utils.errors import UserError
from vitamp.registry import own_named

BALANCED = "balanced"
KEY = "TRAIN.CLASS_WEIGHTS"


def class_weights(classes: int, labels: np.ndarray) -> np.ndarray:
    """Return a weight for each class, float64, so that all classes weigh alike. `labels`: of the training split.

    The weight is: images / (classes with images x images of the class), which is 1 if classes are equally frequent.
    """
    counts = images_of_classes(labels, classes)
    has_images = counts > 0
    weights = counts.sum() / (has_images.sum() * np.maximum(counts, 1))
    # Classes without images get 1. Their weight matters only with label smoothing, which gives them a probability.
    return np.where(has_images, weights, 1.0)


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, as timm's `BinaryCrossEntropy` computes it.

    Labels are made one-hot. Label smoothing mixes targets with 1 / `outcomes`. timm does that in its mixup; here the
    loss does it, with the same result. With one label per image, the outcomes are the classes. With several, each class
    has two (present or not), so that targets move towards 0.5, as timm's `smooth_dense` does.
    """

    positive_weights: Tensor | None

    def __init__(self, train: TrainConfig, outcomes: int, positive_weights: Tensor | None = None) -> None:
        """`outcomes`: number of classes with one label per image, 2 with several labels. `positive_weights`: by class.

        UserError for a BCE_TARGET_THRESH that all smoothed targets exceed, or none.
        """
        super().__init__()
        self.outcomes = outcomes
        self.smoothing = train.SMOOTHING
        self.threshold = train.BCE_TARGET_THRESH
        self.register_buffer("positive_weights", positive_weights)
        lowest = self.smoothing / outcomes  # smoothed target of a class that an image does not have
        highest = 1 - self.smoothing + lowest  # of a class that it has
        if self.threshold is not None and not lowest <= self.threshold < highest:
            raise UserError(
                f"TRAIN.BCE_TARGET_THRESH {self.threshold:g}: with TRAIN.SMOOTHING {self.smoothing:g}, targets are "
                f"{lowest:.2g} and {highest:.2g}, so all would count alike. Set TRAIN.SMOOTHING=0."
            )

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            classes = torch.arange(logits.shape[-1], device=logits.device)
            targets = (targets.unsqueeze(1) == classes).to(logits.dtype)
        if self.smoothing:
            targets = targets * (1 - self.smoothing) + self.smoothing / self.outcomes
        if self.threshold is not None:
            targets = (targets > self.threshold).to(targets.dtype)
        total = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.positive_weights, reduction="sum")
        return total / logits.numel()


class WeightedCrossEntropy(nn.Module):
    """Mean cross-entropy of a micro-batch, in which each image counts with the weight of its class.

    So the loss of an update is the sum of (class weight x loss) over all its images, divided by the sum of their class
    weights, however the update is cut into micro-batches: those are weighted by `MicroBatch.weight`.

    For labels, this is torch's loss. For mixed targets (one row of probabilities per image), torch divides by the
    number of images. This loss divides by the sum of the images' weights, where the weight of an image is the mean of
    its classes' weights, weighted by their probabilities. So a target of probability 1 gives the same as its label.
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


Criterion = Callable[[Tensor, Tensor], Tensor]  # a module, or a function of the user's own


class Loss(NamedTuple):
    """A loss that TRAIN.LOSS names."""

    build: Callable[[TrainConfig, int, Tensor | None], Criterion]
    """(settings, outcomes as in `BinaryCrossEntropy`, float32 weights of the classes) -> (logits, targets) -> loss"""
    words: Callable[[TrainConfig], str]
    """Describes the loss for the banner; '' for the usual one"""
    weighs: Literal["images", "positives", "nothing"]
    """What TRAIN.CLASS_WEIGHTS weigh: images of a class, its positive targets, or nothing (a loss of the user's own)"""


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


def check_class_weights(train: TrainConfig) -> None:
    """Raise UserError for a value of TRAIN.CLASS_WEIGHTS that does not exist, or that the mixing does not allow."""
    if train.CLASS_WEIGHTS not in (None, BALANCED):  # earlier versions took files
        raise UserError(f"{KEY}: expected {BALANCED} or null, got {train.CLASS_WEIGHTS!r}")
    mixes_one_by_one = train.mixes and train.MIXUP_MODE == "elem"
    if train.CLASS_WEIGHTS and mixes_one_by_one and loss_named(train.LOSS).weighs == "images":
        raise UserError(f"TRAIN.MIXUP_MODE elem: with {KEY}, images must be mixed in pairs; use pair or batch.")


def loss_named(name: str) -> Loss:
    """Return the loss that TRAIN.LOSS names: one of LOSSES, or one of the user's own, which a file of USE registers."""
    if name in LOSSES:
        return LOSSES[name]

    def build(_train: TrainConfig, _outcomes: int, _weights: Tensor | None) -> Criterion:
        own_loss = own_named("loss", name)
        assert own_loss is not None  # checked with the settings
        return own_loss.made()

    return Loss(build, lambda _train: f"loss {name}, of your own", weighs="nothing")
