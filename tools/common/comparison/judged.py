"""What decides a comparison: a metric of the task, of the plain or the averaged weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.config import Config
from utils.config.keys import value_of
from utils.errors import UserError, nearest
from utils.record.tasks import ONE_LABEL, Metric, metric_named
from utils.record.weight_sets import AVERAGE, PLAIN, WeightSet, set_named


@dataclass(frozen=True)
class Judged:
    metric: Metric
    weights: WeightSet
    """Runs without them are judged by their plain weights."""

    @property
    def words(self) -> str:
        """In sentences."""
        return "accuracy" if self.metric is ONE_LABEL.best else self.metric.words

    @property
    def whose(self) -> str:
        """Of which weights, where that is not plain."""
        return f", of the {self.weights.label} in runs that have one" if self.weights is not PLAIN else ""

    @property
    def digits(self) -> int:
        """After the point, in a mean."""
        return 1 if self.metric.percent else 4

    def signed(self, value: float, sign: str = "+") -> str:
        """A difference without its unit."""
        return f"{value:{sign}.{2 if self.metric.percent else 4}f}"

    def difference(self, value: float, sign: str = "") -> str:
        return self.signed(value, sign) + (" points" if self.metric.percent else "")

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Its value after the last epoch of a run."""
        of_set = row.get(f"last_{self.weights.prefix}{self.metric.name}")
        return row.get(f"last_{self.metric.name}") if of_set is None else of_set

    def values(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [value for row in rows if (value := self.of(row)) is not None]

    def as_noted(self) -> dict[str, str]:
        return {"metric": self.metric.name, "weights": self.weights.name}


def judged_of(about: Mapping[str, Any]) -> Judged:
    """Of a compare.json; one of earlier versions compared the accuracy of plain weights."""
    name = about.get("metric", ONE_LABEL.best.name)
    metric = metric_named(name)
    return Judged(metric, set_named(about.get("weights", PLAIN.name)))


def judged_by(name: str | None, weights: str | None, configs: Sequence[Config]) -> Judged:
    """-metric and -weights. By default the task's best metric; of the average if only some of the runs have one."""
    kinds = {config.task for config in configs}
    if len(kinds) > 1:
        raise UserError("DATA.MULTI_LABEL cannot be varied: the metrics of one and of several labels differ.")
    (kind,) = kinds
    own = [metric_named(name) for config in configs for name in config.VALIDATE_METRICS]
    known = {metric.name: metric for metric in (*kind.metrics, *own)}
    if name is not None and name not in known:
        raise UserError(
            f"-metric {name}: not a metric of these runs.{nearest(name, known)} It takes {', '.join(known)}."
        )
    averaging = {bool(value_of(config, AVERAGE.setting)) for config in configs}
    if weights == AVERAGE.name and averaging == {False}:
        raise UserError(f"-weights {weights}: no run has an {AVERAGE.label}; it needs {AVERAGE.setting}=true.")
    default = AVERAGE if len(averaging) > 1 else PLAIN
    return Judged(known[name] if name else kind.best, set_named(weights) if weights else default)
