"""How users of an exported file read its logits, by the task of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from utils.record.tasks import ONE_LABEL, SEVERAL_LABELS


class OneLabel:
    no_hub = ""
    """Why the Hub cannot have the model; '' if it can"""

    def metadata(self, _trained: Trained) -> dict[str, Any]:
        """What the file says besides; nothing, since a softmax is what everyone expects."""
        return {}

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def clearly_other(self, _trained: Trained, expected: Tensor, found: Tensor, clear: float) -> Tensor:
        """Rows of probabilities whose prediction differs, although it is not within `clear` of another."""
        first, second = expected.topk(2, dim=1).values.unbind(1)
        return (expected.argmax(1) != found.argmax(1)) & (first - second > clear)

    def agreement(
        self, trained: Trained, names: Sequence[str], expected: Tensor, logits: Tensor, _are_logits: bool = True
    ) -> str:
        """Whether the file predicts what the model does for the images of these names."""
        same = expected.argmax(1) == logits.argmax(1)
        if bool(same.all()):
            return "top-1 the same on all"
        row = int(torch.nonzero(~same)[0])
        by_model, by_file = (trained.name_of(int(output[row].argmax())) for output in (expected, logits))
        return (
            f"top-1 different on {int((~same).sum())}, where two classes are nearly equal: {names[row]} is {by_model} "
            f"to the model, {by_file} to the exported file"
        )


class SeveralLabels:
    no_hub = (
        "this model has several labels per image, but the Hub and timm's example code apply a softmax, which fits only "
        "one label; use safetensors, whose header names the sigmoid"
    )

    def metadata(self, trained: Trained) -> dict[str, Any]:
        return {"multi_label": True, "activation": "sigmoid", "class_thresholds": thresholds_of(trained)[0]}

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def clearly_other(self, trained: Trained, expected: Tensor, found: Tensor, clear: float) -> Tensor:
        thresholds = self._thresholds(trained)
        other = (expected >= thresholds) != (found >= thresholds)
        return (other & ((expected - thresholds).abs() > clear)).any(1)

    def agreement(
        self, trained: Trained, _names: Sequence[str], expected: Tensor, logits: Tensor, are_logits: bool = True
    ) -> str:
        thresholds, both = self._thresholds(trained), (expected.double(), logits.double())
        by_model, by_file = ((output.sigmoid() if are_logits else output) >= thresholds for output in both)
        other = int((by_model != by_file).any(1).sum())
        advice = "; apply a sigmoid to the logits" if are_logits else ""
        return f"labels {f'different on {other}' if other else 'the same on all'}{advice}"

    def _thresholds(self, trained: Trained) -> Tensor:
        return torch.tensor(thresholds_of(trained)[0], dtype=torch.float64)


def outputs_of(trained: Trained) -> OneLabel | SeveralLabels:
    return {ONE_LABEL: OneLabel, SEVERAL_LABELS: SeveralLabels}[trained.task.kind]()
