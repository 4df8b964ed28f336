"""Predictions of a model with one label per image: the most probable classes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.saved.predictions import guesses
from engine.saved.trained import Trained
from tools.predict.show import Guess
from utils.errors import UserError

TOP = 5
"""Classes per image without -topk"""


class BestClasses:
    words = ""

    def __init__(self, trained: Trained, topk: int | None, threshold: float | None, _averaged: bool) -> None:
        if threshold is not None:
            raise UserError(f"-threshold {threshold:g}: this model has one label per image, so it needs no threshold.")
        self.most, self._trained = topk or TOP, trained

    def __call__(self, logits: Tensor) -> list[list[Guess]]:
        labels = guesses(logits, self.most)
        probabilities = torch.softmax(logits, dim=-1).gather(-1, labels)
        return [
            [Guess(label, self._trained.name_of(label), value) for label, value in zip(*of_image, strict=True)]
            for of_image in zip(labels.tolist(), probabilities.tolist(), strict=True)
        ]
