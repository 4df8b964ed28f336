"""The task of a run: what its labels are, and so its loss, its metrics, and what a prediction is."""

from __future__ import annotations

import torch

from engine.task.base import Tally, Task
from utils.config import Config
from utils.record.tasks import NO_LABELS, SEVERAL_LABELS


def task_of(config: Config) -> Task:
    kind, own = config.task, config.VALIDATE_METRICS
    if kind == NO_LABELS:
        from engine.task.pixels import NoLabels

        return NoLabels(config.MODEL.NUM_CLASSES)
    if kind == SEVERAL_LABELS:
        from engine.task.several import SeveralLabels

        return SeveralLabels(config.MODEL.NUM_CLASSES, config.DATA.THRESHOLD_IMAGES, own_metrics=own)
    from engine.task.one import OneLabel

    return OneLabel(config.MODEL.NUM_CLASSES, own_metrics=own)


def tally_of(task: Task, samples: int, device: torch.device) -> Tally:
    """For a validation of so many samples, with the user's own metrics."""
    tally = task.tally(samples, device)
    if not task.own_metrics:
        return tally
    from engine.task.own import WithOwnMetrics

    return WithOwnMetrics(tally, task, samples, device)
