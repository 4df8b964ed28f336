"""What a trained model says of every image of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import PADDING
from engine.saved.trained import Trained
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE

FIRST = 5
"""Guesses that validation looks at."""
BATCH = 64
"""Where the run's own is not known."""


@dataclass
class Predictions:
    """One row an image, in the order of the data set."""

    logits: Tensor
    """float32, N x C"""
    labels: Tensor
    """int64, N"""
    indices: Tensor
    """int64, N: the image's number in the data set"""
    dataset: ImageDataset

    def __len__(self) -> int:
        return len(self.labels)

    def guesses(self, count: int = 1) -> Tensor:
        """N x count labels, the most likely first."""
        return guesses(self.logits, count)

    def name(self, row: int) -> str:
        """The file of an image, or its number where it is no file."""
        return name_of(self.dataset, int(self.indices[row]))

    def picture(self, row: int) -> Image.Image:
        """The image as the model saw it: cropped and resized, not normalised."""
        return picture_of(self.dataset, int(self.indices[row]))


def guesses(logits: Tensor, count: int = 1) -> Tensor:
    """The labels of the `count` highest logits, in order, chosen as validation chooses them.

    In half precision logits are often equal; argmax then takes another one than validation does.
    """
    classes = logits.shape[-1]
    first = logits.topk(min(FIRST, classes), dim=-1).indices
    if count <= FIRST:
        return first[:, :count]
    above = logits.amax(dim=-1, keepdim=True) + torch.arange(FIRST, 0, -1, device=logits.device)
    return logits.scatter(-1, first, above[:, : first.shape[1]]).topk(min(count, classes), dim=-1).indices


def validation_predictions(
    trained: Trained, dataset: ImageDataset | None = None, workers: int | None = None
) -> Predictions:
    """All of a part at once, as evaluating it would see it; by default of the run's own validation part."""
    dataset = validation_part(trained) if dataset is None else dataset
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for logits, labels, indices in batches_of(trained, dataset, workers):
        rows.append((logits.cpu(), labels.cpu(), indices.cpu()))
    logits, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
    return Predictions(logits, labels, indices, dataset)


def batches_of(
    trained: Trained, dataset: ImageDataset, workers: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and numbers of a batch at a time, on the device, in order. TrainingError at the end where an
    image could not be read."""
    number = workers if workers is not None else trained.config.DATA.NUM_WORKERS
    number = auto_workers(1) if number is None else number
    loader = ValLoader(dataset, batch_size(trained), 0, 1, number, trained.precision.device)
    try:
        for batch in loader:
            real = batch.indices != PADDING
            yield trained.logits(batch.images)[real], batch.labels[real], batch.indices[real]
        loader.broken.raise_together(ALONE)
    finally:
        loader.close()


def validation_part(trained: Trained) -> ImageDataset:
    config = trained.config
    return open_dataset(config.DATA, False, config.MODEL.NUM_CLASSES, config.SEED, trained.precision.device)


def batch_size(trained: Trained) -> int:
    """Images at a time, as the run validates."""
    data = trained.config.DATA
    given = data.BATCH_SIZE_EVAL or data.BATCH_SIZE
    return BATCH if given == AUTO else int(given)


def name_of(dataset: ImageDataset, index: int) -> str:
    samples = dataset.single_images()
    return samples.name(index) if samples is not None else str(index)


def picture_of(dataset: ImageDataset, index: int) -> Image.Image:
    pixels = dataset.__getitems__([(0, index)]).images[0].cpu().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
