"""The task of a run. It depends on the labels: one class per image, several, or none.

It decides the loss, the metrics, and what a prediction is.
"""

from engine.task.base import Task
from utils.config import Config
from vitamp.metrics import NO_LABELS, SEVERAL_LABELS


def task_of(config: Config) -> Task:
    """Build the task that the settings describe."""
    kind = config.task
    own_metrics = config.VALIDATE_METRICS
    if kind == NO_LABELS:
        from engine.task.pixels import NoLabels

        return NoLabels(config.MODEL.NUM_CLASSES)
    if kind == SEVERAL_LABELS:
        from engine.task.several import SeveralLabels

        return SeveralLabels(config.MODEL.NUM_CLASSES, own_metrics=own_metrics)
    from engine.task.one import OneLabel

    return OneLabel(config.MODEL.NUM_CLASSES, own_metrics=own_metrics)
