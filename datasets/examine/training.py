"""What is found in a data set before training (DATA.CHECK), which changes nothing there.

In a large data set, only as much is looked at as a few seconds allow. check_data.py reads all images, and adds to these
findings.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from datasets.base import ImageDataset, Samples
from datasets.examine.copies import QUICK_SECONDS, find_copies
from datasets.examine.findings import Findings
from datasets.examine.headers import look_at_headers
from datasets.examine.words import notes_of, warnings_of
from datasets.registry import open_test
from utils.cli import parse
from utils.config import Config
from utils.config.data import DataConfig
from utils.log import log
from utils.program import tool
from utils.record.run_folder import CONFIG, DATA, write_json
from vitamp.metrics import NO_LABELS


def examine(train: Samples, validation: Samples, data: DataConfig, test: Samples | None = None) -> Findings:
    """Look at all splits, as far as DATA.CHECK allows."""
    splits = {"training": train, "validation": validation}
    if test is not None:
        splits["test"] = test
    findings = Findings.of(splits, data, "label ")
    if validation.labels.ndim == 1 and len(validation):
        largest = max(findings.classes["validation"].values(), default=0)
        findings.largest_class_percent = 100 * largest / len(validation)
    seconds = float("inf")
    if data.CHECK == "quick":
        seconds = QUICK_SECONDS / (1 if test is None else 3)
    if not any(samples.stored == "pixels" or samples.remote for samples in splits.values()):
        findings.copies = find_copies(train, validation, seconds)
        if test is not None:
            findings.copies_in_test["training"] = find_copies(train, test, seconds)
            findings.copies_in_test["validation"] = find_copies(validation, test, seconds)
    if train.stored != "pixels":
        look_at_headers(findings, train, data)
    return findings


def check_data(
    config: Config, train_set: ImageDataset, val_set: ImageDataset, folder: Path | None, alike: list[int]
) -> list[str]:
    """Notes on the data set. Logs warnings, and writes both into data.json. Images in memory, the program's own, pass.

    `folder` None: a dry run, which writes nothing. `alike`: as in `Findings`.
    """
    train = train_set.single_images()
    validation = val_set.single_images()
    if train is None or validation is None:
        return []
    found = examine(train, validation, config.DATA, None if train.remote else open_test(config.DATA))
    found.alike = alike
    if config.task == NO_LABELS:
        found.classes = {title: {} for title in found.classes}
        found.largest_class_percent = None
    settings = ["-cfg", str(folder / CONFIG)] if folder else _settings_of_data(sys.argv)  # a dry run has no config.yaml
    # A tool executes no code that the run's settings name.
    use = ["-use", ",".join(config.own_files)] if config.own_files else []
    check = f"{tool('check_data')} {shlex.join([*settings, *use])}"
    notes = notes_of(found, config, check)
    warnings = list(warnings_of(found, config.DATA, check))
    for warning in warnings:
        log.warning("%s", warning)
    if folder is None:
        return notes
    try:
        write_json(folder / DATA, {**_as_json(found), "notes": notes, "warnings": warnings, "use": use})
    except OSError as error:  # only a description: the training does not need it
        log.warning("%s: cannot be written (%s).", folder / DATA, error.strerror)
    return notes


def _as_json(found: Findings) -> dict[str, Any]:
    return {
        "images": found.images,
        "classes": found.classes,
        "largest_class_percent": found.largest_class_percent,
        "copies": None if found.copies is None else vars(found.copies),
        "copies_in_test": {title: vars(copies) for title, copies in found.copies_in_test.items()},
        "companions": found.companions,
        "series": found.series,
        "alike": found.alike,
        "looked_at": found.looked_at,
        "unlike": found.unlike,
        "modes": found.modes,
        "shorter": found.shorter,
        "turned": found.turned,
    }


def _settings_of_data(argv: list[str]) -> list[str]:
    """Those words of a training's command line that say which images it reads, and for which model."""
    given = parse(argv[1:], argv[0])

    def is_of_data(key: str) -> bool:
        return key.startswith(("DATA.", "MODEL.")) and "BATCH_SIZE" not in key

    words = ["-cfg", given.cfg] if given.cfg else []
    for key, (value, flag) in given.flags.items():
        if is_of_data(key):
            words.append(flag)
            if value is not True:
                words.append(str(value))
    return words + [f"{key}={value}" for key, value in given.words.items() if is_of_data(key)]
