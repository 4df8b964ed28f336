"""Check of the data set before training (DATA.CHECK): notes for the log, warnings, and data.json. It changes no data.

Of a large data set, it reads only as much as a few seconds allow. check_data.py reads all images, and finds more.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import ImageDataset, Samples
from datasets.decoding import DEEP, TRANSPARENT
from datasets.examine.copies import QUICK_SECONDS, find_copies
from datasets.examine.findings import TURNED, Findings
from datasets.examine.headers import add_headers, look_at_headers
from datasets.examine.shortcuts import find_shortcuts
from datasets.registry import comes_unsplit, open_test
from utils.cli import parse
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.train import LOSSES
from utils.log import log
from utils.program import tool
from utils.record.run_folder import (
    ALIKE,
    ALIKE_IMAGES,
    CONFIG,
    DATA,
    LookAlikes,
    alike_in_words,
    may_be_copies,
    write_json,
)
from utils.text import counted, some_of
from vitamp.metrics import BALANCED, MACRO_F1, NO_LABELS
from vitamp.sizes import sides

REDUCED = 2.5
"""Ratio of an image's shorter side to the model's for which a note says that details are lost"""
VALIDATION_IMAGES = 500
"""Validation images that are searched for shortcuts with DATA.CHECK quick"""
PIXEL_SECONDS = 0.25
"""Longest time of making thumbnails of a split with DATA.CHECK quick"""
UNEQUAL = 5
"""Ratio of the largest class to the smallest for which the classes are called unequal"""


def examine(train: Samples, validation: Samples, data: DataConfig, test: Samples | None = None) -> Findings:
    """Search all splits for copies and oddities, as far as DATA.CHECK allows."""
    splits = {"training": train, "validation": validation}
    if test is not None:
        splits["test"] = test
    findings = Findings.of(splits, data, "label ")  # classes without names are called label 0, label 1, ...
    has_one_label = validation.labels.ndim == 1  # per image
    if has_one_label and len(validation) > 0:
        largest = max(findings.classes["validation"].values(), default=0)
        findings.largest_class_percent = 100 * largest / len(validation)
    seconds = float("inf")
    if data.CHECK == "quick":
        searches = 1 if test is None else 3  # one for each two splits
        seconds = QUICK_SECONDS / searches
    # Copies are found by the bytes of files on this machine.
    if not any(samples.stored == "pixels" or samples.remote for samples in splits.values()):
        findings.copies = find_copies(train, validation, seconds)
        if test is not None:
            findings.copies_in_test["training"] = find_copies(train, test, seconds)
            findings.copies_in_test["validation"] = find_copies(validation, test, seconds)
    if train.stored != "pixels":
        images = look_at_headers("training", train, data)
        add_headers(findings, images, data)
        findings.shortcuts = find_shortcuts(
            images,
            lambda: look_at_headers("validation", validation, data, VALIDATION_IMAGES),
            PIXEL_SECONDS if data.CHECK == "quick" else float("inf"),
        )
    return findings


def check_data(
    config: Config, train_set: ImageDataset, val_set: ImageDataset, folder: Path | None, choices: Mapping[str, Any]
) -> list[str]:
    """Check the data set before training: log warnings, write the findings into data.json, and return notes to log.

    `folder` is that of the run, or None for a dry run, which writes nothing. `choices`: those of the run, which say
    what validation images look like training images, if its start has compared them. A data set that is held in memory
    comes with the program, so it is not checked and has no notes.
    """
    train = train_set.single_images()
    validation = val_set.single_images()
    if train is None or validation is None:
        return []
    findings = examine(train, validation, config.DATA, None if train.remote else open_test(config.DATA))
    findings.alike = choices.get(ALIKE) or []
    findings.related = _related(findings, train, validation, choices.get(ALIKE_IMAGES) or [])
    if config.task == NO_LABELS:
        # The labels are placeholders, so no classes are reported. Their splits stay: notes and data.json name them.
        findings.classes = {title: {} for title in findings.classes}
        findings.largest_class_percent = None

    # The notes name the command that checks the same data. A dry run has no config.yaml that it could read.
    settings = ["-cfg", str(folder / CONFIG)] if folder else _data_arguments(sys.argv)
    # A tool does not execute code that the run's settings name, so the files with user code are given again.
    use = ["-use", ",".join(config.own_files)] if config.own_files else []
    command = f"{tool('check_data')} {shlex.join([*settings, *use])}"

    notes = notes_of(findings, config, command)
    warnings = list(warnings_of(findings, config.DATA, command))
    for warning in warnings:
        log.warning("%s", warning)
    if folder is None:
        return notes
    try:
        about_run = {"use": use, "pretrained": config.MODEL.PRETRAINED is not None}
        write_json(folder / DATA, {**asdict(findings), "notes": notes, "warnings": warnings, **about_run})
    except OSError as error:  # no reason to stop: training does not read this file
        log.warning("%s: cannot be written (%s).", folder / DATA, error.strerror)
    return notes


def _related(findings: Findings, train: Samples, validation: Samples, images_alike: list[int]) -> list[int]:
    """Return the indices of the validation images that have a relative among the training images.

    These are copies, images whose group training has, and those of `images_alike`, unless such images may be no copies.
    """
    related = set(findings.copies.images) if findings.copies else set[int]()
    if may_be_copies(findings.alike):
        related.update(images_alike)
    if train.groups and validation.groups:
        related.update(np.flatnonzero(np.isin(validation.groups, train.groups)).tolist())
    return sorted(related)


def _data_arguments(argv: list[str]) -> list[str]:
    """Return the arguments of a training's command line that say which images it reads, and for which model.

    `argv`: the whole command line, with the name of the program.
    """
    given = parse(argv[1:], argv[0])

    def is_about_data(key: str) -> bool:
        return key.startswith(("DATA.", "MODEL.")) and "BATCH_SIZE" not in key

    arguments = ["-cfg", given.cfg] if given.cfg else []
    for key, (value, flag) in given.flags.items():
        if is_about_data(key):
            arguments.append(flag)
            has_value = value is not True  # True stands for a flag alone
            if has_value:
                arguments.append(str(value))
    return arguments + [f"{key}={value}" for key, value in given.words.items() if is_about_data(key)]


def notes_of(findings: Findings, config: Config, command: str) -> list[str]:
    """Return notes on the data set for the log. `command` is the call of check_data.py for it, which they name."""
    notes = [_class_counts(findings)]
    notes += _notes_on_unequal_classes(findings, config)
    notes += _notes_on_storage(findings, config.DATA, command)
    notes += _notes_on_search(findings, command)
    if not any(shortcut.of_file for shortcut in findings.shortcuts):
        notes += _line_on_shortcuts(findings, command)
    return notes


def _class_counts(findings: Findings) -> str:
    """Return a note that says how many images the splits have, and the smallest and the largest class of training."""
    splits = ", ".join(f"{count:,} {title}" for title, count in findings.images.items())
    text = f"Data: {splits} images"
    size_of_class = findings.classes["training"]  # name -> number of images
    if not size_of_class:
        return text
    smallest = min(size_of_class, key=lambda name: size_of_class[name])
    largest = max(size_of_class, key=lambda name: size_of_class[name])
    if size_of_class[smallest] == size_of_class[largest]:
        sizes = f"each of {counted(size_of_class[largest], 'training image')}"
    else:
        sizes = (
            f"from {size_of_class[smallest]:,} ({smallest}) to {size_of_class[largest]:,} ({largest}) training images"
        )
    text += f" in {len(size_of_class):,} classes, {sizes}"
    if findings.largest_class_percent is not None:
        text += f". In validation, always guessing its largest class would give {findings.largest_class_percent:.1f} %"
    return text


def _notes_on_unequal_classes(findings: Findings, config: Config) -> Iterator[str]:
    """Yield a note if the largest class is much larger than the smallest, with the settings that balance classes."""
    train = config.TRAIN
    class_sizes = [count for count in findings.classes["training"].values() if count]
    # Classes can only be balanced with one label per image, and not without epochs, such as for a probe.
    has_one_label = findings.largest_class_percent is not None
    if not has_one_label or not class_sizes or not train.NUM_EPOCHS:
        return
    ratio = max(class_sizes) / min(class_sizes)
    if max(class_sizes) < UNEQUAL * min(class_sizes):
        return

    # Neither the loss of a distillation nor one of the user's own has class weights.
    has_class_weights = train.DISTILLATION_TYPE is None and train.LOSS in LOSSES
    settings = "DATA.SAMPLER=balanced"
    if has_class_weights:
        settings += " or TRAIN.CLASS_WEIGHTS=balanced"
    # Advise what the run does not do yet: to balance classes in training, and to choose the best checkpoint by class.
    balances = train.CLASS_WEIGHTS is not None or config.DATA.SAMPLER == "balanced"
    chooses_by_class = config.SAVE_BEST_BY in (BALANCED.name, MACRO_F1.name)
    if balances and chooses_by_class:
        advice = "Balanced accuracy counts classes alike"
    elif balances:
        advice = (
            "Balanced accuracy counts classes alike; SAVE_BEST_BY=balanced_acc chooses by it, which may lower top-1"
        )
    elif chooses_by_class:
        advice = f"{settings} would weigh classes alike, which may lower top-1"
    else:
        advice = (
            f"{settings} would weigh classes alike, and SAVE_BEST_BY=balanced_acc would choose the best checkpoint so; "
            "both may lower top-1"
        )
    yield (
        f"The largest class has {ratio:.0f} times as many images as the smallest: top-1 mostly counts the large ones. "
        f"{advice}"
    )


def _notes_on_storage(findings: Findings, data: DataConfig, command: str) -> Iterator[str]:
    """Yield notes on names, formats, sizes, colours and EXIF data of the images.

    `command`: the call of check_data.py for this data set, which a note names.
    """
    of_images = f"of {findings.looked_at:,} training images"
    if findings.looked_at != findings.images["training"]:
        of_images += " looked at"
    if findings.series and data.GROUP is None:
        yield f"{findings.series}. {findings.series_advice}"
    if findings.unlike:  # images in a rare format
        yield f"Perhaps placeholders, in another format than the others {of_images}: {some_of(findings.unlike)}"
    median_side = findings.shorter
    reduction = median_side / min(sides(data.IMAGE_SIZE))
    if reduction >= REDUCED:
        yield (
            f"Images of {median_side:,} pixels on the shorter side (the median) are seen at {data.IMAGE_SIZE}: "
            f"details of fewer than {reduction:.0f} pixels are lost. If they count, -image_size keeps more"
        )
    transparent = findings.modes.get(TRANSPARENT)
    if transparent:
        yield f"With an alpha channel (DATA.BACKGROUND={data.BACKGROUND}): {transparent:,} {of_images}"
    deep = findings.modes.get(DEEP)
    if deep:
        yield f"With 16 bits, of which 8 are read: {deep:,} {of_images}. DATA.BITS=16 reads all (docs/bands.md)"
    turned = findings.by_kind.get(TURNED)
    if turned:
        where = ", in pack_images.py too" if data.DATASET == "shards" else ""
        yield (
            f"To be turned by their EXIF data, but read as they are stored: {len(turned):,} {of_images}. "
            f"DATA.EXIF_ROTATE=true turns them{where}; `{command}` lists them"
        )


def _notes_on_search(findings: Findings, command: str) -> Iterator[str]:
    """Yield a note if images were not searched for copies, or not all of them were.

    `command`: the call of check_data.py for this data set, which searches all.
    """
    if findings.copies is None:
        yield (
            "Not searched for copies in both splits, because the images are raw pixels or not on this machine; "
            f"`{command}` does it"
        )
    for split, original_split, copies in findings.pairs():
        images = findings.images[split]
        originals = findings.images[original_split]
        originals_compared = copies.training
        if copies.compared < images or originals_compared < originals:
            compared = f"{copies.compared:,} of {images:,} {split} images"
            if originals_compared < originals:
                compared += f" with {originals_compared:,} of {originals:,} {original_split} images"
            only = f"only {compared}, in the time of DATA.CHECK quick"
            yield f"Searched for copies in both splits: {only}; `{command}` compares all"


def _line_on_shortcuts(findings: Findings, command: str) -> Iterator[str]:
    """Yield a line on all shortcuts together, if there are any. `command` as in `notes_of`."""
    said = []
    for shortcut in findings.shortcuts:
        name, recall = next(iter(shortcut.classes.items()))
        said.append(f"{name} by {shortcut.properties} ({recall:.0f} %)")
    if said:
        line = f"Recognised without the picture, of {findings.looked_at:,} training images looked at: {'; '.join(said)}"
        in_both = [one.properties for one in findings.shortcuts if one.in_validation and one.of_file]
        if in_both:
            line += f". In validation too, by {some_of(in_both)}: a model may know the files instead of the pictures"
        yield f"{line}. `{command}` says more (docs/data.md)"


def _warnings_of_classes(findings: Findings, data: DataConfig) -> Iterator[str]:
    """Yield a warning of classes without validation images, and of those without any training image that is left."""
    unvalidated = findings.unvalidated
    # These data sets warn of classes without images when they open a validation split that comes with the data. But
    # they make no warning of a split that the program makes, and none of classes that DATA.EXCLUDE empties later.
    warns_itself = data.DATASET.partition(":")[0] in ("hf", "imagefolder", "imagenet2012", "shards")
    if unvalidated and (not warns_itself or data.EXCLUDE or comes_unsplit(data)):
        count = f"{len(unvalidated):,} of {len(findings.classes['training']):,} (the first: {unvalidated[0]})"
        yield f"Classes without validation images, of which no metric tells: {count}. Validation needs images of them."

    emptied = [name for name, images in findings.classes.get("training", {}).items() if not images]
    if emptied and (data.EXCLUDE or data.RELABEL):
        yield f"Classes whose training images are all left out (DATA.EXCLUDE, DATA.RELABEL): {some_of(emptied)}."


def warnings_of(findings: Findings, data: DataConfig, command: str) -> Iterator[str]:
    """Yield a warning for each finding that makes validation metrics wrong, with the remedy.

    `command`: the call of check_data.py for this data set, which shows the images.
    """
    # A sentence on groups that are in several splits. Without DATA.GROUP, groups are only guessed: that is a note.
    if findings.series and data.GROUP is not None:
        yield f"{findings.series}."
    # A sentence on images that may be masks of others.
    if findings.companions:
        yield f"{findings.companions}."

    yield from _warnings_of_classes(findings, data)

    if any(shortcut.of_file for shortcut in findings.shortcuts):
        for line in _line_on_shortcuts(findings, command):
            yield f"{line}."

    for split, original_split, copies in findings.pairs():
        if not copies.examples:
            continue
        copy, original = copies.examples[0]
        labels = f", {copies.relabelled:,} of them with another label there" if copies.relabelled else ""
        counts = f"{copies.found:,} of {copies.compared:,} {split} images{labels}. {copy} has the bytes of {original}"
        if original_split == "training":
            advice = f"`{command} -fix exclude.txt` lists the copies, and with -near edited ones, too; train with "
            advice += "DATA.EXCLUDE=exclude.txt"
        else:
            advice = f"`{command}` lists them"
        yield f"Copies of {original_split} images, on which a model does better than on new ones: {counts}. {advice}."

    look_alike = alike_in_words(findings.alike)
    copies_found = findings.copies.found if findings.copies else 0
    if look_alike and LookAlikes(*findings.alike).images > copies_found:
        yield f"{look_alike}. `{command} -alike DIR` shows them."
