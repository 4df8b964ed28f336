"""evaluate.py -knn: classifies images by their nearest training images, so that no classifier is needed.

It says how well features separate the classes, also those of a model that learned without labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import ImageDataset, check_dataset, count_classes, has_labels, open_dataset, source_of
from engine.evaluated_data import data_for_evaluation, title_of
from engine.saved.features import Pool, check_pool, features_of
from engine.saved.predictions import batches_of
from engine.saved.trained import Trained, load_trained
from tools.common.command_line import POOLED, ToolLine
from tools.common.progress import progress_bar
from tools.evaluate.one import measured, table_of
from utils.cli import CommandLine
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.intervals import Interval, wilson
from utils.log import log
from utils.record.tasks import TOP1, always_guessing
from utils.record.weight_sets import BETTER, CHOICES, SETS, WeightSet

TEMPERATURE = 0.07
"""Of the votes: exp(similarity / 0.07), as Wu et al. 2018 (arXiv:1805.01978)"""
AT_ONCE = 1 << 14
"""Images to classify that are compared with a batch of training images at once"""


class Nearest:
    """The nearest images of some images, among others that are added batch by batch and need not fit into memory."""

    def __init__(self, features: Tensor, count: int) -> None:
        """`features`: one row per image to classify."""
        self._rows = F.normalize(features, dim=1)
        self._similar = self._rows.new_full((len(features), count), -torch.inf)
        self._labels = torch.zeros(len(features), count, dtype=torch.int64, device=features.device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        others = F.normalize(features, dim=1)
        chunks = (one.split(AT_ONCE) for one in (self._rows, self._similar, self._labels))
        for rows, similar, of in zip(*chunks, strict=True):
            found = torch.cat((similar, rows @ others.T), 1).topk(similar.shape[1], dim=1)
            of.copy_(torch.cat((of, labels.expand(len(rows), -1)), 1).gather(1, found.indices))
            similar.copy_(found.values)

    def guesses(self) -> Tensor:
        """The class of each image with most votes of its nearest images."""
        votes = torch.zeros(len(self._rows), int(self._labels.max()) + 1, dtype=torch.float64, device=self._rows.device)
        weights = (self._similar.double() / TEMPERATURE).exp()
        return votes.scatter_add_(1, self._labels, weights).argmax(1)


@dataclass(frozen=True)
class Accuracy:
    images: int
    right: int
    not_finite = 0

    @property
    def top1(self) -> float:
        return 100 * self.right / self.images

    @property
    def interval(self) -> Interval:
        return wilson(self.top1, self.images)


CELLS = {f"k-NN {TOP1.words}": lambda one: measured(one.top1, one.interval)}


def evaluate_neighbours(line: ToolLine, given: CommandLine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log the accuracy. What the JSON file says of the evaluation, and the metrics for it."""
    asked = line.asked
    (path,), pool, both = asked.model, asked.pool or POOLED, asked.weights not in CHOICES
    weights = BETTER if both else asked.weights
    trained = load_trained(path, weights, given=given, average=asked.average, needs_labels=False)
    sets = SETS if both else (trained.chosen.which,)
    for which in sets if both else ():
        trained.chosen.other(which)  # an error if it is not there
    check_pool(trained.model, pool)
    data, notes = data_for_evaluation(trained.config, trained.chosen, {*given.flags, *given.words})
    bank, images = _opened(trained, data, asked.knn)
    log.setLevel("INFO")
    if not both:
        log.info("%s: %s", path, trained.chosen.words)
    for note in notes:
        log.info("%s.", note)
    title, of_bank = title_of(data), title_of(_with_part(data, "train"))
    found: dict[WeightSet, Accuracy] = {}
    largest = 0.0
    for which in sets:
        if which != trained.chosen.which:
            trained.take(which)
        found[which], largest = accuracy(trained, bank, images, asked.knn, pool)
    log.info("%s of %s, in %s", trained.config.MODEL.NAME, trained.chosen.origin, trained.precision.name)
    log.info("%s: %s images; %s", title, f"{len(images):,}", always_guessing(largest))
    log.info("%s: %s images, of which the %d nearest vote.", of_bank, f"{len(bank):,}", asked.knn)
    log.info("Features: %s; cosine similarity s, votes weighted by exp(s / %g).", pool, TEMPERATURE)
    log.info("\n%s", "\n".join(table_of(found, CELLS)))
    about = {
        "model": trained.config.MODEL.NAME,
        "source": trained.chosen.origin,
        "precision": trained.precision.name,
        "data": title,
        "bank": of_bank,
        "bank_images": len(bank),
        "knn": asked.knn,
        "pool": pool,
        "largest_class_percent": largest,
    }
    return about, {which.name: _as_json(one) for which, one in found.items()}


def accuracy(
    trained: Trained, bank: ImageDataset, images: ImageDataset, count: int, pool: Pool
) -> tuple[Accuracy, float]:
    """Of the votes of the `count` nearest images of `bank`; and the percentage of the largest class."""
    compute = partial(_features, trained, pool=pool)
    with progress_bar(len(bank) + len(images), "images") as bar:
        rows = []
        for features, labels, _ in batches_of(trained, images, compute=compute):
            rows.append((features, labels))
            bar.update(len(labels))
        features, truth = (torch.cat(column) for column in zip(*rows, strict=True))
        nearest = Nearest(features, count)
        for features, labels, _ in batches_of(trained, bank, compute=compute):
            nearest.add(features, labels)
            bar.update(len(labels))
    right = int((nearest.guesses() == truth).sum())
    return Accuracy(len(truth), right), 100 * float(truth.bincount().max()) / len(truth)


def _features(trained: Trained, images: Tensor, pool: Pool) -> Tensor:
    features = features_of(trained, images, pool)
    if not bool(features.isfinite().all()):
        raise UserError("-knn: the model has NaN or infinite features on these images; nothing can be compared.")
    return features


def _opened(trained: Trained, data: DataConfig, count: int) -> tuple[ImageDataset, ImageDataset]:
    """The training images, which vote, and those to classify. Their labels need not be those of the model."""
    if data.MULTI_LABEL:
        raise UserError("-knn: needs one label per image; this data has several (DATA.MULTI_LABEL).")
    if not has_labels(data):
        raise UserError(
            f"-knn: {source_of(data)} has no labels. Name images with labels, as in -dataset imagefolder "
            "-data_path DIR."
        )
    classes = count_classes(data, train=True)
    check_dataset(data, classes)
    bank, images = (
        open_dataset(one, False, classes, trained.config.SEED, trained.precision.device)
        for one in (_with_part(data, "train"), data)
    )
    if count > len(bank):
        raise UserError(f"-knn {count}: {source_of(data)} has only {len(bank):,} training images.")
    if not len(images):
        raise UserError(f"{title_of(data)}: the split has no images.")
    return bank, images


def _with_part(data: DataConfig, part: str) -> DataConfig:
    return data.model_copy(update={"PART": part})


def _as_json(one: Accuracy) -> dict[str, Any]:
    return {"images": one.images, TOP1.name: one.top1, "intervals": {TOP1.name: list(one.interval)}}
