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
BLUR_PER_SIDE = 1 / 112
"""Standard deviation of the blur as a fraction of the shorter side: 2 pixels for a side of 224"""
AT_ONCE = 1024
"""Images that are compared with all others at once"""
MOST_VALUES = 1 << 28
"""Values in features of training images that are compared with others: they are held in memory"""


def edited(images: Tensor) -> list[Tensor]:
    """Make edited copies of images (B x C x H x W): one batch for each of EDITS."""
    height, width = images.shape[-2:]
    blur = min(height, width) * BLUR_PER_SIDE
    pixels = images.float()
    cropped = functional.center_crop(pixels, [height * 9 // 10, width * 9 // 10])
    copies = [
        pixels.flip(-1),
        functional.rotate(pixels, 10, functional.InterpolationMode.BILINEAR),
        functional.gaussian_blur(pixels, kernel_size=[9, 9], sigma=[blur, blur]),
        functional.resize(cropped, [height, width]),
    ]
    if images.is_floating_point():
        return copies
    return [copy.round().to(images.dtype) for copy in copies]


def directions(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Turn features into unit vectors from the mean; the product of two vectors is how similar the images are."""
    from_mean = features - mean
    return from_mean / np.linalg.norm(from_mean, axis=1, keepdims=True).clip(1e-12)


def similarity_of_edited(seeing: Seeing, dataset: ImageDataset, mean: np.ndarray, batch: int) -> float:
    """Measure the median similarity of some images to their edited copies: the limit from which images look alike.

    `mean`: mean of the features of all images, by the model's usual pooling. `batch`: images per batch.
    """
    chosen = np.sort(generator_of("edited").permutation(len(dataset))[:EDITED])
    plan = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
    device = seeing.precision.device
    loader = ValLoader(dataset, batch, rank=0, world=1, workers=0, device=device, shard=lambda *_: plan)
    loading = contextlib.closing(loader)
    bar = Progress(loader, len(plan), "batches", "edited copies")

    def directions_of(images: Tensor) -> np.ndarray:
        # The usual pooling has the first columns; those of other poolings follow.
        usual_pooling = columns_of(seeing, images)[:, : len(mean)]
        return directions(usual_pooling.cpu().numpy(), mean)

    similarities = list[np.ndarray]()
    with torch.no_grad(), in_eval_mode(seeing.model), loading, bar:
        for images, _, indices in bar:
            readable = images[indices >= 0]  # a broken image has the index -1
            originals = directions_of(readable)
            for copies in edited(readable):  # all images with one edit
                similarities.append((originals * directions_of(copies)).sum(1))
    return float(np.median(np.concatenate(similarities)))


class Nearest(NamedTuple):
    """For each of some images, which of the compared images are most similar to it."""

    place: np.ndarray
    """Index of the most similar compared image"""
    similar: np.ndarray
    """Similarity of that image"""
    number_alike: np.ndarray
    """Number of compared images that are at least as similar as the limit: they look alike"""
    most_similar_below_limit: np.ndarray
    """Index of the most similar compared image that does not look alike"""

    def indices_alike(self) -> list[int]:
        """Return the indices of the images that look like a compared image."""
        return np.flatnonzero(self.number_alike).tolist()

    def counted(self, labels: np.ndarray, labels_compared: np.ndarray) -> tuple[int, int, int, int, int]:
        """Count the images that look like a compared image, and how many of those have the same label as it.

        `labels`: labels of the images, perhaps of further ones at the end, for which there was no time.
        `labels_compared`: labels of the compared images.

        Returns five numbers. An image is "alike" if it looks like any compared image.

        - the number of alike images
        - the number of all images
        - the number of compared images that an alike image looks like (the median)
        - the number of alike images with the same label as their most similar compared image
        - the number of alike images with the same label as the most similar compared image below the limit
        """
        is_alike = self.number_alike > 0
        count = len(is_alike)
        own_labels = labels[:count]

        def count_same_label(compared: np.ndarray) -> int:
            """Count alike images whose labels are all the same as those of the compared image with the given index."""
            same = (own_labels == labels_compared[compared]).reshape(count, -1).all(1)
            return int((is_alike & same).sum())

        median_alike = int(np.median(self.number_alike[is_alike])) if is_alike.any() else 0
        same_as_nearest = count_same_label(self.place)
        same_as_below_limit = count_same_label(self.most_similar_below_limit)
        return int(is_alike.sum()), count, median_alike, same_as_nearest, same_as_below_limit


def joined(blocks: Iterable[Nearest]) -> Nearest:
    return Nearest(*map(np.concatenate, zip(*blocks, strict=True)))


def nearest(images: np.ndarray, compared: np.ndarray, limit: float, seconds: float = float("inf")) -> Nearest:
    """Find, for each of `images`, the most similar of the images `compared`. Both are unit vectors (`directions`).

    `limit`: similarity from which two images look alike. `seconds`: it stops after so many, and then returns the
    result for the first images alone.
    """
    end = time.monotonic() + seconds
    blocks = list[Nearest]()
    for first in range(0, len(images), AT_ONCE):
        similarities = images[first : first + AT_ONCE] @ compared.T
        most_similar = similarities.argmax(1)
        highest = similarities.max(1)
        looks_alike = similarities >= limit
        # Then the maximum is below the limit. A similarity is at least -1, so -2 is less than any.
        similarities[looks_alike] = -2
        below_limit = similarities.argmax(1)
        block = Nearest(most_similar, highest, number_alike=looks_alike.sum(1), most_similar_below_limit=below_limit)
        blocks.append(block)
        if time.monotonic() > end:
            break
    return joined(blocks)


def count_alike(
    seeing: Seeing, dataset: ImageDataset, features: Features, training: Features, pool: str, data: DataConfig
) -> tuple[list[int], list[int]]:
    """Count the images of `dataset` that look like training images.

    Returns the five numbers of `Nearest.counted`, and the indices of these images; two empty lists if the training
    features are too many to hold in memory. `features`, `training`: features of `dataset` and of the training images.
    `pool`: the pooling to compare.
    """
    of_images = np.asarray(features.of(pool))
    of_training = np.asarray(training.of(pool))
    if of_training.size > MOST_VALUES:
        return [], []
    mean = of_training.mean(0)
    limit = similarity_of_edited(seeing, dataset, mean, data.val_batch)
    seconds = QUICK_SECONDS if data.CHECK == "quick" else float("inf")
    nearest_images = nearest(directions(of_images, mean), directions(of_training, mean), limit, seconds)
    return list(nearest_images.counted(features.labels, training.labels)), nearest_images.indices_alike()


def alike_in_validation(run: Run, seeing: Seeing, training: Features) -> tuple[list[int], list[int]]:
    """Count the validation images that look like training images. A collective call.

    Returns what `count_alike` does on rank 0, and two empty lists on other ranks. `training`: features of the training
    images.
    """
    pool = pool_of(seeing.model)
    if training.of(pool).size > MOST_VALUES:
        return [], []
    data = run.config.DATA.changed(PART="val")
    dataset = open_dataset(data, False, int(run.config.MODEL.NUM_CLASSES), run.config.SEED, run.device)
    features = features_of(seeing, run.config, dataset, data, run.world)
    if not run.world.first:
        return [], []
    return count_alike(seeing, dataset, features, training, pool, data)
