"""The end of a run: by gradients that became NaN, or with how far to trust its best metric and what comes next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.machine.device import Run
from engine.measure.meters import NEVER, Best, Position, Reading, clock
from engine.measure.throughput import Tally, shown_rate
from engine.report.reporter import Reporter
from engine.task.base import Metrics
from engine.update import TrainState
from utils.config import Config
from utils.config.schema import AmpConfig
from utils.distributed.again import start_again, tool
from utils.distributed.world import World
from utils.errors import AllRanksError
from utils.record.history import History
from utils.terminal import Looks, terminal_width
from utils.text import counted, wilson
from vitamp.checkpoints import CHECKPOINTS, read_index
from vitamp.metrics import LOSS, NO_LABELS, PLAIN, TOP1, Metric, WeightSet, always_guessing, metric_named

if TYPE_CHECKING:
    from engine.amp.op_lists import OpLists

SAME = 1e-6
"""Percent within which two accuracies are equal"""
BOLD = "1"
IN_FULL = ("copies", "run", "next")
"""Rows of the summary with something to be copied"""


class Guess(NamedTuple):
    """Always guessing the largest class of the validation split."""

    name: str
    percent: float
    """Its top-1"""

    def against(self, top1: float | None) -> str:
        """'as good as' or 'worse than' it; '' for a better model, or where the top-1 is not known."""
        if top1 is None or not top1 <= self.percent + SAME:
            return ""
        return "worse than" if top1 < self.percent - SAME else "as good as"


def marks_of_best(guess: Guess | None, top1: float | None) -> tuple[str, ...]:
    """Words for the best epoch so far, the longest first. `top1`: of its better weights, in percent."""
    if guess is None or not (against := guess.against(top1)):
        return ("best",)
    sign = "<" if against == "worse than" else "="
    return f"best ({against} always guessing {guess.name})", f"best ({sign} guessing)"


def in_context(metric: Metric, value: float | None, images: int, guess: Guess | None) -> str:
    """How far noise may have moved a metric, and what guessing would reach; '' if there is nothing to say."""
    parts = []
    if metric.counts_images and value is not None:
        interval = wilson(value, images).words()
        parts.append(f"{metric.words} {metric.number(value)} on {counted(images, 'image')}: 95 % interval {interval}")
    if guess is not None:
        against = guess.against(value) if metric == TOP1 else ""
        doubt = f": this model is {against} guessing" if against else ""
        parts.append(always_guessing(guess.percent) + doubt)
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}." if words else ""


def tied(best: Best, history: History) -> str:
    """One line for the end of a run in which SAVE_BEST_BY could not tell validations apart; otherwise ''."""
    metric = metric_named(best.by)
    validations = history.constant(metric)
    if validations < 2 or best.figure is None or best.stale != validations - 1:
        return ""
    other = history.task.best if metric == LOSS else LOSS
    return (
        f"{metric.words} was the same in all {validations} validations, so the first is kept as best; "
        f"SAVE_BEST_BY={other.name} judges by another metric"
    )


def next_commands(run: Run, position: Position, folder: Path, paused: bool = False) -> dict[str, str]:
    """Commands to copy, by name: evaluate, predict, export, report, and resume; without labels those that need none."""
    quoted = shlex.quote(str(folder))
    if run.config.USE:  # the user's own code, which has just been executed
        quoted += " -trust"
    train = run.config.TRAIN
    longer = ""  # the setting that lets a run that has ended train longer
    if position.epoch > train.NUM_EPOCHS:
        longer = f" TRAIN.NUM_EPOCHS={2 * train.NUM_EPOCHS}"
    elif train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        longer = f" TRAIN.MAX_UPDATES={2 * train.MAX_UPDATES}"
    elif not paused:
        longer = " TRAIN.PATIENCE=null"
    last = {
        "report": f"{tool('report')} {quoted}",
        "resume": start_again(run.world, f"-resume {quoted}{'' if paused else longer}"),
    }
    if run.config.task == NO_LABELS:
        recipe = f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {quoted}"
        return {"finetune": start_again(run.world, recipe), **last}
    return {
        "evaluate": f"{tool('evaluate')} {quoted}",
        "predict": f"{tool('predict')} {quoted} IMAGE.jpg",
        "export": f"{tool('export')} {quoted} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
        **last,
    }


def as_lines(commands: Mapping[str, str]) -> str:
    """For the log: one line per command."""
    return "\n".join(["Next:", *(f"  {name:<8}  {command}" for name, command in commands.items())])


def summary(
    config: Config,
    best: Best,
    doubts: tuple[str, str],
    last: Mapping[WeightSet, Metrics],
    seconds: float,
    tally: Tally,
    folder: Path,
    commands: Mapping[str, str],
    paused: bool,
    looks: Looks,
) -> str:
    """Short table for a terminal. `doubts`: the best metric in context, and copies in its validation split.

    `last`: of the last validation. `tally`: of the training here.
    """
    by = {metric.name: metric for metric in (metric_named(best.by), config.task.best, LOSS)}
    metrics = [
        f"{which.marked(metric.words)} {metric.number(means.value(metric.name))}"
        for which, means in last.items()
        for metric in by.values()
        if which == PLAIN or metric.name == best.by
    ]
    first, *others = commands
    rows = [
        ("best", best.words() if best.figure is not None else ""),
        *(("", part) for part in doubts[0].removesuffix(".").split("; ")),
        ("copies", doubts[1]),
        ("last", ", ".join(metrics)),
        ("speed", f"{shown_rate(tally.images / tally.seconds)} images/s in training" if tally.images else ""),
        ("run", f"{folder}"),
        ("next", commands["resume" if paused else first]),
        ("", "" if paused else f"log.txt has the commands to {', '.join(others)}"),
    ]
    lines = [looks.coloured(f"{'Paused' if paused else 'Done'} after {clock(seconds)}", BOLD)]
    for name, words in rows:
        line = f"  {name:<6} {words}"
        if words:
            lines.append(line if name in IN_FULL else looks.shortened(line, terminal_width()))
    return "\n".join(["", *lines])


@dataclass
class Health:
    """Watches for NaN. Where the loss is scaled, `skips.ScaledHealth` watches for skipped updates too."""

    amp: AmpConfig
    parts: TrainState
    world: World
    reporter: Reporter
    op_lists: OpLists | None = None
    """AMP's lists, until the operators in them that the model never calls are reported."""

    def report(self, position: Position, together: bool) -> None:
        """Report what was found since the last call. `together`: all ranks call it now."""
        if self.op_lists is not None:  # the model has been computed by now
            self.op_lists.warn_uncalled()
            self.op_lists = None

    def check_is_due(self, position: Position) -> bool:
        """Whether to check for too many skips now: reports may be too far apart to notice them."""
        return False

    def too_many_skips(self, reading: Reading, update: int) -> AllRanksError | None:
        """The error that ends the run, if too many updates in a row were skipped, up to `update`."""
        return None

    def stop_on_nan(self, reading: Reading, position: Position, folder: Path) -> None:
        """Raise AllRanksError if a gradient was NaN: without loss scaling, no bad update is skipped."""
        if reading.first_bad == NEVER:
            return
        update = reading.first_bad
        since = position.update - update  # in the same epoch: the device is read at the end of each
        rate = self.parts.schedule.rate_at(self.parts.schedule.stepped - since - 1)
        last = read_index(folder / CHECKPOINTS)["last"]
        without_amp = "; or use -amp off to see whether the precision is the cause" * (
            self.parts.precision.level != "O0"
        )
        raise AllRanksError(
            f"the gradients became NaN or infinite at update {update} (epoch {position.epoch}, step "
            f"{position.step - since}; learning rate {rate:.3e}). No checkpoint was saved after it. Try a "
            f"lower TRAIN.BASE_LR, a longer TRAIN.WARMUP_EPOCHS, or TRAIN.GRAD_CLIP=1.0{without_amp}. "
            + (
                f"The last checkpoint is {last}; resume from it with -resume."
                if last
                else "There is no checkpoint yet."
            )
        )
