"""Data to evaluate a model on, with its labels mapped to the model's classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from datasets import ImageDataset, check_dataset, open_dataset
from datasets.images import Images
from datasets.labels import ANY_LABEL
from datasets.memory import ArraySamples, InMemory
from engine.saved.trained import Trained
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


def open_part(trained: Trained, train: bool) -> Part:
    """Open the validation split, or the training split without augmentation."""
    dataset = _open(trained, train)
    data = trained.config.DATA
    title = (
        f"{data.DATASET}{f' in {data.DATA_PATH}' if data.DATA_PATH else ''}, {'training' if train else 'validation'}"
    )
    if not len(dataset):
        raise UserError(f"{title}: the split has no images.")
    return Part(dataset, title, _to_models(trained, dataset, title), int(trained.config.MODEL.NUM_CLASSES))


def _open(trained: Trained, train: bool) -> ImageDataset:
    config, device = trained.config, trained.precision.device
    classes = config.MODEL.NUM_CLASSES
    try:
        check_dataset(config.DATA, classes, train=train)
        dataset = open_dataset(config.DATA, train, classes, config.SEED, device)
    except UserError as error:
        # If there are more classes than the model has, and they have names, the error below names them.
        try:
            dataset = open_dataset(config.DATA, train, ANY_LABEL, config.SEED, device)
        except UserError:
            raise error from None
        if dataset.classes is None or trained.classes is None:
            raise error from None
    return _without_augmentation(dataset, config.DATA, config.SEED, device) if train else dataset


def _without_augmentation(dataset: ImageDataset, data: DataConfig, seed: int, device: torch.device) -> ImageDataset:
    """The training split with the transform of validation."""
    if not isinstance(dataset, Images | InMemory):
        return dataset
    if isinstance(dataset.samples, ArraySamples):
        cropped = dataset.cropped if isinstance(dataset, InMemory) else True
        return InMemory(dataset.samples, data, False, seed, device, cropped)
    return Images(
        dataset.samples, data.model_copy(update={"EXCLUDE": None}), False, seed
    )  # excluded images are left out already


def _to_models(trained: Trained, dataset: ImageDataset, title: str) -> Tensor | None:
    """Match classes by name if both have names; otherwise labels stay as they are."""
    theirs, ours = dataset.classes, trained.classes
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
