"""evaluate.py -knn: classifies images by their nearest training images, so that no classifier is needed.

It says how well features separate the classes, also those of a model that learned without labels.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from datasets import ImageDataset, has_labels, source_of
from engine.evaluation.data import data_for_evaluation, title_of
from engine.evaluation.knn import TEMPERATURE, Rows, check_pool, classify, labelled_data, open_labelled
from engine.trained.model import Trained
from tools.common.command_line import POOLED
from tools.common.evaluation import INTERVALS, measured, with_bar
from tools.common.tables import in_columns
from utils.cli import CommandLine
from utils.errors import UserError
from utils.log import log
from utils.text import wilson
from vitamp.metrics import KNN, TOP1, always_guessing

NAMED_BY = "-dataset imagefolder -data_path DIR"


def evaluate_neighbours(trained: Trained, given: CommandLine, asked: Namespace) -> dict[str, Any]:
    """Log the accuracy, and return what the JSON file says of the evaluation."""
    pool, which = asked.pool or POOLED, trained.chosen.which
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
    log.info("%s: %s", asked.model, trained.chosen.words)
    for note in notes:
        log.info("%s.", note)

    def features(pixels: Tensor) -> Tensor:
        seen = trained.features(pixels, pool)
        if not bool(seen.isfinite().all()):
            raise UserError("-knn: the model has NaN or infinite features on these images; nothing can be compared.")
        return seen

    def rows(dataset: ImageDataset) -> Iterator[Rows]:
        return with_bar(trained, dataset, compute=features)

    guesses, truth = classify(rows(images), rows(bank), asked.knn)
    top1, largest = (
        100 * int((guesses == truth).sum()) / len(truth),
        100 * float(truth.bincount().max()) / len(truth),
    )
    interval = wilson(top1, len(truth))
    title, of_bank = title_of(data), title_of(data.model_copy(update={"PART": "train"}))
    table = in_columns([["", which.mark or which.name], [KNN.words, measured(top1, interval)]])
    log.info("%s of %s, in %s", config.MODEL.NAME, trained.chosen.place, trained.precision.name)
    log.info("%s: %s images; %s", title, f"{len(images):,}", always_guessing(largest))
    log.info("%s: %s images, of which the %d nearest vote.", of_bank, f"{len(bank):,}", asked.knn)
    log.info("Features: %s; cosine similarity s, votes weighted by exp(s / %g).", pool, TEMPERATURE)
    log.info("\n%s", "\n".join([*table, INTERVALS]))
    return {
        "model": config.MODEL.NAME,
        "source": f"{trained.chosen.place}",
        "precision": trained.precision.name,
        "data": title,
        "bank": of_bank,
        "bank_images": len(bank),
        "knn": asked.knn,
        "pool": pool,
        "largest_class_percent": largest,
        "figures": {
            which.name: {"images": len(truth), TOP1.name: top1, "intervals": {TOP1.name: list(interval)}},
        },
    }
