"""The task of a run: what its labels are, and so its loss, its metrics, and what a prediction is."""

from engine.task.base import Task
from utils.config import Config
from vitamp.metrics import NO_LABELS, SEVERAL_LABELS


def task_of(config: Config) -> Task:
    kind = config.task
    own = config.VALIDATE_METRICS
    if kind == NO_LABELS:
        from engine.task.pixels import NoLabels

        return NoLabels(config.MODEL.NUM_CLASSES)
    if kind == SEVERAL_LABELS:
        from engine.task.several import SeveralLabels

        return SeveralLabels(config.MODEL.NUM_CLASSES, own_metrics=own)
    from engine.task.one import OneLabel

    return OneLabel(config.MODEL.NUM_CLASSES, own_metrics=own)
