"""Losses for labels (TRAIN.LOSS). A teacher's loss is added in `engine/distill`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor, nn

from utils.config.train import TrainConfig
from vitamp.registry import own_named


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
    from engine.task.other_losses import WeightedCrossEntropy

    return WeightedCrossEntropy(weights, train.SMOOTHING)


def _bce(train: TrainConfig, outcomes: int, weights: Tensor | None) -> nn.Module:
    from engine.task.other_losses import BinaryCrossEntropy

    return BinaryCrossEntropy(train, outcomes, weights)


def _describe_bce(train: TrainConfig) -> str:
    threshold = "" if train.BCE_TARGET_THRESH is None else f", targets above {train.BCE_TARGET_THRESH:g} count as 1"
    return f"loss bce, mean over classes{threshold}"


LOSSES = {
    "ce": Loss(_cross_entropy, lambda _train: "", "images"),
    "bce": Loss(_bce, _describe_bce, "positives"),
}


def loss_named(name: str) -> Loss:
    """One of ours, or of those that a file of USE registers."""
    if (row := LOSSES.get(name)) is not None:
        return row

    def build(_train: TrainConfig, _outcomes: int, _weights: Tensor | None) -> nn.Module:
        own = own_named("loss", name)
        assert own is not None  # checked with the settings
        made = own.made()
        from engine.task.other_losses import OwnFunction

        return made if isinstance(made, nn.Module) else OwnFunction(made)

    return Loss(build, lambda _train: f"loss {name}, of your own", "nothing")
