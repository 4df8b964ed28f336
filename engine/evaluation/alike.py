"""Finds images that look like others, as edited copies of them would: by a model's features.

How similar is too similar depends on the model and on the images. So some images are edited here, and the similarity of
an image to its edited copies is the limit.
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
"""Most numbers in the features of the training images, which are compared in memory"""


def edited(images: Tensor) -> list[Tensor]:
    """Return a copy of the images (B x C x H x W) for each of EDITS."""
    height, width = images.shape[-2:]
    originals = images.float()
    sigma = min(height, width) / 112  # 2 pixels at 224
    cropped = functional.center_crop(originals, [height * 9 // 10, width * 9 // 10])
    copies = [
        originals.flip(-1),
        functional.rotate(originals, 10, functional.InterpolationMode.BILINEAR),
        functional.gaussian_blur(originals, [9, 9], [sigma, sigma]),
        functional.resize(cropped, [height, width]),
    ]
    return [copy.round().to(images.dtype) for copy in copies]


def directions(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the directions of features from their mean, as unit vectors.

    The product of two is the cosine similarity by which images are compared.
    """
    from_mean = features - mean
    return from_mean / np.linalg.norm(from_mean, axis=1, keepdims=True).clip(1e-12)


def similarity_of_edited(seeing: Seeing, dataset: ImageDataset, mean: np.ndarray, batch_size: int) -> float:
    """Return the median similarity of some images to their edited copies. `mean`: of the features."""
    chosen = np.sort(generator_of("edited").permutation(len(dataset))[:EDITED])
    batches = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    loader = ValLoader(dataset, batch_size, 0, 1, 0, seeing.precision.device, shard=lambda *_: batches)
    loading = contextlib.closing(loader)
    bar = Progress(loader, len(batches), "batches", "edited copies")

    def directions_of(images: Tensor) -> np.ndarray:
        columns = columns_of(seeing, images)[:, : len(mean)]
        return directions(columns.cpu().numpy(), mean)

    similarities = list[np.ndarray]()
    with torch.no_grad(), in_eval_mode(seeing.model), loading, bar:
        for images, _, indices in bar:
            read = images[indices >= 0]  # -1 of a broken image
            originals = directions_of(read)
            similarities += [(originals * directions_of(copy)).sum(1) for copy in edited(read)]
    return float(np.median(np.concatenate(similarities)))


class Nearest(NamedTuple):
    """For each image, which others are most similar to it, and how many are alike: as similar as the limit."""

    place: np.ndarray
    """Index of the most similar image"""
    similar: np.ndarray
    """How similar that is"""
    alike: np.ndarray
    """Number of images that are alike"""
    farther: np.ndarray
    """Index of the most similar image that is not alike"""

    def counted(self, labels: np.ndarray, other_labels: np.ndarray) -> tuple[int, int, int, int, int]:
        """Sum up how many images have others that are alike, and what that says of labels.

        Returns the number of images with any that is alike; of how many images; the median number of images that are
        alike to such an image; how many such images have the label of the most similar image; and how many have the
        label of the most similar one that is not alike.
        """
        has_alike = self.alike > 0
        own_labels = labels[: len(has_alike)]  # time may have been too short for all images

        def count_with_label_of(others: np.ndarray) -> int:
            same_label = (own_labels == other_labels[others]).reshape(len(has_alike), -1).all(1)
            return int((has_alike & same_label).sum())

        median = int(np.median(self.alike[has_alike])) if has_alike.any() else 0
        with_label_of_nearest = count_with_label_of(self.place)
        with_label_of_farther = count_with_label_of(self.farther)
        return int(has_alike.sum()), len(has_alike), median, with_label_of_nearest, with_label_of_farther


def joined(blocks: Iterable[Nearest]) -> Nearest:
    """Join the results for consecutive blocks of images."""
    return Nearest(*map(np.concatenate, zip(*blocks, strict=True)))


def nearest(of: np.ndarray, among: np.ndarray, limit: float, seconds: float = float("inf")) -> Nearest:
    """Find the most similar images to each of the images `of`, in the images `among`. Both are `directions`.

    After so many `seconds`, the search ends, and the result is for the first images alone.
    """
    end = time.monotonic() + seconds
    blocks = list[Nearest]()
    for start in range(0, len(of), AT_ONCE):
        similarities = of[start : start + AT_ONCE] @ among.T
        place = similarities.argmax(1)
        highest = similarities.max(1)
        is_alike = similarities >= limit
        similarities[is_alike] = -2  # lower than any, so that the next argmax finds the highest of the others
        blocks.append(Nearest(place, highest, is_alike.sum(1), similarities.argmax(1)))
        if time.monotonic() > end:
            break
    return joined(blocks)


def count_alike(
    seeing: Seeing, dataset: ImageDataset, seen: Features, known: Features, pool: str, data: DataConfig
) -> list[int]:
    """Count which images of `dataset` look like training images; see `Nearest.counted` for the numbers.

    `seen`: features of these images. `known`: of the training images. `pool`: the pooling by which they are compared.
    Returns an empty list if there are too many training images.
    """
    features = np.asarray(seen.of(pool))
    train_features = np.asarray(known.of(pool))
    if train_features.size > MOST_VALUES:
        return []
    mean = train_features.mean(0)
    limit = similarity_of_edited(seeing, dataset, mean, data.val_batch)
    seconds = QUICK_SECONDS if data.CHECK == "quick" else float("inf")
    result = nearest(directions(features, mean), directions(train_features, mean), limit, seconds)
    return list(result.counted(seen.labels, known.labels))


def alike_in_validation(run: Run, seeing: Seeing, known: Features) -> list[int]:
    """Count which validation images look like training images, as `count_alike`. A collective call.

    `known`: features of the training images. Returns an empty list if they are too many, and on ranks besides 0.
    """
    pool = pool_of(seeing.model)
    if known.of(pool).size > MOST_VALUES:
        return []
    data = run.config.DATA.changed(PART="val")
    dataset = open_dataset(data, False, int(run.config.MODEL.NUM_CLASSES), run.config.SEED, run.device)
    seen = features_of(seeing, run.config, dataset, data, run.world)
    return count_alike(seeing, dataset, seen, known, pool, data) if run.world.first else []
