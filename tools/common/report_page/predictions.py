"""Evaluation of a run's best checkpoint on its validation set, for the report."""

from __future__ import annotations

from pathlib import Path

from engine.saved.predictions import split_of_run
from engine.saved.trained import load_trained
from tools.common.report_page import one, pixels, several
from utils.errors import TrainingError, UserError
from utils.record.tasks import NO_LABELS, ONE_LABEL, SEVERAL_LABELS

Evaluation = one.Evaluation | several.Evaluation | pixels.Evaluation
IMAGE_OF = {"train": "training image", "val": "validation image", "test": "test image", "all": "image"}


def evaluate(folder: Path, part: str = "val") -> Evaluation | str:
    """Evaluation of the run in `folder` on a split of its data, or the reason why there is none."""
    try:
        trained = load_trained(folder, needs_labels=False)
        task = {ONE_LABEL: one, SEVERAL_LABELS: several, NO_LABELS: pixels}[trained.task.kind]
        return task.evaluated(trained, split_of_run(trained, part), IMAGE_OF[part])
    except (UserError, TrainingError) as error:
        return str(error)
