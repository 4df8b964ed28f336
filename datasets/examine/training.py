"""What is found in a data set before training (DATA.CHECK), which changes nothing there.

In a large data set, only as much is looked at as a few seconds allow. check_data.py reads all images, and adds to these
findings.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from datasets.base import ImageDataset, Samples
from datasets.decoding import DEEP, TRANSPARENT
from datasets.examine.copies import QUICK_SECONDS, find_copies
from datasets.examine.findings import TURNED, Findings
from datasets.examine.headers import look_at_headers
from datasets.registry import comes_unsplit, open_test
from utils.cli import parse
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.train import LOSSES
from utils.log import log
from utils.program import tool
from utils.record.run_folder import CONFIG, DATA, alike_in_words, write_json
from utils.text import counted, some_of
from vitamp.metrics import BALANCED, MACRO_F1, NO_LABELS
from vitamp.sizes import sides

REDUCED = 2.5
"""How many times smaller images are seen than they are, from which on it is said"""
UNEQUAL = 5
"""Largest class over smallest, from which on the classes are called unequal."""


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
        write_json(folder / DATA, {**asdict(found), "notes": notes, "warnings": warnings, "use": use})
    except OSError as error:  # only a description: the training does not need it
        log.warning("%s: cannot be written (%s).", folder / DATA, error.strerror)
    return notes


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


def notes_of(found: Findings, config: Config, check: str) -> list[str]:
    """Lines for the log. `check`: the command that checks this data set."""
    notes = [_counts_in_words(found)]
    notes += _of_unequal_classes(found, config)
    notes += _of_storage(found, config.DATA, check)
    notes += _of_search(found, check)
    return notes


def _counts_in_words(found: Findings) -> str:
    splits = ", ".join(f"{count:,} {title}" for title, count in found.images.items())
    text = f"Data: {splits} images"
    training = found.classes["training"]
    if not training:
        return text
    smallest = min(training, key=lambda name: training[name])
    largest = max(training, key=lambda name: training[name])
    of_each = f"from {training[smallest]:,} ({smallest}) to {training[largest]:,} ({largest}) training images"
    if training[smallest] == training[largest]:
        of_each = f"each of {counted(training[largest], 'training image')}"
    text += f" in {len(training):,} classes, {of_each}"
    if found.largest_class_percent is not None:
        text += f". Always guessing the largest class would give {found.largest_class_percent:.1f} % in validation"
    return text


def _of_unequal_classes(found: Findings, config: Config) -> Iterator[str]:
    train = config.TRAIN
    counts = [count for count in found.classes["training"].values() if count]
    # Without epochs, such as for a probe, nothing is weighed.
    if found.largest_class_percent is None or not counts or not train.NUM_EPOCHS:
        return
    times = max(counts) / min(counts)
    if max(counts) < UNEQUAL * min(counts):
        return
    # Neither the loss of a distillation nor one of the user's own has class weights.
    has_weights = train.DISTILLATION_TYPE is None and train.LOSS in LOSSES
    ways = "DATA.SAMPLER=balanced or TRAIN.CLASS_WEIGHTS=balanced" if has_weights else "DATA.SAMPLER=balanced"
    chooses = config.SAVE_BEST_BY in (BALANCED.name, MACRO_F1.name)
    if train.CLASS_WEIGHTS is not None or config.DATA.SAMPLER == "balanced":
        alike = "Balanced accuracy counts classes alike"
        if not chooses:
            alike += "; SAVE_BEST_BY=balanced_acc chooses by it, which may lower top-1"
    elif chooses:
        alike = f"{ways} would weigh classes alike, which may lower top-1"
    else:
        alike = (
            f"{ways} would weigh classes alike, and SAVE_BEST_BY=balanced_acc would choose the best checkpoint so; "
            "both may lower top-1"
        )
    yield (
        f"The largest class has {times:.0f} times as many images as the smallest: top-1 mostly counts the large ones. "
        f"{alike}"
    )


def _of_storage(found: Findings, data: DataConfig, check: str) -> Iterator[str]:
    of = f"of {found.looked_at:,} training images"
    if found.looked_at != found.images["training"]:
        of += " looked at"
    if found.series and data.GROUP is None:
        yield found.series
    if found.unlike:
        yield f"Perhaps placeholders, in another format than the others {of}: {some_of(found.unlike)}"
    times = found.shorter / min(sides(data.IMAGE_SIZE))
    if times >= REDUCED:
        yield (
            f"Images of {found.shorter:,} pixels on the shorter side (the median) are seen at {data.IMAGE_SIZE}: "
            f"details of fewer than {times:.0f} pixels are lost. If they count, -image_size keeps more"
        )
    transparent = found.modes.get(TRANSPARENT)
    if transparent:
        yield f"With an alpha channel (DATA.BACKGROUND={data.BACKGROUND}): {transparent:,} {of}"
    deep = found.modes.get(DEEP)
    if deep:
        yield f"With 16 bits, of which 8 are read: {deep:,} {of}. DATA.BITS=16 reads all (docs/bands.md)"
    turned = found.found.get(TURNED)
    if turned:
        where = ", in pack_images.py too" if data.DATASET == "shards" else ""
        yield (
            f"To be turned by their EXIF data, but read as they are stored: {len(turned):,} {of}. "
            f"DATA.EXIF_ROTATE=true turns them{where}; `{check}` lists them"
        )


def _of_search(found: Findings, check: str) -> Iterator[str]:
    if found.copies is None:
        yield (
            "Not searched for copies in both splits, because the images are raw pixels or not on this machine; "
            f"`{check}` does it"
        )
    for one, other, copies in found.pairs():
        if copies.compared < found.images[one] or copies.training < found.images[other]:
            some = f"{copies.compared:,} of {found.images[one]:,} {one} images"
            if copies.training < found.images[other]:
                some += f" with {copies.training:,} of {found.images[other]:,} {other} images"
            only = f"only {some}, in the time of DATA.CHECK quick"
            yield f"Searched for copies in both splits: {only}; `{check}` compares all"


def warnings_of(found: Findings, data: DataConfig, check: str) -> Iterator[str]:
    """What makes the metrics of a validation wrong, and what mends it."""
    missing = found.unvalidated
    if found.series and data.GROUP is not None:
        yield f"{found.series}."
    if found.companions:
        yield f"{found.companions}."
    # Of a validation split that comes with the data, these have warned, before DATA.EXCLUDE.
    warned = data.DATASET.partition(":")[0] in ("hf", "imagefolder", "imagenet2012", "shards")
    if missing and (not warned or data.EXCLUDE or comes_unsplit(data)):
        of = f"{len(missing):,} of {len(found.classes['training']):,} (the first: {missing[0]})"
        yield f"Classes without validation images, of which no metric tells: {of}. Validation needs images of them."
    for one, other, copies in found.pairs():
        if not copies.examples:
            continue
        copy, original = copies.examples[0]
        labels = f", {copies.relabelled:,} of them with another label there" if copies.relabelled else ""
        of = f"{copies.found:,} of {copies.compared:,} {one} images{labels}. {copy} has the bytes of {original}"
        lists = f"`{check}` lists them"
        if other == "training":
            lists = f"`{check} -fix exclude.txt` lists the copies, and with -near edited ones, too; train with "
            lists += "DATA.EXCLUDE=exclude.txt"
        yield f"Copies of {other} images, on which a model does better than on new ones: {of}. {lists}."
    words = alike_in_words(found.alike)
    if words:
        yield f"{words}. `{check} -alike DIR` shows them."
