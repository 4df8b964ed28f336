"""Commands that come next after a run, ready to copy, with the run's real folder in them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from engine.machine.context import Run
from engine.measure.progress import Position
from utils.config import Config
from utils.distributed.launch import LAUNCHER_PID
from utils.distributed.world import BY_HAND


def next_commands(run: Run, position: Position, folder: Path, paused: bool = False) -> str:
    """One line per command: evaluate, predict, export, report, and resume."""
    scripts, quoted = _script().parent / "scripts", shlex.quote(str(folder))
    commands = {
        "evaluate": f"python {scripts / 'evaluate.py'} {quoted}",
        "predict": f"python {scripts / 'predict.py'} {quoted} IMAGE.jpg",
        "export": f"python {scripts / 'export.py'} {quoted} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
        "report": f"python {scripts / 'report.py'} {quoted}",
        "resume": _start(run, f"-resume {quoted}{'' if paused else _longer(run.config, position)}"),
    }
    return "\n".join(["Next:", *(f"  {name:<8}  {command}" for name, command in commands.items())])


def _script() -> Path:
    """The entry script, relative to the current folder if it is below."""
    path, here = Path(sys.argv[0]).absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _start(run: Run, flags: str) -> str:
    """Start this script again, with as many processes."""
    script, size = shlex.quote(str(_script())), run.world.size
    if size == 1:
        return f"python {script} {flags}"
    if LAUNCHER_PID in os.environ:
        return f"python {script} -ngpus {size} {flags}"
    by_hand = "by hand, with their -host, -port, -rank and -world_size"
    how = by_hand if run.world.launcher == BY_HAND else f"by {run.world.launcher}"
    return f"{script} {flags}  # start its {size} processes {how}, as before"


def _longer(config: Config, position: Position) -> str:
    """Setting that lets a run that has ended train longer."""
    train = config.TRAIN
    if position.epoch > train.NUM_EPOCHS:
        return f" TRAIN.NUM_EPOCHS={2 * train.NUM_EPOCHS}"
    if train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        return f" TRAIN.MAX_UPDATES={2 * train.MAX_UPDATES}"
    return " TRAIN.PATIENCE=null"
