"""Collects for evaluate.py and the report what the doubts about an evaluation depend on."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from datasets import ImageDataset
from datasets.examine.training import examine
from datasets.examine.trust import Doubt
from engine.evaluation.alike import count_alike
from engine.evaluation.data import (
    OF_RUN,
    copies_in_training,
    found_in_own_data,
    training_images_of,
    validations_of,
    whose_data,
)
from engine.evaluation.features import features_of
from engine.report.trust import Result, Source, doubts, splits_of
from engine.trained.model import Trained, pretrained, split_of_run
from tools.common.command_line import MEMORISED
from tools.common.evaluation import OneLabel, SeveralLabels
from utils.config.load import config_of_weights
from utils.config.resumed import settings_of
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import unheard
from utils.record.history import History
from utils.record.run_folder import ALIKE, may_be_copies
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import AUROC, BALANCED, TOP1, Metric
from vitamp.pooling import pool_of
from vitamp.weights import Chosen

IMAGE_OF = {"train": "training image", "val": "validation image", "test": "test image", "all": "image"}


def doubts_of(
    trained: Trained, dataset: ImageDataset, found: OneLabel | SeveralLabels, deciding: Metric | None = None
) -> tuple[Result, list[Doubt]]:
    """Return a metric of evaluated images, and the reasons to doubt it.

    `dataset`: the images. `found`: their evaluation. `deciding`: the metric; None: the task's main one.
    """
    config = trained.config
    metric = trained.task.kind.best
    if deciding is not None and deciding in found.values:
        metric = deciding
    result = _result_of(found, metric)
    result.groups = dataset.groups()
    is_of_run = whose_data(config, trained.chosen) in OF_RUN
    part = dataset.data.PART
    result.image = IMAGE_OF.get(part, "validation image") if is_of_run else "image"
    about_data = dict[str, Any]()
    if isinstance(found, OneLabel):
        result.problems = found.strange(trained)
        if not (is_of_run and part in MEMORISED):
            about_data = add_relatives(result, trained, dataset, found.rows.label.numpy())

    run = run_folder_of(trained.chosen.place)
    if is_of_run and trained.computes_as_validated:
        result.validations = validations_of(config, trained.chosen)
    if run is not None and result.validations:
        result.last = History.of_run(run).last(result.metric).get(trained.chosen.which)
    source = Source(run, splits_of(config.DATA), fold=config.DATA.FOLD is not None, own_data=is_of_run)
    return result, doubts(about_data, result, source)


def add_relatives(result: Result, trained: Trained, dataset: ImageDataset, labels: np.ndarray) -> dict[str, Any]:
    """Add to `result` which evaluated images have a relative among the training images; return findings as data.json.

    Relatives are copies and look-alikes, and in the run's own data images of one group (DATA.GROUP). In its validation
    split, the run's start has looked for copies and look-alikes. `labels`: as the model numbers its classes.
    """
    chosen = trained.chosen
    related = set[int]()
    is_of_run = whose_data(trained.config, chosen) in OF_RUN
    if len(result.groups) and is_of_run:
        groups_of_training = split_of_run(trained, "train").groups()
        related.update(np.flatnonzero(np.isin(result.groups, groups_of_training)).tolist())
    findings = found_in_own_data(trained.config, chosen)
    if findings:
        related.update(findings.get("related", []))
    else:
        findings = _examined(chosen, dataset, is_of_run)
        related.update((findings.get("copies") or {}).get("images", []))
        findings["alike"], images_alike = _alike_in_training(trained, dataset, labels)
        if may_be_copies(findings["alike"]):
            related.update(images_alike)
    result.related = sorted(related)
    return findings


def _examined(chosen: Chosen, dataset: ImageDataset, is_of_run: bool) -> dict[str, Any]:
    """Compare evaluated images with the training images as the start of a run does with validation, by files and names.

    Returns the findings as data.json has them; with DATA.CHECK off, only copies. They are empty if the training images
    are gone, in memory or on another machine. `is_of_run`: whether the images are of the run's own data.
    """
    evaluated = dataset.single_images()
    if dataset.data.CHECK == "off":
        copies = copies_in_training(chosen, evaluated)
        return {"copies": asdict(copies)} if copies else {}
    training = training_images_of(chosen)
    if training is None or evaluated is None or evaluated.remote:
        return {}
    data = dataset.data
    if not is_of_run:
        data = data.changed(GROUP=None)  # the run's groups are other ones: names alone show what is in both
    return asdict(examine(training, evaluated, data))


def _result_of(found: OneLabel | SeveralLabels, metric: Metric) -> Result:
    """Return a metric of an evaluation with what guessing would reach."""
    result = Result(metric, found.values[metric], interval=found.intervals[metric.name], images=found.images)
    if isinstance(found, SeveralLabels):
        mean_prevalence = float(np.mean(100 * found.support[found.present] / found.images))
        result.guess = 50.0 if metric is AUROC else mean_prevalence
        result.guessing = "ordering the images at random"
        return result
    result.is_right = (found.rows.guess == found.rows.label).numpy()
    if metric is BALANCED:
        result.guess = 100 / len(found.present)
        result.guessing = "guessing one class"
    elif metric is TOP1:
        result.guess = found.largest_class_percent
        result.guessing = "always guessing the largest class"
    return result


def _alike_in_training(trained: Trained, dataset: ImageDataset, labels: np.ndarray) -> tuple[list[int], list[int]]:
    """Count the images of `dataset` that look like training images, and list them, as `count_alike` does.

    They are compared by the weights that the run began with, if its start has compared validation images so; else both
    lists are empty. The features of the training images, which its start has kept, are computed again if they are gone.
    """
    chosen = trained.chosen
    if dataset.data.CHECK == "off" or not chosen.choices.get(ALIKE):
        return [], []
    weights = {"PRETRAINED": settings_of(chosen)["MODEL.PRETRAINED"], "NEW_CLASSIFIER": "zero"}
    config = config_of_weights(chosen).changed(MODEL=weights, DATA={"DOWNLOAD": False})
    with suppress(UserError):  # the training images or the weights may be gone
        with unheard():
            at_start = pretrained(config, ALONE)
            train_set = split_of_run(at_start, "train")
        with at_start.computing(config.DATA.val_batch):
            training = features_of(at_start, config, train_set, train_set.data)
            features = features_of(at_start, config, dataset, dataset.data)._replace(labels=labels)
            return count_alike(at_start, dataset, features, training, pool_of(at_start.model), dataset.data)
    return [], []
