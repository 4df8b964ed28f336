"""k-NN: classifies images by the training images with the most similar features."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.task.base import sum_type_of
from utils.distributed.world import ALONE, World, sum_over_ranks

TEMPERATURE = 0.07
"""Of the votes: exp(similarity / 0.07), as Wu et al. 2018 (arXiv:1805.01978)"""
AT_ONCE = 1 << 14
"""Images to classify that are compared with a batch of training images at once"""
Rows = tuple[Tensor, Tensor, Tensor]
"""Features, labels and indices of some images"""


class Nearest:
    """The nearest images of some images, among others that are added batch by batch and need not fit into memory."""

    def __init__(self, features: Tensor, count: int) -> None:
        """`features`: one row per image to classify."""
        self._rows = _directions(features)
        self._similar = self._rows.new_full((len(features), count), -torch.inf)
        self._labels = torch.zeros(len(features), count, dtype=torch.int64, device=features.device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        others = _directions(features)
        chunks = (one.split(AT_ONCE) for one in (self._rows, self._similar, self._labels))
        for rows, similar, of in zip(*chunks, strict=True):
            _keep_nearest(similar, of, rows @ others.T, labels.expand(len(rows), -1))

    def merge(self, world: World) -> None:
        """Take up what the other ranks have found for the same images. A collective call."""
        for similar, of in zip(self._similar.split(AT_ONCE), self._labels.split(AT_ONCE), strict=True):
            found = [_of_ranks(one, world) for one in (similar, of)]
            for rank in range(world.size):
                if rank != world.rank:
                    _keep_nearest(similar, of, *(one[rank] for one in found))

    def guesses(self, plain: bool = False) -> Tensor:
        """The class of each image with most votes of its nearest images. `plain`: all of them have the same weight."""
        votes = self._rows.new_zeros(len(self._rows), int(self._labels.max()) + 1)
        weights = (self._similar / TEMPERATURE).exp()
        return votes.scatter_add_(1, self._labels, torch.ones_like(weights) if plain else weights).argmax(1)


def classify(
    images: Iterable[Rows], bank: Iterable[Rows], count: int, world: World = ALONE, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Guessed and true class of each image, by the `count` nearest images of `bank`. A collective call.

    `plain`: as in `Nearest.guesses`. Each rank gives its part of both, and gets the classes of all images.
    """
    features, labels = _of_all_ranks(images, world)
    nearest = Nearest(features, count)
    for rows, classes, _ in bank:
        nearest.add(rows, classes)
    nearest.merge(world)
    return nearest.guesses(plain), labels


def _directions(features: Tensor) -> Tensor:
    """Features of length 1, in double precision: in single precision, similar images are often equally near."""
    return F.normalize(features.to(sum_type_of(features.device)), dim=1)


def _keep_nearest(similar: Tensor, labels: Tensor, more: Tensor, of_more: Tensor) -> None:
    """Keep the most similar images of those that are known and of more, in place."""
    found = torch.cat((similar, more), 1).topk(similar.shape[1], dim=1)
    labels.copy_(torch.cat((labels, of_more), 1).gather(1, found.indices))
    similar.copy_(found.values)


def _of_ranks(tensor: Tensor, world: World) -> Tensor:
    """The tensors of all ranks, ranks x ..."""
    table = tensor.new_zeros(world.size, *tensor.shape)
    table[world.rank] = tensor
    return sum_over_ranks(table, world)


def _of_all_ranks(rows: Iterable[Rows], world: World) -> tuple[Tensor, Tensor]:
    """Features and labels of the images of all ranks, by their index."""
    features, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
    total = int(sum_over_ranks(torch.tensor(len(indices), device=indices.device), world))
    found = []
    for own in (features, labels):
        table = own.new_zeros(total, *own.shape[1:])
        table[indices] = own
        found.append(sum_over_ranks(table, world))
    return found[0], found[1]
