"""Weights & Biases, which gets a run's metrics beside TensorBoard. Imported only where WANDB is set.

Each update is sent once, also after a resume, and no failure of the service ends training.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.measure.meters import Best
from utils.config import Config
from utils.errors import UserError, first_line
from utils.log import log
from utils.record.history import History
from utils.record.run_folder import versions
from utils.text import redacted, redacted_values
from vitamp.files import parse_json, read_regular, write_atomically
from vitamp.metrics import SETS, TASKS

if TYPE_CHECKING:
    import wandb

NOTE = "wandb.json"
"""File in the run's folder with the id of the run at the service, which a resumed run continues there."""
LONGEST_TAG = 64
"""Characters; the service takes no longer one."""


def check_project(name: str) -> None:
    """Refuse what the service would refuse only once training has begun."""
    # Not an import, which would take a folder of its name, as wandb makes, for the package.
    if not versions("wandb"):
        raise UserError(
            f"WANDB {name}: the package wandb is not installed. Run: pip install wandb   or leave WANDB out."
        )
    if len(name) > 128 or set(name) & set("/\\#?%:"):
        raise UserError(
            f"WANDB {name}: name a project, with at most 128 characters and none of / \\ # ? % : in its name; the "
            "environment variable WANDB_ENTITY names the team."
        )


class TrackedRun:
    """Run at the service, the same one for all starts of a run here. Only rank 0 has one."""

    def __init__(self, config: Config, folder: Path, precision: str) -> None:
        # The last update in metrics.jsonl: earlier starts of this run have sent those up to it.
        history = History.of_run(folder)
        self._sent = {
            kind: max((line.get("update", -1) for line in history.of(kind)), default=-1) for kind in ("train", "val")
        }
        self._run: wandb.Run | None = None
        self._succeeded = False
        failure = "cannot be used; WANDB_MODE=offline keeps the metrics in the run's folder, for `wandb sync`"
        self._attempt(failure, self._begin, config, folder, precision)

    def _begin(self, config: Config, folder: Path, precision: str) -> None:
        if sys.modules.get("wandb", sys) is None:  # hidden at the start (engine/entry.py)
            del sys.modules["wandb"]
        import wandb

        note = folder / NOTE
        try:
            name = str(parse_json(read_regular(note))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            name, self._sent = secrets.token_hex(4), {}
            write_atomically(note, json.dumps({"project": config.WANDB, "id": name}) + "\n")
        settings = wandb.Settings(
            # The run's own log keeps what is printed, and its run.json the command and the state of git.
            console="off",
            silent=True,
            disable_code=True,
            init_timeout=30,
            login_timeout=60,
            finish_timeout=30,
        )
        run = wandb.init(
            project=config.WANDB,
            dir=folder,
            id=name,
            name=folder.name,
            resume="allow",
            config={**redacted_values(config.model_dump(mode="json")), "precision": precision},
            tags=[precision, *([config.TAG[:LONGEST_TAG]] if config.TAG else [])],
            allow_val_change=True,
            settings=settings,
        )
        if run.disabled and os.environ.get("WANDB_MODE") != "disabled":  # nobody answered its question for the key
            raise UserError("nobody is logged in")
        if run.url:
            log.info("Weights & Biases: the metrics go to %s", run.url)
        run.define_metric("update")
        run.define_metric("train/*", step_metric="update")
        run.define_metric("val/*", step_metric="update")
        for figure in (f"{which.prefix}{kind.best.name}" for kind in TASKS for which in SETS):
            run.define_metric(f"val/{figure}", step_metric="update", summary="max")
        self._run = run

    def add(self, group: str, values: dict[str, float], update: int) -> None:
        """Send the finite values, unless they were sent before: a resumed run repeats some updates."""
        if self._run is not None and update > self._sent.get(group, -1):
            named = {f"{group}/{name}": value for name, value in values.items() if math.isfinite(value)}
            self._attempt("no longer answers", self._run.log, {"update": update, **named})

    def ended(self, best: Best) -> None:
        """Report success, at the end of training or when it is paused. Otherwise `close` reports a failure."""
        self._succeeded = True
        if self._run is not None and best.figure is not None:
            summary = {f"best/{best.kind}": best.figure, "best/epoch": best.epoch, "best/update": best.update}
            self._attempt("no longer answers", self._run.summary.update, summary)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._attempt("did not accept the last metrics", run.finish, 0 if self._succeeded else 1)

    def _attempt(self, failure: str, call: Callable[..., Any], *args: Any) -> None:
        """Call it; if it fails, warn once and send nothing more."""
        try:
            call(*args)
        except Exception as error:
            self._run = None
            log.warning("Weights & Biases %s (%s); the run is not affected.", failure, redacted(first_line(error)))
