"""The experiment trackers there are, by the setting that names their project (docs/trackers.md)."""

from __future__ import annotations

from pathlib import Path

from engine.report.mlflow import Mlflow
from engine.report.tracker import About, TrackedRun, Tracker
from engine.report.wandb import Wandb
from utils.config import Config
from utils.errors import UserError
from utils.passwords import redacted_values
from utils.record.history import History

TRACKERS: dict[str, type[Tracker]] = {"WANDB": Wandb, "MLFLOW": Mlflow}


def check_trackers(config: Config) -> None:
    """Check that the packages of the trackers in use are installed."""
    missing = {setting: TRACKERS[setting]().missing() for setting in _projects(config)}
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
    sent = _last_updates(History.of_run(folder)) if projects else {}
    settings = redacted_values(config.model_dump(mode="json"))
    return [
        TrackedRun(TRACKERS[setting](), About(project, folder, settings, precision, config.TAG), sent)
        for setting, project in projects.items()
    ]


def _projects(config: Config) -> dict[str, str]:
    """Setting -> project of the trackers in use."""
    return {setting: project for setting in TRACKERS if (project := getattr(config, setting)) is not None}


def _last_updates(history: History) -> dict[str, int]:
    """Event -> the last update in metrics.jsonl: earlier starts of this run have sent them."""
    return {kind: max((line.get("update", -1) for line in history.of(kind)), default=-1) for kind in ("train", "val")}
