"""Weights & Biases. wandb is imported only if WANDB names a project."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.report.late_wandb import let_wandb_in
from engine.report.tracker import About, Note, first_line, is_installed
from utils.log import log
from utils.record.tasks import TASKS
from utils.record.weight_sets import SETS

if TYPE_CHECKING:
    import wandb

SECONDS_TO_BEGIN, SECONDS_TO_LOG_IN, SECONDS_TO_END = 30, 60, 30


class Wandb:
    title = "Weights & Biases"
    _run: wandb.Run

    def missing(self) -> str | None:
        return None if is_installed("wandb") else "the package wandb is not installed. Run: pip install wandb"

    def begin(self, about: About, note: Note) -> None:
        let_wandb_in()
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
