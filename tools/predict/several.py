"""Predictions of a model with several labels per image: the classes whose probability reaches their threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from engine.task.ranking import HALF
from tools.predict.show import Guess


class LikelyClasses:
    """The most probable first, at most `topk`. `threshold`: of all classes; None: their own.

    `averaged`: of several models, whose mean has no thresholds of its own.
    """

    def __init__(self, trained: Trained, topk: int | None, threshold: float | None, averaged: bool) -> None:
        classes = int(trained.config.MODEL.NUM_CLASSES)
        self.most, self._trained = topk or classes, trained
        limits, words = thresholds_of(trained)
        threshold = HALF if averaged and threshold is None else threshold
        if threshold is not None:
            limits, words = [threshold] * classes, f"a class is predicted if its probability reaches {threshold:g}"
        self._limits, self.words = torch.tensor(limits, dtype=torch.float64), words

    def __call__(self, logits: Tensor) -> list[list[Guess]]:
        # In fp64, in which validation compares them too.
        probabilities = logits.cpu().double().sigmoid()
        return [self._guesses(row) for row in probabilities]

    def _guesses(self, probabilities: Tensor) -> list[Guess]:
        chosen = torch.nonzero(probabilities >= self._limits)[:, 0]
        order = chosen[probabilities[chosen].argsort(descending=True, stable=True)]
        return [
            Guess(label, self._trained.name_of(label), float(probabilities[label]))
            for label in order[: self.most].tolist()
        ]
