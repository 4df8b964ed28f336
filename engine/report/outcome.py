"""The end of a run: how far to trust its best metric, and what comes next."""

from __future__ import annotations

import shlex
from pathlib import Path

from engine.machine.device import Run
from engine.measure.meters import Best, Position
from utils.program import start_again, tool
from utils.text import counted, wilson
from vitamp.metrics import NO_LABELS, TOP1, Metric, always_guessing

SAME = 1e-6
"""Percent within which two accuracies are equal"""


def against_guessing(guess: float | None, top1: float | None) -> str:
    """'as good as' or 'worse than' always guessing the largest class; '' for a better model, or if one is unknown.

    `guess`: the top-1 of such guessing, in percent, as `top1` is.
    """
    if guess is None or top1 is None or not top1 <= guess + SAME:
        return ""
    return "worse than" if top1 < guess - SAME else "as good as"


def mark_of_best(guess: float | None, top1: float | None) -> str:
    """Words for the best epoch so far. `top1`: of its better weights."""
    against = against_guessing(guess, top1)
    return f"best ({against} guessing)" if against else "best"


def in_context(metric: Metric, value: float | None, images: int, guess: float | None) -> str:
    """How far noise may have moved a metric, and what guessing would reach; '' if there is nothing to say."""
    parts = []
    if metric.counts_images and value is not None:
        interval = wilson(value, images).words()
        parts.append(f"{metric.words} {metric.number(value)} on {counted(images, 'image')}: 95 % interval {interval}")
    if guess is not None:
        against = against_guessing(guess, value) if metric == TOP1 else ""
        parts.append(always_guessing(guess) + (f": this model is {against} guessing" if against else ""))
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}." if words else ""


def next_commands(run: Run, position: Position, best: Best, folder: Path, paused: bool = False) -> str:
    """Commands to copy, one per line: evaluate, predict, export, report, and resume; those without labels."""
    quoted = shlex.quote(str(folder))
    if run.config.USE:  # the user's own code, which has just been executed
        quoted += " -trust"
    train, longer = run.config.TRAIN, ""  # settings that let a run that has ended train longer
    if best.is_given_up(train.PATIENCE):
        longer += " TRAIN.PATIENCE=null"
    if position.epoch > train.NUM_EPOCHS:
        longer += f" TRAIN.NUM_EPOCHS={2 * (position.epoch - 1)}"
    if train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        longer += f" TRAIN.MAX_UPDATES={2 * position.update}"
    commands = {
        "evaluate": f"{tool('evaluate')} {quoted}",
        "predict": f"{tool('predict')} {quoted} IMAGE.jpg",
        "export": f"{tool('export')} {quoted} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
    }
    if run.config.task == NO_LABELS:
        recipe = f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {quoted}"
        commands = {"finetune": start_again(run.world, recipe)}
    commands["report"] = f"{tool('report')} {quoted}"
    if train.NUM_EPOCHS:
        commands["resume"] = start_again(run.world, f"-resume {quoted}{'' if paused else longer}")
    return "\n".join(["Next:", *(f"  {name:<8}  {command}" for name, command in commands.items())])
