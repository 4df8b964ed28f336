"""Experiment trackers: services that get a run's metrics beside TensorBoard. This is what all of them share.

A new one is a class with the methods of `Tracker` and a line in engine/report/tracking.py. `TrackedRun` sends each
update once, also after a resume, and no failure of a service ends training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from engine.measure.progress import Best
from utils.files import parse_json, write_atomically
from utils.log import log
from utils.passwords import redacted


@dataclass(frozen=True)
class About:
    """Description of a run for its tracker."""

    project: str
    """The value of the tracker's setting."""
    folder: Path
    note: str
    """Name of the file of `Note`."""
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
            self.id = str(parse_json(path.read_text(encoding="utf-8"))["id"])
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

    def __init__(self, tracker: Tracker, about: About, sent: dict[str, int]) -> None:
        """`sent`: train or val -> the last update in metrics.jsonl, which an earlier start of this run has sent."""
        note = Note(about.folder / about.note)
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
