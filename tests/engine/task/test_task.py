"""That every metric which is computed has a name and words in utils/record/tasks.py."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from engine.task.base import Metrics
from engine.task.one import ValidationMeans
from engine.task.several import LabelMetrics
from utils.record.tasks import METRICS, ONE_LABEL, SEVERAL_LABELS, BestBy, TaskKind


@pytest.mark.parametrize(("metrics", "kind"), [(ValidationMeans, ONE_LABEL), (LabelMetrics, SEVERAL_LABELS)])
def test_computed_metrics_are_those_of_the_task(metrics: type[Metrics], kind: TaskKind) -> None:
    computed = {field.name for field in fields(metrics)} - {"thresholds", "more"}  # pyright: ignore[reportArgumentType]
    assert computed == {metric.name for metric in kind.metrics}
    assert kind.best in kind.metrics


def test_save_best_by_names_metrics() -> None:
    assert METRICS.keys() >= {*get_args(BestBy)}
    assert {kind.best.name for kind in (ONE_LABEL, SEVERAL_LABELS)} <= {*get_args(BestBy)}
