"""The training loss for labels (TRAIN.LOSS). A teacher's loss is added to it in `engine/distill`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.config.train import TrainConfig


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, as timm's `BinaryCrossEntropy` computes it.

    Labels are made one-hot. Smoothing mixes targets with 1 / classes. timm does that in its mixup; here the loss does
    it, with the same result. Several labels per sample are moved towards 0.5 instead, as timm's `smooth_dense` does.
    """

    positive_weights: Tensor | None

    def __init__(self, train: TrainConfig, multi_label: bool, positive_weights: Tensor | None = None) -> None:
        super().__init__()
        self.multi_label = multi_label
        self.smoothing, self.threshold, self.sums = train.SMOOTHING, train.BCE_TARGET_THRESH, train.BCE_SUM
        self.register_buffer("positive_weights", positive_weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.binary_cross_entropy_with_logits(
            logits, self._targets(logits, targets), pos_weight=self.positive_weights, reduction="sum"
        )
        return total / (len(logits) if self.sums else logits.numel())

    def _targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[-1]
        if not targets.is_floating_point():
            targets = (targets.unsqueeze(1) == torch.arange(classes, device=logits.device)).to(logits.dtype)
        if self.smoothing:
            targets = targets * (1 - self.smoothing) + self.smoothing / (2 if self.multi_label else classes)
        return targets if self.threshold is None else (targets > self.threshold).to(targets.dtype)


def label_loss(train: TrainConfig, weights: np.ndarray | None, multi_label: bool = False) -> nn.Module:
    """The loss for labels and for mixed targets. `weights`: of the classes; None: all are equal."""
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    if train.LOSS == "bce":
        return BinaryCrossEntropy(train, multi_label, tensor)
    if tensor is None:
        return nn.CrossEntropyLoss(label_smoothing=train.SMOOTHING)
    from engine.optim.class_weights import WeightedCrossEntropy

    return WeightedCrossEntropy(tensor, train.SMOOTHING)


def describe_loss(train: TrainConfig) -> str:
    """For the banner of a run; '' for cross-entropy."""
    if train.LOSS == "ce":
        return ""
    threshold = "" if train.BCE_TARGET_THRESH is None else f", targets above {train.BCE_TARGET_THRESH:g} count as 1"
    return f"loss bce, {'summed' if train.BCE_SUM else 'mean'} over classes{threshold}"
