"""The split that evaluate.py evaluates, and how its labels correspond to the model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from datasets import ImageDataset, check_dataset, open_dataset
from datasets.labels import ANY_LABEL
from engine.evaluation.data import data_for_evaluation, title_of
from engine.trained.model import Trained
from utils.cli import CommandLine
from utils.errors import UserError, nearest
from utils.log import log
from utils.text import some_of


@dataclass(frozen=True)
class Part:
    """A split of a data set to evaluate, and how its labels correspond to the model's."""

    dataset: ImageDataset
    title: str
    model_labels: Tensor | None
    """Model label of each data-set label; None if they are equal."""
    classes: int
    """Number of the model's classes"""

    def labels(self, labels: Tensor) -> Tensor:
        """Convert labels of the data set to labels of the model, whose classes may be others or in another order.

        `labels`: one per image; or rows of zeros and ones (images x classes), if images have several labels.
        """
        if self.model_labels is None:  # the classes are the same
            return labels
        model_labels = self.model_labels.to(labels.device)  # data-set label -> model label
        if labels.ndim == 1:
            return model_labels[labels]
        # The rows of the data set may be longer than its classes: as long as the model's output.
        labels_of_dataset = labels[:, : len(model_labels)]
        rows = labels.new_zeros(len(labels), self.classes)
        rows[:, model_labels] = labels_of_dataset
        return rows


def open_part(trained: Trained, given: CommandLine) -> tuple[Part, list[str]]:
    """Open the split to evaluate, without augmentation, and return it with notes on how it was chosen.

    `given`: flags and settings of the command line.
    """
    config = trained.config
    device = trained.precision.device
    classes = int(config.MODEL.NUM_CLASSES)
    data, notes = data_for_evaluation(config, trained.chosen, given.keys)
    try:
        check_dataset(data, classes, train=False)
        dataset = open_dataset(data, False, classes, config.SEED, device)
    except UserError as error:
        # The data may have classes that the model does not have. Then `_model_labels` below raises a better error, with
        # the names of these classes, if both have names. So try to open the data with any labels; if that does not
        # help, the first error stays.
        try:
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, device)
        except UserError:
            raise error from None
        if dataset.classes is None or trained.chosen.classes is None:
            raise error from None
    title = title_of(data)
    if not len(dataset):
        raise UserError(f"{title}: the split has no images.")
    return Part(dataset, title, _model_labels(trained, dataset, title), classes), notes


def _model_labels(trained: Trained, dataset: ImageDataset, title: str) -> Tensor | None:
    """Return the model's label for each label of the data set, by matching the names of classes.

    Returns None, so that labels stay as they are, if model or data set has no names or if the names are equal.
    Raises UserError for classes that the model does not have, or several of whose classes have one name.
    `title`: of the split, for errors.
    """
    data_classes = dataset.classes
    model_classes = trained.chosen.classes
    if data_classes is None or model_classes is None or data_classes == model_classes:
        return None
    label_of = {name: label for label, name in enumerate(model_classes)}
    unknown = [name for name in data_classes if name not in label_of]
    if unknown:
        hint = nearest(unknown[0], model_classes)
        raise UserError(
            f"{title}: {len(unknown)} of its {len(data_classes)} classes are unknown to the model: "
            f"{some_of(unknown, 10)}.{hint} The model was trained on {some_of(model_classes, 10)}. Give data without "
            "the others, such as a folder of links to these classes."
        )
    repeated = [name for name, count in Counter(model_classes).items() if count > 1 and name in data_classes]
    if repeated:
        raise UserError(
            f"{title}: classes are matched by name, but the model has several classes named {some_of(repeated, 10)}. "
            "Use a data set with the classes of the training data, in the same order."
        )
    # With one label per image, `OneLabel.remarks` reports predictions of such classes.
    absent = [name for name in model_classes if name not in data_classes]
    if absent and trained.config.DATA.MULTI_LABEL:
        log.warning("%s has no class %s: predictions of it count as mistakes.", title, some_of(absent, 10))
    return torch.tensor([label_of[name] for name in data_classes])
