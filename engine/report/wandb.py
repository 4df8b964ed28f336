"""Weights & Biases: sends the metrics that TensorBoard gets to a project. Its failures never end training.

wandb is imported only if WANDB names a project.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.measure.progress import Best
from engine.report.late_wandb import let_wandb_in
from utils.config import Config
from utils.errors import UserError
from utils.files import write_atomically
from utils.log import log

if TYPE_CHECKING:
    import wandb

NOTE = "wandb.json"
SECONDS_TO_BEGIN, SECONDS_TO_LOG_IN, SECONDS_TO_END = 30, 60, 30
NO_ANSWER = "does not answer any more"


def check_wandb(project: str | None) -> None:
    """Check that the package is installed if WANDB names a project."""
    if project is None:
        return
    try:
        version("wandb")  # importing would not do: a folder `wandb`, which the package itself makes, passes for it
    except PackageNotFoundError:
        raise UserError(
            f"WANDB {project}: the package wandb is not installed. Run: pip install wandb   or leave WANDB out."
        ) from None


def open_board(config: Config, folder: Path, precision: str, metrics: Path) -> WandbBoard | None:
    """Start or resume the run there; None if WANDB is off. `metrics`: what earlier starts of this run have sent."""
    if config.WANDB is None:
        return None
    tags = [precision, *([config.TAG] if config.TAG else [])]
    about = {**config.model_dump(mode="json"), "precision": precision}
    return WandbBoard(config.WANDB, folder, about, tags, _last_sent(metrics))


class WandbBoard:
    """Run at Weights & Biases, the same one for all starts of a run here. Only rank 0 has one."""

    def __init__(
        self, project: str, folder: Path, about: dict[str, Any], tags: list[str], sent: dict[str, int]
    ) -> None:
        """`sent`: train or val -> the last update whose metrics were sent before."""
        self._project, self._folder, self._sent = project, folder, sent
        self._run: wandb.Run | None = None
        self._succeeded = False
        self._attempt("cannot be used", self._begin, about, tags)

    def add(self, group: str, values: dict[str, float], update: int) -> None:
        """Send the finite values, unless they were sent before: a resumed run repeats some updates."""
        if self._run is None or update <= self._sent.get(group, -1):
            return
        named = {f"{group}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._attempt(NO_ANSWER, self._run.log, {"update": update, **named})

    def ended(self, best: Best) -> None:
        """Report success, at the end of training or when it is paused. Otherwise `close` reports a failure."""
        self._succeeded = True
        if self._run is not None and best.figure is not None:
            summary = {f"best/{best.kind}": best.figure, "best/epoch": best.epoch, "best/update": best.update}
            self._attempt(NO_ANSWER, self._run.summary.update, summary)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._attempt("did not take the last metrics", run.finish, 0 if self._succeeded else 1)

    def _begin(self, about: dict[str, Any], tags: list[str]) -> None:
        let_wandb_in()
        import wandb

        name = self._run_id()
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
                project=self._project,
                dir=self._folder,
                id=name,
                name=self._folder.name,
                resume="allow",
                config=about,
                tags=tags,
                allow_val_change=True,
                mode=mode,
                settings=settings,
            )

        if os.environ.get("WANDB_MODE", "online") != "online":
            self._run = begin(None)
        else:
            self._run = self._online_or_offline(begin)
        self._run.define_metric("update")
        self._run.define_metric("train/*", step_metric="update")
        self._run.define_metric("val/*", step_metric="update")
        for figure in ("val/acc1", "val/ema_acc1"):
            self._run.define_metric(figure, step_metric="update", summary="max")

    def _online_or_offline(self, begin: Callable[[Any], wandb.Run]) -> wandb.Run:
        """Start online. Without a login, or if the service cannot be reached, start offline, to be sent later."""
        import wandb

        try:
            run = begin("online")
            if not run.disabled:  # disabled: nobody answered its question for the key
                log.info("Weights & Biases: the metrics go to %s", run.url)
                return run
            why = "nobody is logged in"
        except Exception as error:
            why = _first_line(error)
        log.warning(
            "Weights & Biases cannot be reached (%s). The metrics are kept in %s; `wandb sync` sends them later.",
            why,
            self._folder / "wandb",
        )
        wandb.teardown()  # otherwise the failed attempt keeps the run's id
        return begin("offline")

    def _run_id(self) -> str:
        """Id of the run at Weights & Biases, the same after every resume."""
        note = self._folder / NOTE
        try:
            return str(json.loads(note.read_text(encoding="utf-8"))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            self._sent = {}  # earlier starts sent nothing
            name = secrets.token_hex(4)
            write_atomically(note, json.dumps({"project": self._project, "id": name}) + "\n")
            return name

    def _attempt(self, failure: str, call: Callable[..., Any], *args: Any) -> None:
        """Call it; if it fails, warn once and send nothing more."""
        try:
            call(*args)
        except Exception as error:
            self._run = None
            log.warning("Weights & Biases %s (%s); training continues without it.", failure, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _last_sent(metrics: Path) -> dict[str, int]:
    """Event -> the last update in metrics.jsonl."""
    last: dict[str, int] = {}
    try:
        for line in map(json.loads, metrics.read_text(encoding="utf-8", errors="replace").splitlines()):
            last[line["event"]] = max(line["update"], last.get(line["event"], -1))
    except (OSError, ValueError, KeyError, TypeError):  # no file yet, or the last line was cut short
        return last
    return last
