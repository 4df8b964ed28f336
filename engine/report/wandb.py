"""Weights & Biases: the figures of TensorBoard's board, sent to a project there. It may fail at anything but training.

Nothing of it is imported unless WANDB names a project.
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
GONE = "does not answer any more"


def check_wandb(project: str | None) -> None:
    """Before anything is built: is the package there that the setting asks for?"""
    if project is None:
        return
    try:
        version("wandb")  # not by its name: a folder `wandb`, which it makes itself, would pass for that
    except PackageNotFoundError:
        raise UserError(
            f"WANDB {project}: the package of Weights & Biases is missing. Run: pip install wandb   or leave WANDB out."
        ) from None


def open_board(config: Config, folder: Path, precision: str, metrics: Path) -> WandbBoard | None:
    """None where WANDB is off. `metrics`: what earlier processes of this run told, and so have sent."""
    if config.WANDB is None:
        return None
    tags = [precision, *([config.TAG] if config.TAG else [])]
    about = {**config.model_dump(mode="json"), "precision": precision}
    return WandbBoard(config.WANDB, folder, about, tags, _last_told(metrics))


class WandbBoard:
    """One run there for all starts of one run here. Only rank 0 has one."""

    def __init__(
        self, project: str, folder: Path, about: dict[str, Any], tags: list[str], told: dict[str, int]
    ) -> None:
        """`told`: train or val -> the last update whose figures were sent before."""
        self._project, self._folder, self._told = project, folder, told
        self._run: wandb.Run | None = None
        self._went_well = False
        self._attempt("cannot be used", self._begin, about, tags)

    def add(self, group: str, figures: dict[str, float], update: int) -> None:
        """What goes on from a checkpoint repeats some updates; their points are there already."""
        if self._run is None or update <= self._told.get(group, -1):
            return
        named = {f"{group}/{name}": value for name, value in figures.items() if math.isfinite(value)}
        self._attempt(GONE, self._run.log, {"update": update, **named})

    def ended(self, best: Best) -> None:
        """At the end of training, or where it pauses. Without this, `close` tells of a failure."""
        self._went_well = True
        if self._run is not None and best.figure is not None:
            found = {f"best/{best.kind}": best.figure, "best/epoch": best.epoch, "best/update": best.update}
            self._attempt(GONE, self._run.summary.update, found)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._attempt("did not take the last figures", run.finish, 0 if self._went_well else 1)

    def _begin(self, about: dict[str, Any], tags: list[str]) -> None:
        let_wandb_in()
        import wandb

        name = self._identity()
        settings = wandb.Settings(
            # The run's own log keeps what is printed; and its folder tells the command and the state of git.
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
            self._run = self._online_or_kept(begin)
        self._run.define_metric("update")
        self._run.define_metric("train/*", step_metric="update")
        self._run.define_metric("val/*", step_metric="update")
        for figure in ("val/acc1", "val/ema_acc1"):
            self._run.define_metric(figure, step_metric="update", summary="max")

    def _online_or_kept(self, begin: Callable[[Any], wandb.Run]) -> wandb.Run:
        """Where nobody is logged in, or the service is out of reach, the figures are kept, to be sent later."""
        import wandb

        try:
            run = begin("online")
            if not run.disabled:  # so it is where nobody answered its question for the key
                log.info("Weights & Biases: the figures go to %s", run.url)
                return run
            why = "nobody is logged in"
        except Exception as error:
            why = _first_line(error)
        log.warning(
            "Weights & Biases cannot be reached (%s). The figures are kept in %s; `wandb sync` sends them later.",
            why,
            self._folder / "wandb",
        )
        wandb.teardown()  # or the attempt before would keep the run's name for itself
        return begin("offline")

    def _identity(self) -> str:
        """The run's name over there, the same after every resume."""
        note = self._folder / NOTE
        try:
            return str(json.loads(note.read_text(encoding="utf-8"))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            self._told = {}  # by a process that sent nothing
            name = secrets.token_hex(4)
            write_atomically(note, json.dumps({"project": self._project, "id": name}) + "\n")
            return name

    def _attempt(self, trouble: str, call: Callable[..., Any], *args: Any) -> None:
        """Whatever goes wrong over there is told once, and nothing more is sent."""
        try:
            call(*args)
        except Exception as error:
            self._run = None
            log.warning("Weights & Biases %s (%s); training goes on without it.", trouble, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _last_told(metrics: Path) -> dict[str, int]:
    """Event -> the last update that it was told of."""
    told: dict[str, int] = {}
    try:
        for line in map(json.loads, metrics.read_text(encoding="utf-8", errors="replace").splitlines()):
            told[line["event"]] = max(line["update"], told.get(line["event"], -1))
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or the last line was cut short
        return told
    return told
