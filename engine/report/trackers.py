"""Experiment trackers: services that get a run's metrics beside TensorBoard. Imported only where a setting names one.

A new one is a class with the methods of `Tracker` and a line in `TRACKERS`. `TrackedRun` sends each update once, also
after a resume, and no failure of a service ends training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.measure.progress import Best
from utils.config import Config
from utils.errors import UserError
from utils.log import log
from utils.passwords import redacted, redacted_values
from utils.record.history import History
from vitamp.files import parse_json, read_regular_text, write_atomically
from vitamp.metrics import SETS, TASKS

if TYPE_CHECKING:
    import wandb

SECONDS_TO_BEGIN, SECONDS_TO_LOG_IN, SECONDS_TO_END = 30, 60, 30
"""Of Weights & Biases"""
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


@dataclass(frozen=True)
class About:
    """Description of a run for its tracker."""

    project: str
    """The value of the tracker's setting."""
    folder: Path
    settings: dict[str, Any]
    """All settings, by section."""
    precision: str
    tag: str | None


class Note:
    """File in the run's folder with the id of the run at the service, which a resumed run continues there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id: str | None = None
        try:
            self.id = str(parse_json(read_regular_text(path))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return

    def write(self, run_id: str, **others: str) -> str:
        self.id = run_id
        write_atomically(self._path, json.dumps({**others, "id": run_id}) + "\n")
        return run_id


class Tracker(Protocol):
    """Client of one service. Its methods may raise: then nothing more is sent, and the log says so once."""

    title: str
    """Name of the service, for the log."""

    def missing(self) -> str | None:
        """What has to be installed first; None if nothing. It imports nothing."""
        ...

    def begin(self, about: About, note: Note) -> None:
        """Start the run, or continue the one in `note`."""
        ...

    def add(self, values: dict[str, float], update: int) -> None:
        """Send metrics by their names, such as train/loss. All are finite."""
        ...

    def ended(self, best: dict[str, Any]) -> None:
        """Send the best metric, its epoch and update."""
        ...

    def close(self, succeeded: bool) -> None: ...


class TrackedRun:
    """Run at a service, the same one for all starts of a run here. Only rank 0 has one."""

    def __init__(self, tracker: Tracker, about: About, note: Note, sent: dict[str, int]) -> None:
        """`sent`: train or val -> the last update in metrics.jsonl, which an earlier start of this run has sent."""
        self._tracker: Tracker | None = tracker
        self._title = tracker.title
        self._sent = {} if note.id is None else sent
        self._succeeded = False
        self._attempt("cannot be used", tracker.begin, about, note)

    def add(self, group: str, values: dict[str, float], update: int) -> None:
        """Send the finite values, unless they were sent before: a resumed run repeats some updates."""
        if self._tracker is None or update <= self._sent.get(group, -1):
            return
        named = {f"{group}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._attempt("no longer answers", self._tracker.add, named, update)

    def ended(self, best: Best) -> None:
        """Report success, at the end of training or when it is paused. Otherwise `close` reports a failure."""
        self._succeeded = True
        if self._tracker is not None and best.figure is not None:
            summary = {f"best/{best.kind}": best.figure, "best/epoch": best.epoch, "best/update": best.update}
            self._attempt("no longer answers", self._tracker.ended, summary)

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._attempt("did not accept the last metrics", tracker.close, self._succeeded)

    def _attempt(self, failure: str, call: Callable[..., Any], *args: Any) -> None:
        """Call it; if it fails, warn once and send nothing more."""
        try:
            call(*args)
        except Exception as error:
            self._tracker = None
            log.warning("%s %s (%s); the run is not affected.", self._title, failure, first_line(error))


def first_line(error: Exception) -> str:
    return redacted((str(error).strip() or type(error).__name__).partition("\n")[0])


def is_installed(package: str) -> bool:
    """Whether a package is installed. Importing would not do: a folder of its name, as some make, passes for it."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


class Wandb:
    title = "Weights & Biases"
    _run: wandb.Run

    def missing(self) -> str | None:
        return None if is_installed("wandb") else "the package wandb is not installed. Run: pip install wandb"

    def begin(self, about: About, note: Note) -> None:
        if sys.modules.get("wandb", sys) is None:  # hidden at the start (engine/entry.py)
            del sys.modules["wandb"]
        import wandb

        name = note.id or note.write(secrets.token_hex(4), project=about.project)
        settings = wandb.Settings(
            # The run's own log keeps what is printed, and its run.json the command and the state of git.
            console="off",
            silent=True,
            disable_code=True,
            init_timeout=SECONDS_TO_BEGIN,
            login_timeout=SECONDS_TO_LOG_IN,
            finish_timeout=SECONDS_TO_END,
        )

        def begin(mode: Any) -> wandb.Run:
            return wandb.init(
                project=about.project,
                dir=about.folder,
                id=name,
                name=about.folder.name,
                resume="allow",
                config={**about.settings, "precision": about.precision},
                tags=[about.precision, *([about.tag] if about.tag else [])],
                allow_val_change=True,
                mode=mode,
                settings=settings,
            )

        if os.environ.get("WANDB_MODE", "online") != "online":
            self._run = begin(None)
        else:
            self._run = _online_or_offline(begin, about.folder)
        self._run.define_metric("update")
        self._run.define_metric("train/*", step_metric="update")
        self._run.define_metric("val/*", step_metric="update")
        for figure in (f"{which.prefix}{kind.best.name}" for kind in TASKS for which in SETS):
            self._run.define_metric(f"val/{figure}", step_metric="update", summary="max")

    def add(self, values: dict[str, float], update: int) -> None:
        self._run.log({"update": update, **values})

    def ended(self, best: dict[str, Any]) -> None:
        self._run.summary.update(best)

    def close(self, succeeded: bool) -> None:
        self._run.finish(0 if succeeded else 1)


def _online_or_offline(begin: Callable[[Any], wandb.Run], folder: Path) -> wandb.Run:
    """Start online. Without a login, or if the service cannot be reached, start offline, to be sent later."""
    import wandb

    try:
        run = begin("online")
        if not run.disabled:  # disabled: nobody answered its question for the key
            log.info("Weights & Biases: the metrics go to %s", run.url)
            return run
        why = "nobody is logged in"
    except Exception as error:
        why = first_line(error)
    log.warning(
        "Weights & Biases cannot be used online (%s). The metrics are kept in %s; `wandb sync` sends them later.",
        why,
        folder / "wandb",
    )
    wandb.teardown()  # otherwise the failed attempt keeps the run's id
    return begin("offline")


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


TRACKERS: dict[str, tuple[type[Tracker], str]] = {"WANDB": (Wandb, "wandb.json"), "MLFLOW": (Mlflow, "mlflow.json")}
"""Setting that names a project -> its tracker, and the file in the run's folder with the id of the run there."""


def check_trackers(config: Config) -> None:
    """Check that the packages of the trackers in use are installed."""
    lines = [
        f"{setting} {getattr(config, setting)}: {missing}   or leave {setting} out."
        for setting, (tracker, _) in TRACKERS.items()
        if getattr(config, setting) is not None and (missing := tracker().missing()) is not None
    ]
    if lines:
        raise UserError("\n".join(lines))


def open_trackers(config: Config, folder: Path, precision: str) -> list[TrackedRun]:
    """Start or resume the run at each tracker in use."""
    history = History.of_run(folder)
    # The last update in metrics.jsonl: earlier starts of this run have sent those up to it.
    sent = {kind: max((line.get("update", -1) for line in history.of(kind)), default=-1) for kind in ("train", "val")}
    settings = redacted_values(config.model_dump(mode="json"))
    return [
        TrackedRun(tracker(), About(project, folder, settings, precision, config.TAG), Note(folder / note), sent)
        for setting, (tracker, note) in TRACKERS.items()
        if (project := getattr(config, setting)) is not None
    ]
