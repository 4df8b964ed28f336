"""A fake of the package mlflow: a client that stores everything in a JSON file, where mlflow would use SQLite.

Like the real one, it refuses parameters that change, and more than 100 of them at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Param(NamedTuple):
    key: str
    value: str


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


entities = SimpleNamespace(Param=Param, Metric=Metric)


class MlflowClient:
    def __init__(self, uri: str) -> None:
        scheme, _, path = uri.partition("://")
        if scheme != "sqlite":
            raise ConnectionError(f"no answer from {uri}")
        self._file = Path(path[1:])
        self._all: dict[str, Any] = {"experiments": [], "runs": {}}
        if self._file.exists():
            self._all = json.loads(self._file.read_text())

    def _save(self) -> None:
        self._file.write_text(json.dumps(self._all))

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self._all["experiments"] else None

    def create_experiment(self, name: str) -> str:
        self._all["experiments"].append(name)
        self._save()
        return name

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> Any:
        name = f"run{len(self._all['runs'])}"
        about = {"experiment": experiment_id, "name": run_name, "tags": tags, "status": "RUNNING"}
        self._all["runs"][name] = {**about, "params": {}, "metrics": {}}
        self._save()
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        run = self._all["runs"][run_id]
        assert len(params) <= 100
        for param in params:
            assert run["params"].setdefault(param.key, param.value) == param.value
        for metric in metrics:
            run["metrics"].setdefault(metric.key, []).append([metric.step, metric.value])
        self._save()

    def update_run(self, run_id: str, status: str) -> None:
        self._all["runs"][run_id]["status"] = status
        self._save()

    set_terminated = update_run
