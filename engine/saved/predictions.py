"""Predictions of a trained model for the images of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import PADDING
from engine.saved.trained import Trained
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE
from utils.errors import UserError

VALIDATED = 5
"""Highest logits that validation looks at."""
BATCH = 64
"""Batch size if the run's own is unknown."""


@dataclass
class Predictions:
    """One row per image, in the order of the data set."""

    logits: Tensor
    """float32, N x C"""
    labels: Tensor
    """int64, N"""
    indices: Tensor
    """int64, N: index of the image in the data set"""
    dataset: ImageDataset

    def __len__(self) -> int:
        return len(self.labels)

    def guesses(self, count: int = 1) -> Tensor:
        """Top `count` labels of each image, N x count."""
        return guesses(self.logits, count)

    def name(self, row: int) -> str:
        """File of an image, or its index if it is not a file."""
        return name_of(self.dataset, int(self.indices[row]))

    def picture(self, row: int) -> Image.Image:
        """The image as the model saw it: cropped and resized, not normalised."""
        return picture_of(self.dataset, int(self.indices[row]))


def guesses(logits: Tensor, count: int = 1) -> Tensor:
    """Labels of the `count` highest logits, in order, with ties broken as in validation.

    In half precision logits are often equal, and argmax then takes another one than validation does.
    """
    classes = logits.shape[-1]
    first = logits.topk(min(VALIDATED, classes), dim=-1).indices
    if count <= VALIDATED:
        return first[:, :count]
    above = logits.amax(dim=-1, keepdim=True) + torch.arange(VALIDATED, 0, -1, device=logits.device)
    return logits.scatter(-1, first, above[:, : first.shape[1]]).topk(min(count, classes), dim=-1).indices


def validation_predictions(
    trained: Trained, dataset: ImageDataset | None = None, workers: int | None = None
) -> Predictions:
    """Predictions for a whole data set, by default the run's own validation split."""
    dataset = split_of_run(trained) if dataset is None else dataset
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for logits, labels, indices in batches_of(trained, dataset, workers):
        rows.append((logits.cpu(), labels.cpu(), indices.cpu()))
    logits, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
    return Predictions(logits, labels, indices, dataset)


def batches_of(
    trained: Trained,
    dataset: ImageDataset,
    workers: int | None = None,
    compute: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and indices, one batch at a time, on the device, in order.

    `compute`: gives something else than logits for uint8 images. Raises TrainingError at the end if an image could not
    be read.
    """
    number = workers if workers is not None else trained.config.DATA.NUM_WORKERS
    number = auto_workers() if number is None else number
    compute = compute or trained.logits
    loader = ValLoader(dataset, batch_size(trained), 0, 1, number, trained.precision.device)
    try:
        for batch in loader:
            real = batch.indices != PADDING
            yield compute(batch.images)[real], batch.labels[real], batch.indices[real]
        loader.broken.raise_together(ALONE)
        loader.transparent.log_once(ALONE)
    finally:
        loader.close()


def split_of_run(trained: Trained, part: str = "val") -> ImageDataset:
    """A split of the data of the model's run, by DATA.PART, without augmentation."""
    config = trained.config
    data = config.DATA.model_copy(update={"PART": part})
    return open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, trained.precision.device)


def batch_size(trained: Trained) -> int:
    """Batch size with which the run validates."""
    data = trained.config.DATA
    given = data.BATCH_SIZE_EVAL or data.BATCH_SIZE
    return BATCH if given == AUTO else int(given)


def name_of(dataset: ImageDataset, index: int) -> str:
    samples = dataset.single_images()
    return samples.name(index) if samples is not None else str(index)


def names_of(datasets: Sequence[ImageDataset], where: str) -> list[str]:
    """Names of the images, which are the same in each data set. UserError, beginning with `where`, if they are not."""
    names = [[name_of(dataset, index) for index in range(len(dataset))] for dataset in datasets]
    if any(other != names[0] for other in names[1:]):
        raise UserError(f"{where}: the runs have different images, so their probabilities cannot be averaged.")
    return names[0]


def picture_of(dataset: ImageDataset, index: int) -> Image.Image:
    pixels = dataset.__getitems__([(0, index)]).images[0].cpu().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
