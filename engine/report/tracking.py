"""The experiment trackers there are, by the setting that names their project (docs/trackers.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from utils.config import Config
from utils.errors import UserError
from utils.passwords import redacted_values
from utils.record.history import History

if TYPE_CHECKING:
    from engine.report.tracker import TrackedRun, Tracker

NOTES = {"WANDB": "wandb.json", "MLFLOW": "mlflow.json"}
"""Setting of each tracker -> file in the run's folder with the id of the run at the service."""


def _tracker(setting: str) -> Tracker:
    if setting == "WANDB":
        from engine.report.wandb import Wandb

        return Wandb()
    from engine.report.mlflow import Mlflow

    return Mlflow()


def check_trackers(config: Config) -> None:
    """Check that the packages of the trackers in use are installed."""
    missing = {setting: _tracker(setting).missing() for setting in _projects(config)}
    lines = [
        f"{setting} {getattr(config, setting)}: {what}   or leave {setting} out."
        for setting, what in missing.items()
        if what is not None
    ]
    if lines:
        raise UserError("\n".join(lines))


def open_trackers(config: Config, folder: Path, precision: str) -> list[TrackedRun]:
    """Start or resume the run at each tracker in use."""
    projects = _projects(config)
    if not projects:
        return []
    from engine.report.tracker import About, TrackedRun

    sent = _last_updates(History.of_run(folder))
    settings = redacted_values(config.model_dump(mode="json"))
    return [
        TrackedRun(_tracker(setting), About(project, folder, NOTES[setting], settings, precision, config.TAG), sent)
        for setting, project in projects.items()
    ]


def _projects(config: Config) -> dict[str, str]:
    """Setting -> project of the trackers in use."""
    return {setting: project for setting in NOTES if (project := getattr(config, setting)) is not None}


def _last_updates(history: History) -> dict[str, int]:
    """Event -> the last update in metrics.jsonl: earlier starts of this run have sent them."""
    return {kind: max((line.get("update", -1) for line in history.of(kind)), default=-1) for kind in ("train", "val")}
