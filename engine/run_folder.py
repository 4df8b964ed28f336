"""The run's folder: taken, made, and told in what the run is."""

from __future__ import annotations

import contextlib
from pathlib import Path

from datasets import decoder_of
from engine.machine.context import Run
from engine.machine.device import describe
from engine.measure.mfu import Peak, as_noted, peak_of
from engine.run_lock import FolderLock
from engine.setup import Ready
from models import count_parameters
from utils.config import Config, to_yaml
from utils.distributed.world import broadcast, on_rank_0
from utils.errors import UserError
from utils.files import write_atomically
from utils.log import log, log_into
from utils.resumed_run import resumed_run, target_folder
from utils.run_folder import (
    check_output,
    describe_run,
    is_run_folder,
    make_folder,
    os_errors_as_user_errors,
    write_json,
)

WRITTEN_WHOLE = ("broken.txt", "config.yaml", "curves.png", "index.json", "metrics.jsonl", "run.json", "wandb.json")
"""Of a run's files, those that get their names once they are whole: .NAME.PID until then."""


def lock_what_is_there(config: Config, lock: FolderLock) -> None:
    """Before looking for a checkpoint: another run may be about to write one."""
    target = target_folder(config)
    if target is not None and Path(target).is_dir():
        lock.take(Path(target))
        check_output(target, config.SAVE, resumed_run(config))


def folder_of(run: Run, kind: str, lock: FolderLock | None = None) -> Path:
    """Made by rank 0, known to all, and logged into from now on. `kind`: train or eval, for its name."""

    config, world = run.config, run.world

    def made() -> str:
        folder = make_folder(target_folder(config), config.SAVE, kind)
        if lock is not None and lock.take(folder) and is_run_folder(folder):
            raise UserError(f"{folder}: another run was started in this folder a moment ago; name another -output.")
        if lock is not None:  # so whoever was at work here is dead
            _remove_unfinished(folder)
        return str(folder)

    folder = Path(broadcast(on_rank_0(world, made), world))
    with os_errors_as_user_errors(folder):
        log_into(folder, world.rank)
    return folder


def _remove_unfinished(folder: Path) -> None:
    """What a run that was killed had not written to its end."""
    for path in (*folder.glob(".*"), *(folder / "checkpoints").glob(".*")):
        name, _, process = path.name[1:].rpartition(".")
        if name in WRITTEN_WHOLE and process.isdecimal():
            with contextlib.suppress(OSError):
                path.unlink()


def write_down(run: Run, ready: Ready, folder: Path) -> Peak | None:
    """config.yaml and run.json. Gives back what MFU is to be measured against, where it is."""
    config, world, threads = run.config, run.world, run.threads
    if not world.first:
        return None
    with os_errors_as_user_errors(folder):  # at once: whoever is killed from here on goes on with these
        write_atomically(folder / "config.yaml", to_yaml(config))
    peak = peak_of(ready.precision, threads, config.REPORT_STAGES and not config.EVAL, folder / "run.json")
    if peak is not None and not config.EVAL:
        log.info(peak.words())
    choices = {
        "precision": ready.precision.name,
        "why": ready.precision.choice.reason,
        "threads": threads,
        "world_size": world.size,
        "decoder": decoder_of(config.DATA),
        **ready.choices,
    }
    about = describe_run(describe(run.device, world, threads), choices, config.TAG) | as_noted(peak)
    parts = {"train": getattr(ready, "train_set", None), "val": ready.val_set}
    about["samples"] = {name: len(part) for name, part in parts.items() if part is not None}
    about["parameters"] = dict(zip(("all", "trainable"), count_parameters(ready.model), strict=True))
    with os_errors_as_user_errors(folder):
        write_json(folder / "run.json", about)
    return peak
