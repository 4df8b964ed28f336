"""What auto.py has decided so far, and the time that it has used, so that the same command goes on after a kill."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.machine.stopping import BEGAN
from utils.errors import UserError
from utils.log import LOG, log, unheard
from utils.record.folder_lock import LOCK, FolderLock
from utils.record.run_folder import write_json
from utils.text import clock
from vitamp.files import read_json, write_atomically


class Record:
    """The file auto.json in the folder of all results, which is written after each decision."""

    def __init__(self, folder: Path, asked: dict[str, Any], limit: float, lock: FolderLock | None = None) -> None:
        """Read the record of an earlier call with the same words, or begin one.

        `asked`: what the command line asks for, without the time. `limit`: seconds that all calls may take together.
        `lock`: takes the folder, so that no other call uses it meanwhile.
        """
        self.folder = folder
        self.limit = limit
        self._file = folder / "auto.json"
        if not self._file.exists() and folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder}: is not empty and has no auto.json; name another -output.")
        folder.mkdir(parents=True, exist_ok=True)
        if lock is not None:
            lock.take(folder)
        self.content: dict[str, Any] = {"asked": asked, "seconds": 0.0, "stages": {}}
        if self._file.exists():
            before = read_json(self._file)
            if before.get("asked") == asked:
                self.content = before
            elif "probes" in before.get("stages", {}):
                raise UserError(f"{folder}: has the results of another command (auto.json); name another -output.")
        self._seconds_before = self.content["seconds"] + self._seconds_after_saving()

    def _seconds_after_saving(self) -> float:
        """Return for how long the runs of an earlier call have logged after the record was written; 0 without any.

        A call that was killed could not write how much time its last run had used.
        """
        if not self._file.exists():
            return 0.0
        logged = [log_file.stat().st_mtime for log_file in self.folder.rglob(LOG)]
        return max(0.0, max(logged, default=0.0) - self._file.stat().st_mtime)

    @property
    def used(self) -> float:
        """Seconds that this call and earlier ones have taken."""
        return self._seconds_before + time.monotonic() - BEGAN

    @property
    def left(self) -> float:
        return self.limit - self.used

    def save(self, **decided: Any) -> None:
        """Write the record with these decisions, and the time that is used."""
        self.content |= decided
        self.content["seconds"] = round(self.used, 1)
        write_json(self._file, self.content)

    def say(self, line: str) -> None:
        """Print a line about the progress of a stage, whose other lines are dropped."""
        level = log.level
        log.setLevel(logging.INFO)
        log.info("%s", line)
        log.setLevel(level)

    def stage(self, name: str, work: Callable[[], list[str]]) -> None:
        """Do a stage and print the lines that it returns; those of a stage that is done are printed again."""
        stages = self.content["stages"]
        if name not in stages:
            log.info("%s ... (%s left)", name, clock(max(self.left, 0)))
            with unheard(logging.WARNING):
                stages[name] = work()
            self.save()
        log.info("%s", "\n".join(stages[name]))
        text = "\n".join("\n".join(lines) for lines in stages.values())
        write_atomically(self.folder / "answer.txt", f"{text}\n")
