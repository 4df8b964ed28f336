"""evaluate.py -knn: classifies images by their nearest training images, so that no classifier is needed.

It says how well features separate the classes, also those of a model that learned without labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from datasets import ImageDataset, has_labels, source_of
from engine.evaluated_data import data_for_evaluation, title_of
from engine.features.knn import TEMPERATURE, Rows, check_pool, classify, labelled_data, open_labelled
from engine.trained.model import load_trained
from tools.common.command_line import POOLED, ToolLine
from tools.common.evaluation import INTERVALS, measured, with_bar
from tools.common.tables import in_columns
from utils.cli import CommandLine
from utils.errors import UserError
from utils.log import log
from utils.text import wilson
from vitamp.metrics import BETTER, CHOICES, KNN, SETS, TOP1, always_guessing

NAMED_BY = "-dataset imagefolder -data_path DIR"


def evaluate_neighbours(line: ToolLine, given: CommandLine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log the accuracy. What the JSON file says of the evaluation, and the metrics for it."""
    asked = line.asked
    (path,), pool, both = asked.model, asked.pool or POOLED, asked.weights not in CHOICES
    weights = BETTER if both else asked.weights
    trained = load_trained(path, weights, given=given, needs_labels=False)
    sets = SETS if both else (trained.chosen.which,)
    for which in sets if both else ():
        trained.chosen.other(which)  # an error if it is not there
    check_pool(trained.model, pool)
    config, named = trained.config, {*given.flags, *given.words}
    notes: list[str] = []
    if config.measures_knn and not named & {"DATA.DATASET", "DATA.DATA_PATH"} and not has_labels(config.DATA):
        data = labelled_data(config)
        notes.append(f"The run's images have no labels: those of TRAIN.KNN are taken, {source_of(data)}")
    else:
        data, notes = data_for_evaluation(config, trained.chosen, named)
    bank, images = open_labelled(data, asked.knn, config.SEED, trained.precision.device, "-knn", NAMED_BY)
    log.setLevel("INFO")
    if not both:
        log.info("%s: %s", path, trained.chosen.words)
    for note in notes:
        log.info("%s.", note)

    def features(pixels: Tensor) -> Tensor:
        seen = trained.features(pixels, pool)
        if not bool(seen.isfinite().all()):
            raise UserError("-knn: the model has NaN or infinite features on these images; nothing can be compared.")
        return seen

    def rows(dataset: ImageDataset) -> Iterator[Rows]:
        return with_bar(trained, dataset, compute=features)

    figures, largest = {}, 0.0
    for which in sets:
        if which != trained.chosen.which:
            trained.take(which)
        guesses, truth = classify(rows(images), rows(bank), asked.knn, plain=asked.plain_votes)
        top1, largest = (
            100 * int((guesses == truth).sum()) / len(truth),
            100 * float(truth.bincount().max()) / len(truth),
        )
        intervals = {TOP1.name: list(wilson(top1, len(truth)))}
        figures[which] = {"images": len(truth), TOP1.name: top1, "intervals": intervals}
    title, of_bank = title_of(data), title_of(data.model_copy(update={"PART": "train"}))
    votes = "each vote counts the same" if asked.plain_votes else f"votes weighted by exp(s / {TEMPERATURE:g})"
    cells = [measured(one[TOP1.name], wilson(one[TOP1.name], one["images"])) for one in figures.values()]
    table = in_columns([["", *(which.mark or which.name for which in figures)], [KNN.words, *cells]])
    log.info("%s of %s, in %s", config.MODEL.NAME, trained.chosen.place, trained.precision.name)
    log.info("%s: %s images; %s", title, f"{len(images):,}", always_guessing(largest))
    log.info("%s: %s images, of which the %d nearest vote.", of_bank, f"{len(bank):,}", asked.knn)
    log.info("Features: %s; cosine similarity s, %s.", pool, votes)
    log.info("\n%s", "\n".join([*table, INTERVALS]))
    about = {
        "model": config.MODEL.NAME,
        "source": f"{trained.chosen.place}",
        "precision": trained.precision.name,
        "data": title,
        "bank": of_bank,
        "bank_images": len(bank),
        "knn": asked.knn,
        "pool": pool,
        "plain_votes": bool(asked.plain_votes),
        "largest_class_percent": largest,
    }
    return about, {which.name: one for which, one in figures.items()}
