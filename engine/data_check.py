"""Says what the data set is like before a training begins (DATA.CHECK), in the log and in data.json."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from datasets import ImageDataset
from datasets.examine import examine, notes_of, warnings_of
from utils.config import Config
from utils.distributed.again import tool
from utils.log import log
from utils.record.run_folder import CONFIG, DATA, write_json
from utils.record.tasks import NO_LABELS


def check_data(config: Config, train_set: ImageDataset, val_set: ImageDataset, folder: Path | None) -> None:
    """`folder` None: a dry run, which writes nothing. Images in memory, which the program itself provides, pass."""
    train, validation = train_set.single_images(), val_set.single_images()
    if train is None or validation is None:
        return
    found = examine(train, validation, config.DATA)
    if config.task == NO_LABELS:
        found = replace(found, classes={title: {} for title in found.classes}, largest_class_percent=None)
    # A dry run has no config.yaml: check_data.py takes the same flags.
    same = [word for word in sys.argv[1:] if word.lstrip("-") != "dry_run"]
    settings = same if folder is None else ["-cfg", str(folder / CONFIG)]
    check = f"{tool('check_data')} {shlex.join(settings)}"
    notes = notes_of(found, config.DATA, config.TRAIN.CLASS_WEIGHTS is not None, check)
    warnings = warnings_of(found, check)
    for note in notes:
        log.info("%s.", note)
    for warning in warnings:
        log.warning("%s", warning)
    if folder is None:
        return
    try:
        write_json(folder / DATA, {**found.as_json(), "notes": notes, "warnings": warnings})
    except OSError as error:  # only a description: the training does not need it
        log.warning("%s: cannot be written (%s).", folder / DATA, error.strerror)
