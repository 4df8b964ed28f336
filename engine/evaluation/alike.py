"""Images that look like others, as edited copies of them do: by a model's features.

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
"""In features of the training images, which are compared in memory"""


def edited(images: Tensor) -> list[Tensor]:
    """Each of EDITS, of images (B x C x H x W)."""
    high, wide = images.shape[-2:]
    whole = images.float()
    copies = [
        whole.flip(-1),
        functional.rotate(whole, 10, functional.InterpolationMode.BILINEAR),
        functional.gaussian_blur(whole, [9, 9], [min(high, wide) / 112] * 2),
        functional.resize(functional.center_crop(whole, [high * 9 // 10, wide * 9 // 10]), [high, wide]),
    ]
    return [copy.round().to(images.dtype) for copy in copies]


def directions(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Of features from their mean; the product of two is how similar the images are."""
    features = features - mean
    return features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)


def similarity_of_edited(seeing: Seeing, dataset: ImageDataset, mean: np.ndarray, batch: int) -> float:
    """Median similarity of images to their edited copies. `mean`: of the features."""
    chosen = np.sort(generator_of("edited").permutation(len(dataset))[:EDITED])
    plan = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
    loader = ValLoader(dataset, batch, 0, 1, 0, seeing.precision.device, shard=lambda *_: plan)
    loading = contextlib.closing(loader)
    bar = Progress(loader, len(plan), "batches", "edited copies")

    def seen(images: Tensor) -> np.ndarray:
        columns = columns_of(seeing, images)[:, : len(mean)]
        return directions(columns.cpu().numpy(), mean)

    found = list[np.ndarray]()
    with torch.no_grad(), in_eval_mode(seeing.model), loading, bar:
        for images, _, indices in bar:
            read = images[indices >= 0]
            whole = seen(read)
            found += [(whole * seen(copy)).sum(1) for copy in edited(read)]
    return float(np.median(np.concatenate(found)))


class Nearest(NamedTuple):
    """Of each direction, among others:"""

    place: np.ndarray
    """The most similar one"""
    similar: np.ndarray
    """How similar that is"""
    alike: np.ndarray
    """How many are as similar as the limit"""
    farther: np.ndarray
    """The most similar one below the limit"""

    def counted(self, labels: np.ndarray, of_others: np.ndarray) -> tuple[int, int, int, int, int]:
        """How many have any that is alike, of how many; how many such a one has (the median); how many of them have
        the label of the most similar one, and how many that of the most similar one below the limit."""
        some = self.alike > 0
        own = labels[: len(some)]

        def with_label_of(others: np.ndarray) -> int:
            same = (own == of_others[others]).reshape(len(some), -1).all(1)
            return int((some & same).sum())

        each = int(np.median(self.alike[some])) if some.any() else 0
        return int(some.sum()), len(some), each, with_label_of(self.place), with_label_of(self.farther)


def joined(blocks: Iterable[Nearest]) -> Nearest:
    return Nearest(*map(np.concatenate, zip(*blocks, strict=True)))


def nearest(of: np.ndarray, among: np.ndarray, limit: float, seconds: float = float("inf")) -> Nearest:
    """Of the first ones alone, if time is short."""
    end = time.monotonic() + seconds
    blocks = list[Nearest]()
    for first in range(0, len(of), AT_ONCE):
        similar = of[first : first + AT_ONCE] @ among.T
        place = similar.argmax(1)
        most = similar.max(1)
        alike = similar >= limit
        similar[alike] = -2  # less than any
        blocks.append(Nearest(place, most, alike.sum(1), similar.argmax(1)))
        if time.monotonic() > end:
            break
    return joined(blocks)


def count_alike(
    seeing: Seeing, dataset: ImageDataset, seen: Features, known: Features, pool: str, data: DataConfig
) -> list[int]:
    """`Nearest.counted` of the images of `dataset`, with the features `seen`, among training images; empty if these
    are too many."""
    of = np.asarray(seen.of(pool))
    among = np.asarray(known.of(pool))
    if among.size > MOST_VALUES:
        return []
    mean = among.mean(0)
    limit = similarity_of_edited(seeing, dataset, mean, data.val_batch)
    seconds = QUICK_SECONDS if data.CHECK == "quick" else float("inf")
    found = nearest(directions(of, mean), directions(among, mean), limit, seconds)
    return list(found.counted(seen.labels, known.labels))


def alike_in_validation(run: Run, seeing: Seeing, known: Features) -> list[int]:
    """`Nearest.counted` of validation images among training images.

    `known`: of the training images. Empty if these are too many. A collective call.
    """
    pool = pool_of(seeing.model)
    if known.of(pool).size > MOST_VALUES:
        return []
    data = run.config.DATA.changed(PART="val")
    dataset = open_dataset(data, False, int(run.config.MODEL.NUM_CLASSES), run.config.SEED, run.device)
    found = features_of(seeing, run.config, dataset, data, run.world)
    return count_alike(seeing, dataset, found, known, pool, data) if run.world.first else []
