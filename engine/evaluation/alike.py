"""Find images that look like others, as edited copies of them do, by a model's features.

How similar is too similar depends on the model and on the images. So some images are edited here, and the similarity of
the edited copies to them is the limit.
"""

import contextlib
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional

from datasets import ImageDataset, ValLoader, open_dataset
from datasets.examine.copies import QUICK_SECONDS
from engine.evaluation.features import Features, Seeing, columns_of, features_of
from engine.machine.device import Run
from models.parts import in_eval_mode
from utils.config.data import DataConfig
from utils.progress import Progress
from utils.seeding import generator_of
from vitamp.pooling import pool_of

EDITS = "mirrored, turned by 10 degrees, blurred, cropped by a tenth"
EDITED = 64
"""Images that are edited"""
AT_ONCE = 1024
"""Images that are compared with all others at once"""
MOST_VALUES = 1 << 28
"""Values in features of training images that are compared with others: they are held in memory"""


def edited(images: Tensor) -> list[Tensor]:
    """Make edited copies of images (B x C x H x W): one batch for each of EDITS."""
    height, width = images.shape[-2:]
    pixels = images.float()
    cropped = functional.center_crop(pixels, [height * 9 // 10, width * 9 // 10])
    copies = [
        pixels.flip(-1),
        functional.rotate(pixels, 10, functional.InterpolationMode.BILINEAR),
        functional.gaussian_blur(pixels, [9, 9], [min(height, width) / 112] * 2),
        functional.resize(cropped, [height, width]),
    ]
    return [copy.round().to(images.dtype) for copy in copies]


def directions(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Turn features into their directions from the mean; the product of two is how similar the images are."""
    from_mean = features - mean
    return from_mean / np.linalg.norm(from_mean, axis=1, keepdims=True).clip(1e-12)


def similarity_of_edited(seeing: Seeing, dataset: ImageDataset, mean: np.ndarray, batch: int) -> float:
    """Measure the median similarity of some images to their edited copies.

    `mean`: of the features by the model's usual pooling, from which directions are taken. `batch`: images per batch.
    """
    chosen = np.sort(generator_of("edited").permutation(len(dataset))[:EDITED])
    plan = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
    loader = ValLoader(dataset, batch, 0, 1, 0, seeing.precision.device, shard=lambda *_: plan)
    loading = contextlib.closing(loader)
    bar = Progress(loader, len(plan), "batches", "edited copies")

    def directions_of(images: Tensor) -> np.ndarray:
        columns = columns_of(seeing, images)[:, : len(mean)]
        return directions(columns.cpu().numpy(), mean)

    similarities = list[np.ndarray]()
    with torch.no_grad(), in_eval_mode(seeing.model), loading, bar:
        for images, _, indices in bar:
            readable = images[indices >= 0]
            originals = directions_of(readable)
            for copies in edited(readable):
                similarities.append((originals * directions_of(copies)).sum(1))
    return float(np.median(np.concatenate(similarities)))


class Nearest(NamedTuple):
    """For each image, how similar the images are that it is compared with."""

    place: np.ndarray
    """Index of the most similar one"""
    similar: np.ndarray
    """How similar that is"""
    alike: np.ndarray
    """How many are as similar as the limit"""
    farther: np.ndarray
    """Index of the most similar one below the limit"""

    def counted(self, labels: np.ndarray, labels_compared: np.ndarray) -> tuple[int, int, int, int, int]:
        """Count the images that look like others, and how many of them look like one of their own label.

        `labels`: of the images. `labels_compared`: of those they are compared with. Returns five numbers: images that
        are alike to any; all images; how many such an image is alike to (the median); and how many of them have the
        label of the most similar image, and that of the most similar one below the limit.
        """
        is_alike = self.alike > 0
        count = len(is_alike)
        own_labels = labels[:count]

        def with_label_of(places: np.ndarray) -> int:
            same = (own_labels == labels_compared[places]).reshape(count, -1).all(1)
            return int((is_alike & same).sum())

        alike_to_each = int(np.median(self.alike[is_alike])) if is_alike.any() else 0
        return int(is_alike.sum()), count, alike_to_each, with_label_of(self.place), with_label_of(self.farther)


def joined(blocks: Iterable[Nearest]) -> Nearest:
    return Nearest(*map(np.concatenate, zip(*blocks, strict=True)))


def nearest(images: np.ndarray, compared: np.ndarray, limit: float, seconds: float = float("inf")) -> Nearest:
    """Find the most similar of the images `compared` for each of `images`; both are given as directions.

    After so many seconds it stops: the result is of the first images alone. `limit`: see `Nearest.alike`.
    """
    end = time.monotonic() + seconds
    blocks = list[Nearest]()
    for first in range(0, len(images), AT_ONCE):
        similarities = images[first : first + AT_ONCE] @ compared.T
        place = similarities.argmax(1)
        similar = similarities.max(1)
        alike = similarities >= limit
        similarities[alike] = -2  # less than any
        blocks.append(Nearest(place, similar, alike=alike.sum(1), farther=similarities.argmax(1)))
        if time.monotonic() > end:
            break
    return joined(blocks)


def count_alike(
    seeing: Seeing, dataset: ImageDataset, features: Features, training: Features, pool: str, data: DataConfig
) -> list[int]:
    """Count the images of `dataset` that look like training images, as `Nearest.counted` gives it.

    `features`: those of `dataset`. Empty if there are too many training images to compare.
    """
    of_images = np.asarray(features.of(pool))
    of_training = np.asarray(training.of(pool))
    if of_training.size > MOST_VALUES:
        return []
    mean = of_training.mean(0)
    limit = similarity_of_edited(seeing, dataset, mean, data.val_batch)
    seconds = QUICK_SECONDS if data.CHECK == "quick" else float("inf")
    found = nearest(directions(of_images, mean), directions(of_training, mean), limit, seconds)
    return list(found.counted(features.labels, training.labels))


def alike_in_validation(run: Run, seeing: Seeing, training: Features) -> list[int]:
    """Count the validation images that look like training images, as `Nearest.counted` gives it.

    `training`: features of the training images. Empty if these are too many, and on other ranks than the first. A
    collective call.
    """
    pool = pool_of(seeing.model)
    if training.of(pool).size > MOST_VALUES:
        return []
    data = run.config.DATA.changed(PART="val")
    dataset = open_dataset(data, False, int(run.config.MODEL.NUM_CLASSES), run.config.SEED, run.device)
    features = features_of(seeing, run.config, dataset, data, run.world)
    if not run.world.first:
        return []
    return count_alike(seeing, dataset, features, training, pool, data)
