"""What a run tells: log lines, metrics.jsonl, TensorBoard, the progress bar. Only rank 0 has one that speaks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.amp.skip_watch import Blame
from engine.measure.bottleneck import Verdict
from engine.measure.meters import Means, Reading
from engine.measure.progress import Position, clock, updates_left
from engine.measure.stage_times import STAGES, TEACHER
from engine.measure.throughput import Perf
from engine.report.tensorboard import Board
from engine.report.wandb import WandbBoard
from utils.config.schema import Config
from utils.files import write_atomically
from utils.line_file import LineFile
from utils.log import log
from utils.run_folder import os_errors_as_user_errors

METRICS = "metrics.jsonl"
FIGURES = ("loss", "acc1", "acc5")
DRAWN = (
    *(*FIGURES, *(f"ema_{name}" for name in FIGURES), "lr", "grad_norm", "scale", "skipped", "images_per_second"),
    *(*(f"{stage}_ms" for stage in (*STAGES, TEACHER)), "mfu"),
)


class Reporter:
    def __init__(
        self,
        config: Config,
        per_epoch: int,
        folder: Path | None,
        speaks: bool,
        start: Position,
        wandb: WandbBoard | None = None,
    ) -> None:
        """`folder` None: nothing is written (another rank, a dry run). `start`: where the run begins or goes on."""
        self.config, self.per_epoch, self.folder = config, per_epoch, folder
        self._fleet = config.LOG_STYLE == "fleet"
        if self._fleet:
            log.info(
                "LOG_STYLE fleet: lines of epochs and batches count from 0, all else (best, metrics.jsonl) from 1."
            )
        self._metrics: LineFile | None = None
        self._board: Board | None = None
        self._wandb = wandb
        self._told: Verdict | None = None
        if folder:
            with os_errors_as_user_errors(folder):
                _forget_after(folder / METRICS, start)
            self._metrics = LineFile(folder / METRICS)
            drawn = (folder / "tensorboard").exists()
            self._board = Board(folder / "tensorboard", start.update)
            self._draw_again(folder / METRICS, start.update if drawn else 0)
        total = start.update + updates_left(config, start, per_epoch)
        on_terminal = speaks and sys.stderr.isatty() and not config.EVAL
        self._bar = tqdm(
            total=total, initial=start.update, unit="update", dynamic_ncols=True, disable=not on_terminal, leave=False
        )

    def event(self, kind: str, position: Position, perf: dict[str, Any] | None = None, **fields: Any) -> None:
        """One line of metrics.jsonl. All that depends on time or machine goes under `perf`."""
        line = {"event": kind, "epoch": position.epoch, **fields, "perf": perf or {}}
        if self._metrics:
            self._metrics.add(json.dumps(_plain(line)))

    def run(self, what: str, position: Position, seconds: float, verdict: Verdict | None = None) -> None:
        self.event("run", position, _perf(seconds, verdict), what=what, update=position.update)
        self._tell(verdict)

    def _tell(self, verdict: Verdict | None) -> None:
        if verdict is not None and verdict != self._told:
            log.info("Where the time went: %s", verdict.text)
            self._told = verdict

    def skip(self, position: Position, blame: Blame) -> None:
        """By the epoch that was skipped in; a GPU may tell of it in the next, sooner or later by its own time."""
        before = blame.update <= position.update - position.step
        fields = {"update": blame.update, "samples": list(blame.sample_indices), **vars(blame)}
        perf = {"noticed_at": fields.pop("noticed_at")}
        del fields["sample_indices"]
        self.event("skip", replace(position, epoch=position.epoch - before), perf, **fields)

    def moved(self, position: Position) -> None:
        """One update was made; costs nothing but the bar's own clock."""
        self._bar.update(1)
        self._bar.set_description(f"epoch {position.epoch}/{self.config.TRAIN.NUM_EPOCHS}", refresh=False)

    def train(self, position: Position, reading: Reading, perf: Perf) -> None:
        now = reading.update
        if self._fleet:
            log.info(_fleet_line(position, reading))
            log.info("Lr: %.6e, %s", reading.lr, _health(reading, perf))
        else:
            log.info("%s, %s", self._paddlevit_line(position, reading), _health(reading, perf))
        self._bar.set_postfix_str(f"loss {now.loss:.4f}, {perf.images_per_second:,.0f} img/s", refresh=False)
        figures = {
            "loss": now.loss,
            "acc1": now.acc1,
            "acc5": now.acc5,
            "lr": reading.lr,
            "grad_norm": reading.grad_norm,
            "scale": reading.scale,
            "skipped": reading.skipped,
        }
        fields = {"step": position.step, "update": position.update, **figures}
        self.event("train", position, perf.as_dict(), **fields)
        self._plot("train", {**figures, "images_per_second": perf.images_per_second, **perf.parts()}, position.update)

    def _paddlevit_line(self, position: Position, reading: Reading) -> str:
        epochs = self.config.TRAIN.NUM_EPOCHS
        return (
            f"Epoch[{position.epoch:03d}/{epochs:03d}], Step[{position.step:04d}/{self.per_epoch:04d}], "
            f"Lr: {reading.lr:.6e}, Loss: {reading.update.loss:.4f} ({reading.epoch.loss:.4f}), "
            f"Avg Acc: {reading.epoch.acc1:.4f}"
        )

    def epoch(self, position: Position, means: Means, seconds: float, verdict: Verdict | None = None) -> None:
        self._summary("Train", position, means, seconds)
        fields = {"update": position.update, **vars(means)}
        self.event("epoch", position, _perf(seconds, verdict), **fields)
        self._tell(verdict)

    def validation(self, position: Position, figures: dict[str, Means], seconds: float) -> None:
        """`figures`: '' for the model, 'ema_' for its average."""
        fields: dict[str, float] = {}
        for prefix, means in figures.items():
            fields |= {f"{prefix}{name}": value for name, value in vars(means).items()}
            self._summary("Validation", position, means, seconds, " (EMA)" if prefix else "")
        self.event("val", position, {"seconds": round(seconds, 3)}, update=position.update, **fields)
        self._plot("val", fields, position.update)

    def _summary(self, what: str, position: Position, means: Means, seconds: float, whose: str = "") -> None:
        epoch = f"----- Epoch[{position.epoch:03d}/{self.config.TRAIN.NUM_EPOCHS:03d}]"
        log.info(
            f"{f'----- Epoch {position.epoch - 1}' if self._fleet else epoch}, {what} Loss: {means.loss:.4f}, "
            f"{what} Acc@1: {means.acc1:.4f}, {what} Acc@5: {means.acc5:.4f}, time: {seconds:.2f}{whose}"
        )

    def _draw_again(self, metrics: Path, since: int) -> None:
        """All from update `since` on. The last validation, which may be made again now, is undrawn with its update."""
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        for line in map(json.loads, lines):
            if line["update"] >= since and line["event"] in ("train", "val"):
                figures = {**line, **line["perf"]}
                known = {name: figures[name] for name in DRAWN if name in figures}
                self._plot(line["event"], {k: math.nan if v is None else v for k, v in known.items()}, line["update"])

    def flush(self) -> None:
        """What was told so far reaches the disk: a checkpoint is not to be ahead of it."""
        if self._metrics:
            self._metrics.sync()
        if self._board:
            self._board.flush()

    def _plot(self, group: str, figures: dict[str, float], update: int) -> None:
        if self._board:
            for name, value in figures.items():
                # As metrics.jsonl has it, of which a resumed run draws it again.
                self._board.add(f"{group}/{name}", value if math.isfinite(value) else math.nan, update)
        if self._wandb:
            self._wandb.add(group, figures, update)

    def close(self) -> None:
        self._bar.close()
        if self._metrics:
            self._metrics.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.close()


def _fleet_line(position: Position, reading: Reading) -> str:
    now = reading.update
    return (
        f"[Epoch {position.epoch - 1}, batch {position.step - 1}] "
        f"loss: {now.loss:.5f}, acc1: {now.acc1:.5f}, acc5: {now.acc5:.5f}"
    )


def _health(reading: Reading, perf: Perf) -> str:
    return (
        f"Img/s: {perf.images_per_second:.1f}, Data: {perf.data_wait_percent:.0f}%, Grad: {reading.grad_norm:.4f}, "
        f"Scale: {reading.scale:g}, Skipped: {reading.skipped}, Mem: {perf.peak_memory_gb:.2f}GB, "
        f"Time: {clock(perf.seconds)}{perf.words()}"
    )


def _perf(seconds: float, verdict: Verdict | None) -> dict[str, Any]:
    return {"seconds": round(seconds, 3)} | ({} if verdict is None else {"verdict": verdict.as_dict()})


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity; null stands for them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _forget_after(metrics: Path, start: Position) -> None:
    """A resumed run repeats what came after its checkpoint: the old lines of that go, so that none stands twice."""
    if not metrics.exists():
        return
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    write_atomically(metrics, "".join(f"{line}\n" for line in lines if _is_behind(line, start)))


def _is_behind(line: str, start: Position) -> bool:
    """Whether a line tells of something that the run has behind it where it begins or goes on."""
    try:
        told = json.loads(line)
        event, update = told["event"], told["update"]
        if update != start.update:
            return update < start.update
        if event == "val":
            return start.validated == update
        # A run that goes on from its very beginning starts over.
        return told["epoch"] < start.epoch if event == "epoch" else update > 0
    except (ValueError, KeyError, TypeError):  # a line cut short when the run was killed
        return False
