"""Commands that come next after a run, ready to copy, with the run's real folder in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from engine.machine.context import Run
from engine.measure.progress import Position
from utils.config import Config
from utils.distributed.again import start_again, tool
from utils.record.tasks import NO_LABELS


def next_commands(run: Run, position: Position, folder: Path, paused: bool = False) -> dict[str, str]:
    """Commands by name: evaluate, predict, export, report, and resume; without labels those that need none."""
    quoted = shlex.quote(str(folder))
    if run.config.USE:  # the user's own code, which has just been executed
        quoted += " -trust"
    commands = {
        "evaluate": f"{tool('evaluate')} {quoted}",
        "predict": f"{tool('predict')} {quoted} IMAGE.jpg",
        "export": f"{tool('export')} {quoted} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
        "report": f"{tool('report')} {quoted}",
        "resume": start_again(run.world, f"-resume {quoted}{'' if paused else _longer(run.config, position)}"),
    }
    if run.config.task != NO_LABELS:
        return commands
    finetune = start_again(run.world, f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {quoted}")
    return {"finetune": finetune, "report": commands["report"], "resume": commands["resume"]}


def as_lines(commands: Mapping[str, str]) -> str:
    """For the log: one line per command."""
    return "\n".join(["Next:", *(f"  {name:<8}  {command}" for name, command in commands.items())])


def _longer(config: Config, position: Position) -> str:
    """Setting that lets a run that has ended train longer."""
    train = config.TRAIN
    if position.epoch > train.NUM_EPOCHS:
        return f" TRAIN.NUM_EPOCHS={2 * train.NUM_EPOCHS}"
    if train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        return f" TRAIN.MAX_UPDATES={2 * train.MAX_UPDATES}"
    return " TRAIN.PATIENCE=null"
