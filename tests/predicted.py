"""Predictions for the validation images of a run, as tests compare them."""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset
from engine.trained.model import Trained, batches_of, guesses, name_of, picture_of, split_of_run


@dataclass
class Predictions:
    """One row per image, in the order of the data set."""

    logits: Tensor
    labels: Tensor
    indices: Tensor
    dataset: ImageDataset

    def __len__(self) -> int:
        return len(self.labels)

    def guesses(self, count: int = 1) -> Tensor:
        """Top `count` labels of each image, N x count."""
        return guesses(self.logits, count)

    def name(self, row: int) -> str:
        return name_of(self.dataset, int(self.indices[row]))

    def picture(self, row: int) -> Image.Image:
        return picture_of(self.dataset, int(self.indices[row]))


def validation_predictions(
    trained: Trained, dataset: ImageDataset | None = None, workers: int | None = None
) -> Predictions:
    """For a whole data set, by default the run's own validation split."""
    dataset = split_of_run(trained) if dataset is None else dataset
    rows = [tuple(one.cpu() for one in batch) for batch in batches_of(trained, dataset, workers)]
    logits, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
    return Predictions(logits, labels, indices, dataset)
