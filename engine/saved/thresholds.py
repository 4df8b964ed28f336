"""The probability from which on a model with several labels per image predicts each class."""

from __future__ import annotations

from engine.saved.trained import Trained
from engine.task.ranking import HALF, describe_untuned


def thresholds_of(trained: Trained) -> tuple[list[float], str]:
    """Threshold of each class, and their origin for the log."""
    found = trained.chosen.thresholds
    classes = int(trained.config.MODEL.NUM_CLASSES)
    if found is not None and len(found) == classes:
        words = "a class is predicted if its probability reaches its own threshold, found in the model's validation"
        least = trained.config.DATA.THRESHOLD_IMAGES
        untuned = [label for label, threshold in enumerate(found) if threshold == HALF]
        return list(found), "; ".join(filter(None, (words, describe_untuned(untuned, trained.names(), least))))
    words = f"a class is predicted if its probability reaches {HALF}, because these weights have no thresholds"
    return [HALF] * classes, words
