"""MLflow. mlflow is imported only if MLFLOW names an experiment."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from engine.report.tracker import About, Note, is_installed
from utils.log import log
from utils.passwords import redacted

URI = "MLFLOW_TRACKING_URI"
STORE = "mlflow.db"
"""SQLite file in the run's folder, where the metrics go without MLFLOW_TRACKING_URI."""
DEFAULTS = {
    # Its own are two minutes and seven retries, and training waits.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of mlflow that are set unless the user has set them."""
MOST_PARAMETERS = 100
"""MLflow's limit for one request."""


class Mlflow:
    title = "MLflow"
    _client: Any
    _run: str

    def missing(self) -> str | None:
        if not any(map(is_installed, ("mlflow", "mlflow-skinny"))):
            return "the package mlflow is not installed. Run: pip install mlflow"
        if os.environ.get(URI) or all(map(is_installed, ("sqlalchemy", "alembic"))):
            return None
        return (
            f"the package mlflow-skinny can only send metrics to a server, and {URI} is not set. "
            "Set it, or run: pip install mlflow"
        )

    def begin(self, about: About, note: Note) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        mlflow: Any = import_module("mlflow")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they report how a new store's tables are made
        uri = os.environ.get(URI) or f"sqlite:///{about.folder.resolve() / STORE}"
        self._client = mlflow.MlflowClient(uri)
        if note.id is not None:
            self._client.update_run(note.id, status="RUNNING")
        else:
            tags = {"precision": about.precision} | ({"tag": about.tag} if about.tag else {})
            run = self._client.create_run(self._experiment(about.project), tags=tags, run_name=about.folder.name)
            note.write(run.info.run_id, experiment=about.project)
            # Of the first start: MLflow does not allow to change them.
            parameters = [mlflow.entities.Param(key, str(value)) for key, value in _flat(about.settings)]
            for first in range(0, len(parameters), MOST_PARAMETERS):
                self._client.log_batch(note.id, params=parameters[first : first + MOST_PARAMETERS])
        self._run, self._metric = str(note.id), mlflow.entities.Metric
        log.info("MLflow: the metrics go to the experiment %s in %s", about.project, redacted(uri))

    def _experiment(self, name: str) -> str:
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except Exception:
            if found := self._client.get_experiment_by_name(name):  # another run has just made it
                return found.experiment_id
            raise

    def add(self, values: dict[str, float], update: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[self._metric(key, v, now, update) for key, v in values.items()])

    def ended(self, best: dict[str, Any]) -> None:
        self.add(best, best["best/update"])

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, status="FINISHED" if succeeded else "FAILED")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
