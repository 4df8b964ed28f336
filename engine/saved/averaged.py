"""The mean of the probabilities that several models predict for the same images."""

from __future__ import annotations

from collections.abc import Sequence

from engine.saved.trained import Trained
from utils.errors import UserError


def check_same_classes(models: Sequence[Trained]) -> None:
    """Raise UserError unless all models have the same classes in the same order."""
    first, names = models[0], models[0].names()
    for other in models[1:]:
        both = f"{other.chosen.place} and {first.chosen.place}"
        advice = "Only models with the same classes in the same order can be averaged."
        if other.task.kind != first.task.kind:
            raise UserError(f"{both}: one has a single label per image, the other several. {advice}")
        own = other.names()
        if len(own) != len(names):
            raise UserError(f"{both} have {len(own)} and {len(names)} classes. {advice}")
        for label, (mine, theirs) in enumerate(zip(own, names, strict=True)):
            if mine != theirs:
                raise UserError(f"{both} have different classes: class {label} is {mine!r} and {theirs!r}. {advice}")
