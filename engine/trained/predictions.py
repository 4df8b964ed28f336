"""Predictions of a trained model for the images of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import PADDING
from engine.trained.model import Trained
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE
from utils.errors import UserError

VALIDATED = 5
"""Highest logits that validation looks at."""
BATCH = 64
"""Batch size if the run's own is unknown."""


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
