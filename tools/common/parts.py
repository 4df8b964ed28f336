"""Data to evaluate a model on, with its labels mapped to the model's classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from datasets import ImageDataset, check_dataset, open_dataset
from datasets.labels import ANY_LABEL
from engine.evaluated_data import data_for_evaluation, images_of_all, title_of
from engine.trained.model import Trained
from tools.common.evaluation import with_bar
from utils.config.data import DataConfig
from utils.errors import UserError, nearest

MOST_NAMED = 10


@dataclass(frozen=True)
class Part:
    """A split of a data set."""

    dataset: ImageDataset
    title: str
    to_models: Tensor | None
    """Model label of each data-set label; None if they are equal."""
    classes: int = 0
    """Number of the model's classes"""
    counted: str = ""
    """Its number of images, of how many, for the log"""

    def labels(self, labels: Tensor) -> Tensor:
        """The model's labels for those of the data set: one per image, or rows of zeros and ones."""
        if self.to_models is None:
            return labels
        places = self.to_models.to(labels.device)
        if labels.ndim == 1:
            return places[labels]
        rows = labels.new_zeros(len(labels), self.classes)
        rows[:, places] = labels[:, : len(places)]
        return rows


def open_part(trained: Trained, given: Collection[str]) -> tuple[Part, list[str]]:
    """Open the split to evaluate, without augmentation, and give notes on its choice.

    `given`: the settings on the command line.
    """
    config = trained.config
    data, notes = data_for_evaluation(config, trained.chosen, given)
    dataset = _open(trained, data)
    title = title_of(data)
    if not len(dataset):
        raise UserError(f"{title}: the split has no images.")
    classes = int(config.MODEL.NUM_CLASSES)
    to_models = _to_models(trained, dataset, title)
    return Part(dataset, title, to_models, classes, images_of_all(config, data, len(dataset))), notes


def outputs_of(trained: Trained, part: Part) -> tuple[Tensor, Tensor]:
    """Logits and labels of all images, on the host."""
    rows = [(logits.cpu(), part.labels(labels).cpu()) for logits, labels, _ in with_bar(trained, part.dataset)]
    logits, labels = (torch.cat(column) for column in zip(*rows, strict=True))
    return logits, labels


def _open(trained: Trained, data: DataConfig) -> ImageDataset:
    config, device = trained.config, trained.precision.device
    classes = config.MODEL.NUM_CLASSES
    try:
        check_dataset(data, classes, train=False)
        return open_dataset(data, False, classes, config.SEED, device)
    except UserError as error:
        # If there are more classes than the model has, and they have names, the error below names them.
        try:
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, device)
        except UserError:
            raise error from None
        if dataset.classes is None or trained.chosen.classes is None:
            raise error from None
        return dataset


def _to_models(trained: Trained, dataset: ImageDataset, title: str) -> Tensor | None:
    """Match classes by name if both have names; otherwise labels stay as they are."""
    theirs, ours = dataset.classes, trained.chosen.classes
    if theirs is None or ours is None or theirs == ours:
        return None
    places = {name: label for label, name in enumerate(ours)}
    if unknown := [name for name in theirs if name not in places]:
        more = f", and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        raise UserError(
            f"{title}: {len(unknown)} of its {len(theirs)} classes are unknown to the model: "
            f"{', '.join(unknown[:MOST_NAMED])}{more}.{nearest(unknown[0], ours)} The model was trained on "
            f"{', '.join(ours[:MOST_NAMED])}{', ...' if len(ours) > MOST_NAMED else ''}."
        )
    twice = [name for name, times in Counter(ours).items() if times > 1 and name in theirs]
    if twice:
        raise UserError(
            f"{title}: classes are matched by name, but the model has several classes named "
            f"{', '.join(twice[:MOST_NAMED])}. Use a data set with the classes of the training data, in the same order."
        )
    return torch.tensor([places[name] for name in theirs])
