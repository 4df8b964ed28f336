"""evaluate.py -knn: classifies images by their nearest training images, so that no classifier is needed.

It says how well features separate the classes, also those of a model that learned without labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from datasets import ImageDataset, has_labels, source_of
from engine.evaluated_data import data_for_evaluation, title_of
from engine.features.labelled import labelled_data, open_labelled
from engine.features.nearest import TEMPERATURE, Rows, classify
from engine.features.pooling import Pool, check_pool
from engine.saved.features import features_of
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
from utils.record.tasks import KNN, TOP1, always_guessing
from utils.record.weight_sets import BETTER, CHOICES, SETS, WeightSet


@dataclass(frozen=True)
class Accuracy:
    images: int
    right: int
    not_finite = 0
    own: ClassVar[Mapping[str, float]] = {}

    @property
    def top1(self) -> float:
        return 100 * self.right / self.images

    @property
    def interval(self) -> Interval:
        return wilson(self.top1, self.images)


NAMED_BY = "-dataset imagefolder -data_path DIR"
CELLS = {KNN.words: lambda one: measured(one.top1, one.interval)}


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
    data, notes = _data(trained, given)
    bank, images = open_labelled(data, asked.knn, trained.config.SEED, trained.precision.device, "-knn", NAMED_BY)
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
        found[which], largest = accuracy(trained, bank, images, asked.knn, pool, asked.plain_votes)
    log.info("%s of %s, in %s", trained.config.MODEL.NAME, trained.chosen.origin, trained.precision.name)
    log.info("%s: %s images; %s", title, f"{len(images):,}", always_guessing(largest))
    log.info("%s: %s images, of which the %d nearest vote.", of_bank, f"{len(bank):,}", asked.knn)
    votes = "each vote counts the same" if asked.plain_votes else f"votes weighted by exp(s / {TEMPERATURE:g})"
    log.info("Features: %s; cosine similarity s, %s.", pool, votes)
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
        "plain_votes": bool(asked.plain_votes),
        "largest_class_percent": largest,
    }
    return about, {which.name: _as_json(one) for which, one in found.items()}


def accuracy(
    trained: Trained, bank: ImageDataset, images: ImageDataset, count: int, pool: Pool, plain: bool
) -> tuple[Accuracy, float]:
    """Of the votes of the `count` nearest images of `bank`; and the percentage of the largest class."""
    with progress_bar(len(bank) + len(images), "images") as bar:

        def rows(dataset: ImageDataset) -> Iterator[Rows]:
            for row in batches_of(trained, dataset, compute=partial(_features, trained, pool=pool)):
                yield row
                bar.update(len(row[1]))

        guesses, truth = classify(rows(images), rows(bank), count, plain=plain)
    right = int((guesses == truth).sum())
    return Accuracy(len(truth), right), 100 * float(truth.bincount().max()) / len(truth)


def _features(trained: Trained, images: Tensor, pool: Pool) -> Tensor:
    features = features_of(trained, images, pool)
    if not bool(features.isfinite().all()):
        raise UserError("-knn: the model has NaN or infinite features on these images; nothing can be compared.")
    return features


def _data(trained: Trained, given: CommandLine) -> tuple[DataConfig, list[str]]:
    """The images that the command line names, or else the run's own; without labels, those of TRAIN.KNN."""
    config, named = trained.config, {*given.flags, *given.words}
    if config.measures_knn and not named & {"DATA.DATASET", "DATA.DATA_PATH"} and not has_labels(config.DATA):
        data = labelled_data(config)
        return data, [f"The run's images have no labels: those of TRAIN.KNN are taken, {source_of(data)}"]
    return data_for_evaluation(config, trained.chosen, named)


def _with_part(data: DataConfig, part: str) -> DataConfig:
    return data.model_copy(update={"PART": part})


def _as_json(one: Accuracy) -> dict[str, Any]:
    return {"images": one.images, TOP1.name: one.top1, "intervals": {TOP1.name: list(one.interval)}}
