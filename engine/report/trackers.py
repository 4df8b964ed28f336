"""Sends metrics to Weights & Biases and MLflow. This module is imported only if WANDB or MLFLOW is set.

Each update is sent once, also after a resume, and no failure of a service ends training.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.measure.meters import Best
from utils.config import Config
from utils.config.keys import values_by_key
from utils.errors import UserError, first_line
from utils.log import log
from utils.record.history import History
from utils.record.run_folder import versions
from utils.text import redacted, redacted_values
from vitamp.files import parse_json, read_regular, write_atomically
from vitamp.metrics import SETS, TASKS

if TYPE_CHECKING:
    import wandb

LONGEST_TAG = 64
"""Most characters of a tag at Weights & Biases"""
MOST_PARAMETERS = 100
"""MLflow's limit for one request"""
MLFLOW_DEFAULTS = {
    # mlflow's own defaults are two minutes and seven retries, for which training would wait.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of mlflow that are set unless the user has set them"""


def check_project(key: str, name: str) -> None:
    """Raise UserError if the package is missing, or for a name that the service would refuse once training has begun.

    `key`: the setting that names the project, WANDB or MLFLOW. `name`: its value.
    """
    package = key.lower()
    # The installed packages are listed, not imported: an import would take a folder "wandb", which wandb makes, for the
    # package. mlflow-skinny, the smaller package of MLflow, can send metrics to a server, too.
    if not versions(package, f"{package}-skinny"):
        raise UserError(
            f"{key} {name}: the package {package} is not installed. Run: pip install {package}   or leave {key} out."
        )
    if key == "WANDB" and (len(name) > 128 or set(name) & set("/\\#?%:")):
        raise UserError(
            f"WANDB {name}: name a project, with at most 128 characters and none of / \\ # ? % : in its name; the "
            "environment variable WANDB_ENTITY names the team."
        )


def _begin_wandb(config: Config, folder: Path, run_id: str | None, settings: dict[str, Any]) -> wandb.Run:
    """Begin a run at Weights & Biases, or resume the one with the id `run_id`. `settings`: to be shown there."""
    # At the start, engine/entry.py hides the package by an entry None, which must go before it can be imported.
    is_hidden = "wandb" in sys.modules and sys.modules["wandb"] is None
    if is_hidden:
        del sys.modules["wandb"]
    import wandb

    tags = [settings["precision"]]
    if config.TAG:
        tags.append(config.TAG[:LONGEST_TAG])
    run = wandb.init(
        project=config.WANDB,
        dir=folder,
        id=run_id,
        name=folder.name,
        resume="allow",
        config=settings,
        tags=tags,
        allow_val_change=True,
        settings=wandb.Settings(
            # The run's own log keeps what is printed, and its run.json the command and the state of git.
            console="off",
            silent=True,
            disable_code=True,
            init_timeout=30,
            login_timeout=60,
            finish_timeout=30,
        ),
    )
    if run.disabled and os.environ.get("WANDB_MODE") != "disabled":  # wandb asked for a key, and nobody answered
        raise UserError("nobody is logged in")
    if run.url:
        log.info("Weights & Biases: the metrics go to %s", run.url)
    run.define_metric("update")
    run.define_metric("train/*", step_metric="update")
    run.define_metric("val/*", step_metric="update")
    for kind in TASKS:
        for which in SETS:
            run.define_metric(f"val/{which.prefix}{kind.best.name}", step_metric="update", summary="max")
    return run


class MlflowRun:
    """A run at MLflow, with the methods that a run of Weights & Biases has."""

    def __init__(self, config: Config, folder: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        """Begin a run, or resume the one with the id `run_id`. `settings`: `precision` among them becomes a tag."""
        for key, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(key, value)
        mlflow = importlib.import_module("mlflow")
        project = str(config.MLFLOW)
        self._metric = mlflow.entities.Metric
        parameter = mlflow.entities.Param
        for package in ("mlflow", "alembic"):
            logging.getLogger(package).setLevel(logging.WARNING)  # they log how tables of a new store are made
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(uri)
        self.summary = SimpleNamespace(update=self._log_best)  # a run of Weights & Biases has `summary.update`
        if run_id:
            self.id = run_id
            self._client.update_run(run_id, status="RUNNING")
        else:
            existing = self._client.get_experiment_by_name(project)
            experiment = existing.experiment_id if existing else self._client.create_experiment(project)
            tags = {"precision": settings["precision"], "tag": config.TAG or ""}
            self.id: str = self._client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
            parameters = [parameter(key, redacted(str(value))) for key, value in values_by_key(config).items()]
            # They are sent only now: a resumed run may have other values, but MLflow does not allow to change them.
            for start in range(0, len(parameters), MOST_PARAMETERS):
                self._client.log_batch(self.id, params=parameters[start : start + MOST_PARAMETERS])
        log.info("MLflow: the metrics go to the experiment %s in %s", project, redacted(uri))

    def log(self, values: dict[str, float]) -> None:
        """Send metrics by name; "update" among them is the update that they are of."""
        milliseconds = int(1000 * time.time())
        step = int(values["update"])
        metrics = [self._metric(name, value, milliseconds, step) for name, value in values.items() if name != "update"]
        self._client.log_batch(self.id, metrics=metrics)

    def _log_best(self, best: dict[str, float]) -> None:
        self.log({**best, "update": best["best/update"]})

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self.id, "FAILED" if exit_code else "FINISHED")


class Service(NamedTuple):
    """A service that a run can send its metrics to."""

    title: str
    begin: Callable[..., wandb.Run | MlflowRun]
    instead: str = ""
    """Advice for a machine where it cannot be used"""


SERVICES = {
    "WANDB": Service(
        "Weights & Biases",
        _begin_wandb,
        "; WANDB_MODE=offline keeps the metrics in the run's folder, for `wandb sync`",
    ),
    "MLFLOW": Service("MLflow", MlflowRun),
}
"""By the setting that names a project"""


class TrackedRun:
    """The run at a service, which is the same for all starts of a run here. Only rank 0 has one."""

    def __init__(self, key: str, config: Config, folder: Path, precision: str) -> None:
        """Begin or resume the run at the service. If that fails, warn, and send nothing.

        `key`: the setting that names the project, WANDB or MLFLOW.
        """
        # Earlier starts of this run have sent the updates up to the last one in metrics.jsonl.
        history = History.of_run(folder)
        self._last_sent = dict[str, int]()
        """Last update whose metrics were sent, by their group: train or val"""
        for group in ("train", "val"):
            self._last_sent[group] = max((line.get("update", -1) for line in history.of(group)), default=-1)
        self._run: wandb.Run | MlflowRun | None = None
        self._service = SERVICES[key]
        self._succeeded = False
        failure = f"cannot be used{self._service.instead}"
        self._attempt(failure, self._begin, key, config, folder, precision)

    def _begin(self, key: str, config: Config, folder: Path, precision: str) -> None:
        """Begin the run at the service, or resume it there by its id, which a file in the run's folder keeps."""
        id_file = folder / f"{key.lower()}.json"
        try:
            run_id = str(parse_json(read_regular(id_file))["id"])
        except (OSError, ValueError, KeyError, TypeError):  # the service does not have this run yet
            run_id = None
            self._last_sent = {}  # earlier starts had no service, so nothing was sent
        settings = {**redacted_values(config.model_dump(mode="json")), "precision": precision}
        run = self._service.begin(config, folder, run_id, settings)
        if run_id is None:
            write_atomically(id_file, json.dumps({"project": getattr(config, key), "id": run.id}) + "\n")
        self._run = run

    def add(self, group: str, values: dict[str, float], update: int) -> None:
        """Send the finite values, unless they were sent before: a resumed run repeats some updates."""
        if self._run is not None and update > self._last_sent.get(group, -1):
            finite = {f"{group}/{name}": value for name, value in values.items() if math.isfinite(value)}
            self._attempt("no longer answers", self._run.log, {"update": update, **finite})

    def ended(self, best: Best) -> None:
        """Report success, at the end of training or when it is paused. Otherwise `close` reports a failure."""
        self._succeeded = True
        if self._run is not None and best.figure is not None:
            summary = {f"best/{best.kind}": best.figure, "best/epoch": best.epoch, "best/update": best.update}
            self._attempt("no longer answers", self._run.summary.update, summary)

    def close(self) -> None:
        """End the run at the service, as failed unless `ended` was called."""
        run = self._run
        self._run = None
        if run is not None:
            self._attempt("did not accept the last metrics", run.finish, 0 if self._succeeded else 1)

    def _attempt(self, failure: str, call: Callable[..., Any], *args: Any) -> None:
        """Call the service. If it fails, warn that it `failure`, such as "no longer answers", and send nothing more."""
        try:
            call(*args)
        except Exception as error:
            self._run = None
            log.warning(
                "%s %s (%s); the run is not affected.", self._service.title, failure, redacted(first_line(error))
            )
