"""Runs in the background, made to be killed: starting them, waiting for a moment, and seeing that nothing is left."""

import json
import os
import signal
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launch.clusters import MULTI, SINGLE, Command, marked
from tests.program import Result
from tests.waiting import until

ENDLESS = ("TRAIN.NUM_EPOCHS=100000", "SAVE_FREQ=100000", "VALIDATE_FREQ=100000")


class Run(Command):
    def __init__(
        self, folder: Path, *words: object, ngpus: int = 2, launcher: tuple[str, ...] = (), **env: str
    ) -> None:
        self.folder = folder
        devices = ["-ngpus", ngpus] if ngpus and not launcher else []
        script = MULTI if ngpus else SINGLE
        super().__init__(sys.executable, *launcher, script, *words, "-output", folder, *devices, env=env)

    def wait_for_updates(self, update: int = 3, seconds: float = 90) -> None:
        """Until so many updates have been reported; a run that ends before fails the test."""
        until(lambda: self.process.poll() is not None or reported(self.folder) >= update, seconds)
        assert self.process.poll() is None, f"the run ended before update {update}:\n{self.end(5).text}"

    def end(self, seconds: float) -> Result:
        out, err = self.process.communicate(timeout=seconds)
        return Result(self.process.returncode, out, err)

    def alive(self) -> list[int]:
        """Processes of this run, loading processes included."""
        return marked(self.mark)

    def ranks(self) -> list[int]:
        """The training processes, rank by rank; the launcher is not one of them."""
        by_rank = {}
        for pid in self.alive():
            rank = variable_of(pid, "RANK")
            if rank is not None and variable_of(parent_of(pid), "RANK") is None:
                by_rank[int(rank)] = pid
        return [by_rank[rank] for rank in sorted(by_rank)]

    def loaders(self) -> list[int]:
        """The loading processes of all ranks."""
        ranks = self.ranks() or [self.process.pid]
        return [pid for pid in self.alive() if parent_of(pid) in ranks]

    def kill_all(self) -> None:
        """As if the machine had gone off."""
        while self.alive():
            for pid in self.alive():
                send(pid, signal.SIGKILL)

    def nothing_is_left(self, seconds: float = 15) -> None:
        until(lambda: not self.alive(), seconds)


def reported(folder: Path) -> int:
    """The last update that metrics.jsonl has a report of."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:  # just being written
            continue
        if told["event"] == "train":
            return told["update"]
    return 0


def drawn_curves(run: Path) -> dict[str, list[tuple[int, str]]]:
    """TensorBoard's curves, NaN equal to NaN; but of the speed only where its points are."""
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    points = {tag: [(point.step, repr(point.value)) for point in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    curves = {tag: list(dict.fromkeys(both)) for tag, both in points.items()}  # a resumed run may repeat a validation
    speed = curves.pop("train/images_per_second")
    return {**curves, "speed": [(step, "") for step, _ in speed]}


def send(pid: int, number: int) -> bool:
    """Whether there was somebody to send it to."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def variable_of(pid: int, name: str) -> str | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((word.decode().partition("=")[2] for word in words if word.startswith(f"{name}=".encode())), None)
