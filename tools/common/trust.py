"""Collects for evaluate.py and the report what the doubts about an evaluation depend on."""

from typing import Any

import numpy as np
import torch

from datasets import ImageDataset, open_dataset
from datasets.examine.trust import Doubt
from datasets.labels import ANY_LABEL
from engine.evaluation.data import OF_RUN, found_in_own_data, validations_of, whose_data
from engine.report.trust import Result, Source, doubts, splits_of
from engine.trained.model import Trained
from tools.common.command_line import MEMORISED
from tools.common.evaluation import OneLabel, SeveralLabels
from utils.config.kinds import AUTO
from utils.record.history import History
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import AUROC, BALANCED, TOP1, Metric

IMAGE_OF = {"train": "training image", "val": "validation image", "test": "test image", "all": "image"}


def doubts_of(
    trained: Trained, dataset: ImageDataset, found: OneLabel | SeveralLabels, deciding: Metric | None = None
) -> tuple[Result, list[Doubt]]:
    """Return a metric of evaluated images, and the reasons to doubt it.

    `dataset`: the images. `found`: their evaluation. `deciding`: the metric; None: the task's main one.
    """
    config = trained.config
    about_data = dict[str, Any]()
    metric = trained.task.kind.best
    if deciding is not None and deciding in found.values:
        metric = deciding
    result = _result_of(found, metric)
    result.groups = dataset.groups()
    if isinstance(found, OneLabel):
        result.problems = found.strange(trained)

    # Of the run's own images, not those of training, some may have relatives in training. Relatives are images of one
    # group (DATA.GROUP); for the run's own validation split also copies and look-alikes, which its start has found.
    run = run_folder_of(trained.chosen.place)
    part = config.DATA.PART
    whose = whose_data(config, trained.chosen)
    result.image = IMAGE_OF.get(part, "validation image") if whose in OF_RUN else "image"
    if part not in MEMORISED and whose in OF_RUN:
        result.validations = max(validations_of(config, model.chosen) for model in trained.all)
        if run is not None and result.validations:
            result.last = History.of_run(run).last(result.metric).get(trained.chosen.which)
        related = set[int]()
        if len(result.groups):
            training_data = config.DATA.changed(PART=AUTO)  # as in training, which has no -part
            for_training = True
            training = open_dataset(training_data, for_training, ANY_LABEL, seed=0, device=torch.device("cpu"))
            related.update(np.flatnonzero(np.isin(result.groups, training.groups())).tolist())
        about_data = found_in_own_data(config, trained.chosen)
        related.update(about_data.get("related", []))
        result.related = sorted(related)
    source = Source(run, splits_of(config.DATA), fold=config.DATA.FOLD is not None)
    return result, doubts(about_data, result, source)


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
