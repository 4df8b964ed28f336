"""What is said of a data set before training (DATA.CHECK): classes, copies of images in both splits, odd images.

Nothing here changes a training. In a large data set, only as much is looked at as a few seconds allow.
"""

import contextlib
import hashlib
import os
import re
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import numpy as np

from datasets.base import ImageDataset, Samples, Unreadable
from datasets.decoding import DEEP, TRANSPARENT, Header, header_of
from datasets.labels import distinct_names, images_of_classes
from datasets.registry import comes_unsplit, open_test
from datasets.sources.grouped import IN_NAMES
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

Item = TypeVar("Item")

QUICK_SECONDS = 3.5
"""Most seconds of the search for copies with DATA.CHECK quick"""
SIZES_OF_VALIDATION, SIZES_OF_BOTH = 0.2, 0.65
"""Fractions of them after which no more sizes are looked up, so that time is left to compare contents"""
BLOCK = 256
"""Neighbours whose sizes are looked up together: neighbours are in one folder, so this is faster than at random."""
MOST_NAMED = 5
HEADER_SECONDS = 1.0
"""Most seconds of reading headers with DATA.CHECK quick"""
LOOKED_AT = 2000
"""Images whose headers are read, if there is time."""
MEASURED = 100
"""Images whose sides give `median_side`."""
RARE = 100
"""Images among which one in a format of its own is called unlike the others"""
OF_IMAGES, OF_CLASS = 0.05, 0.25
"""Most of all images, and of those of a class, with one such name, for it to say what they show: not IMG_, no class"""
TORN, MOST_NAMES = 0.1, 200_000
"""Least fraction of a split whose names other splits have too, for a note; most images whose names are read"""
REDUCED = 2.5
"""How many times smaller images are seen than they are, from which on it is said"""
UNEQUAL = 5
"""Largest class over smallest, from which on the classes are called unequal."""


def _until(end: float, items: Iterable[Item]) -> Iterator[Item]:
    """Items, as long as there is time."""
    return takewhile(lambda _: time.monotonic() <= end, items)


@dataclass
class Copies:
    """Images of one split, such as validation, whose bytes are those of an image in another, such as training."""

    found: int
    compared: int
    """Images of the one that were compared with all images of their size in the other"""
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Names in the one and in the other"""
    relabelled: int = 0
    """Those found whose label is another in the other"""
    training: int = 0
    """Images of the other that they were compared with; fewer than all where time was too short"""


@dataclass
class Findings:
    images: dict[str, int]
    """By split"""
    classes: dict[str, dict[str, int]]
    """Images of each class, by split"""
    largest_class_percent: float | None = None
    """Top-1 of always guessing the most frequent class of the validation split; None with several labels"""
    copies: Copies | None = None
    """Of training images in validation; None where they were not looked for"""
    copies_in_test: dict[str, Copies] = field(default_factory=dict)
    """Of images of each other split in the test split"""
    companions: str = ""
    """That images may be masks of others, by their names"""
    series: str = ""
    """That images of a group, or whose names look like those of one thing, are in several splits"""
    alike: list[int] = field(default_factory=list)
    """Validation images that look like a training image, as edited copies do, and those compared; empty if unknown"""
    looked_at: int = 0
    """Images whose headers were read"""
    unlike: list[str] = field(default_factory=list)
    """Names of those in a format that few others have, and the format"""
    modes: dict[str, int] = field(default_factory=dict)
    shorter: int = 0
    """Pixels of the shorter side of a training image (the median)"""
    turned: int = 0

    def pairs(self) -> list[tuple[str, str, Copies]]:
        """For each two splits that were compared: the one, the other, and the images of the one that are copies."""
        of_test = [("test", title, copies) for title, copies in self.copies_in_test.items()]
        return [("validation", "training", self.copies), *of_test] if self.copies is not None else []


def examine(train: Samples, validation: Samples, data: DataConfig, test: Samples | None = None) -> Findings:
    """Look at all splits, as far as DATA.CHECK allows."""
    splits = {"training": train, "validation": validation}
    splits |= {"test": test} if test is not None else {}
    if train.classes is not None:
        names = distinct_names(train.classes)
    else:
        several = train.labels.ndim == 2
        most = train.labels.shape[1] if several else 1 + max(one.labels.max(initial=-1) for one in splits.values())
        names = [f"label {label}" for label in range(int(most))]
    by_class = {
        title: dict(zip(names, images_of_classes(samples.labels, len(names)).tolist(), strict=True))
        for title, samples in splits.items()
    }
    one_label = validation.labels.ndim == 1 and len(validation)
    share = 100 * max(by_class["validation"].values(), default=0) / len(validation) if one_label else None
    findings = Findings({title: len(samples) for title, samples in splits.items()}, by_class, share)
    if not any(samples.stored == "pixels" or samples.remote for samples in splits.values()):
        seconds = QUICK_SECONDS / (1 if test is None else 3) if data.CHECK == "quick" else float("inf")
        findings.copies = find_copies(train, validation, seconds)
        if test is not None:
            for title, of in (("training", train), ("validation", validation)):
                findings.copies_in_test[title] = find_copies(of, test, seconds)
    if train.stored != "pixels":
        _look_at_headers(findings, train, data)
    findings.series, findings.companions = series_of(splits, data), companions_of(splits)
    return findings


def companions_of(splits: Mapping[str, Samples]) -> str:
    """A sentence, if many images have the name of another one but for its ending, as masks have."""
    if sum(map(len, splits.values())) > MOST_NAMES or any(one.stored != "files" for one in splits.values()):
        return ""
    names = {of.name(index) for of in splits.values() for index in range(len(of))}  # images of tables may share a file
    by_stem = defaultdict[str, list[str]](list)
    for name in sorted(names):
        by_stem[os.path.splitext(name)[0]].append(name)
    pairs = [same for same in by_stem.values() if len(same) > 1]
    if sum(map(len, pairs)) < TORN * len(names):
        return ""
    first, second, *_ = pairs[0]
    return (
        f"{sum(map(len, pairs)):,} of {len(names):,} images have the name of another one but for the ending, such as "
        f"{first} and {second}. If one is the other's mask, list the masks in a file for DATA.EXCLUDE"
    )


def _named_alike(splits: Mapping[str, Samples], group: str) -> dict[str, list[str]]:
    """Of each image, by split, what this pattern finds in its name; '' where it says nothing: a whole name, or one
    that many have."""
    pattern, names, labels = re.compile(f"(?:.*/)?{group}"), dict[str, list[str]](), list[int]()
    for title, of in splits.items():
        matches = (pattern.match(of.name(index)) for index in range(len(of)))
        names[title] = [match[1] if match and match.end(1) < match.end() else "" for match in matches]
        labels += of.labels.tolist() if of.labels.ndim == 1 else [0] * len(of)
    everywhere = [name for of_split in names.values() for name in of_split]
    of_class, of_both = Counter(labels), Counter(zip(everywhere, labels, strict=True))
    nothing = {name for name, images in Counter(everywhere).items() if images > OF_IMAGES * len(everywhere)}
    nothing |= {name for (name, label), images in of_both.items() if images > OF_CLASS * of_class[label]}
    return {title: ["" if name in nothing else name for name in of_split] for title, of_split in names.items()}


def series_of(splits: Mapping[str, Samples], data: DataConfig) -> str:
    """A sentence, if images of one group are in several splits; without DATA.GROUP, of those that names hint at."""
    number = sum(map(len, splits.values()))
    if data.GROUP is not None:
        groups = {title: samples.groups or [] for title, samples in splits.items()}
        if len({group for of_split in groups.values() for group in of_split}) == number:
            each = f"each of {counted(number, 'image')} is a group of its own, which changes nothing"
            return f"DATA.GROUP {data.GROUP}: {each}"
        torn, counts, _ = _in_several(groups)
        if not torn:
            return ""
        return (
            f"DATA.GROUP {data.GROUP}: {counted(len(torn), 'group')} in more than one split, such as {min(torn)}: "
            f"{counts}. Metrics may be better there than on new groups (docs/splits.md)"
        )
    if number > MOST_NAMES or any(one.stored != "files" for one in splits.values()):
        return ""
    for word, (pattern, what) in IN_NAMES.items():
        torn, counts, most = _in_several(_named_alike(splits, pattern))
        if most >= TORN:
            keeps = "keeps them on one side of the split" if comes_unsplit(data) else "names them; split by them"
            return (
                f"{what}, the names of {counts} are also those of images in another split, such as {min(torn)}. If "
                f"such images show one thing, 'DATA.GROUP={word}' {keeps} (docs/splits.md)"
            )
    return ""


def _in_several(groups: Mapping[str, Sequence[str]]) -> tuple[set[str], str, float]:
    """The groups that several splits have; how many images these have of each, in words; and the largest fraction."""
    first, torn, counts, most = dict[str, str](), set[str](), list[str](), 0.0
    for title, of_images in groups.items():
        shared = [group for group in of_images if group and first.setdefault(group, title) != title]
        if shared:
            torn.update(shared)
            counts.append(f"{len(shared):,} of {len(of_images):,} {title} images")
            most = max(most, len(shared) / len(of_images))
    return torn, ", ".join(counts), most


def _look_at_headers(findings: Findings, train: Samples, data: DataConfig) -> None:
    """How the training images are stored."""
    quick = data.CHECK == "quick"
    count = min(LOOKED_AT, len(train)) if quick else len(train)
    end = time.monotonic() + (HEADER_SECONDS if quick else float("inf"))
    looked_at = list(_until(end, _headers(train, count, data)))
    headers = [header for _, header in looked_at]
    rare = rare_formats(headers)
    findings.unlike = [f"{train.name(at)} ({header.format})" for at, header in looked_at if header.format in rare]
    findings.looked_at = len(headers)
    findings.modes = dict(Counter(header.mode for header in headers if header.mode))
    findings.turned = sum(header.turned for header in headers)
    shorter = [min(header.size) for header in headers if min(header.size) > 0]
    findings.shorter = round(float(np.median(shorter))) if shorter else 0


def rare_formats(headers: Iterable[Header]) -> set[str]:
    """Formats of at most one in RARE of these images: placeholders and drawings often have one of their own."""
    formats = Counter(header.format for header in headers if header.format)
    return {name for name, images in formats.items() if images * RARE <= formats.total()}


def find_copies(train: Samples, validation: Samples, seconds: float) -> Copies:
    """Compare images of equal size by a hash of their contents. If the time is too short, a random part is compared."""
    begin = time.monotonic()
    end = begin + seconds
    of_validation = _sizes(validation, begin + SIZES_OF_VALIDATION * seconds)
    of_training = _sizes(train, begin + SIZES_OF_BOTH * seconds)
    known = of_validation[of_validation >= 0]
    shared = np.intersect1d(known, of_training)
    copies = Copies(0, int(len(known) - np.isin(known, shared).sum()), training=int((of_training >= 0).sum()))
    orders = [np.argsort(sizes, kind="stable") for sizes in (of_training, of_validation)]
    ordered = [sizes[order] for sizes, order in zip((of_training, of_validation), orders, strict=True)]
    for size in np.random.default_rng(0).permutation(shared).tolist():
        training, validating = (
            order[slice(*np.searchsorted(sizes, (size, size + 1)))].tolist()
            for sizes, order in zip(ordered, orders, strict=True)
        )
        twins = dict(_digests(train, training, end))
        digests = list(_digests(validation, validating, end))
        if time.monotonic() > end:
            break
        copies.compared += len(validating)
        for digest, index in digests:
            if digest in twins:
                other = not np.array_equal(validation.labels[index], train.labels[twins[digest]])
                copies.found += 1
                copies.relabelled += int(other)
                names = validation.name(index), train.name(twins[digest])
                copies.examples.insert(0 if other else MOST_NAMED, names)
                del copies.examples[MOST_NAMED:]
    return copies


def _sizes(samples: Samples, end: float) -> np.ndarray:
    """Sizes of blocks of neighbours in random order, as long as there is time; -1 for the others, 0 without a file."""
    sizes = np.full(len(samples), -1, dtype=np.int64)
    blocks = np.random.default_rng(0).permutation(-(-len(samples) // BLOCK)).tolist()
    for block in _until(end, blocks):
        for index in range(block * BLOCK, min((block + 1) * BLOCK, len(samples))):
            sizes[index] = 0
            with contextlib.suppress(OSError, ValueError):  # unreadable: reported when it is trained on
                sizes[index] = samples.size(index)
    return sizes


def _digests(samples: Samples, indices: list[int], end: float) -> Iterator[tuple[bytes, int]]:
    for index in _until(end, indices):
        with contextlib.suppress(OSError, ValueError, Unreadable):
            yield hashlib.blake2b(bytes(samples.read(index)), digest_size=16).digest(), index


def _headers(samples: Samples, count: int, data: DataConfig) -> Iterator[tuple[int, Header]]:
    """Headers of `count` images, always the same ones, and their numbers; without images that cannot be read."""
    for index in np.random.default_rng(0).permutation(len(samples))[:count].tolist():
        with contextlib.suppress(OSError, Unreadable):
            yield index, header_of(samples.read(index), data)


def median_side(samples: Samples, data: DataConfig) -> int | None:
    """Median of the shorter sides of some images, in pixels; None if no image has a readable header.

    Other than `examine`, it reads the same images however long that takes, because every rank has to find the same.
    """
    sides = [min(header.size) for _, header in _headers(samples, MEASURED, data) if header.size != (0, 0)]
    return statistics.median_low(sides) if sides else None


def check_data(
    config: Config, train_set: ImageDataset, val_set: ImageDataset, folder: Path | None, alike: list[int]
) -> list[str]:
    """Notes on the data set. Logs warnings, and writes both into data.json. Images in memory, the program's own, pass.

    `folder` None: a dry run, which writes nothing. `alike`: as in `Findings`.
    """
    train, validation = train_set.single_images(), val_set.single_images()
    if train is None or validation is None:
        return []
    found = examine(train, validation, config.DATA, None if train.remote else open_test(config.DATA))
    found.alike = alike
    if config.task == NO_LABELS:
        found = replace(found, classes={title: {} for title in found.classes}, largest_class_percent=None)
    settings = ["-cfg", str(folder / CONFIG)] if folder else _settings_of_data(sys.argv)  # a dry run has no config.yaml
    # A tool executes no code that the run's settings name.
    use = ["-use", ",".join(config.own_files)] if config.own_files else []
    check = f"{tool('check_data')} {shlex.join([*settings, *use])}"
    notes = notes_of(found, config, check)
    warnings = [*warnings_of(found, config.DATA, check)]
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
            words += [flag] if value is True else [flag, str(value)]
    return words + [f"{key}={value}" for key, value in given.words.items() if is_of_data(key)]


def notes_of(found: Findings, config: Config, check: str) -> list[str]:
    """Lines for the log. `check`: the command that checks this data set."""
    return [*_of_classes(found, config), *_of_storage(found, config.DATA, check), *_of_search(found, check)]


def _of_classes(found: Findings, config: Config) -> Iterator[str]:
    training, train = found.classes["training"], config.TRAIN
    text = f"Data: {', '.join(f'{count:,} {title}' for title, count in found.images.items())} images"
    if training:
        smallest, largest = (pick(training, key=lambda name: training[name]) for pick in (min, max))
        of_each = f"from {training[smallest]:,} ({smallest}) to {training[largest]:,} ({largest}) training images"
        if training[smallest] == training[largest]:
            of_each = f"each of {counted(training[largest], 'training image')}"
        text += f" in {len(training):,} classes, {of_each}"
        if found.largest_class_percent is not None:
            text += f". Always guessing the largest class would give {found.largest_class_percent:.1f} % in validation"
    yield text

    counts = [count for count in training.values() if count]
    unequal = found.largest_class_percent is not None and counts and max(counts) >= UNEQUAL * min(counts)
    if unequal and train.NUM_EPOCHS:  # without epochs, such as for a probe, nothing is weighed
        # Neither the loss of a distillation nor one of the user's own has class weights.
        weights = " or TRAIN.CLASS_WEIGHTS=balanced" if train.DISTILLATION_TYPE is None and train.LOSS in LOSSES else ""
        alike = (
            f"DATA.SAMPLER=balanced{weights} would weigh classes alike, and SAVE_BEST_BY=balanced_acc would choose the "
            "best checkpoint so; both may lower top-1"
        )
        chooses = config.SAVE_BEST_BY in (BALANCED.name, MACRO_F1.name)
        if train.CLASS_WEIGHTS is not None or config.DATA.SAMPLER == "balanced":
            alike = "Balanced accuracy counts classes alike"
            alike += "" if chooses else "; SAVE_BEST_BY=balanced_acc chooses by it, which may lower top-1"
        elif chooses:
            alike = f"DATA.SAMPLER=balanced{weights} would weigh classes alike, which may lower top-1"
        yield (
            f"The largest class has {max(counts) / min(counts):.0f} times as many images as the smallest: top-1 mostly "
            f"counts the large ones. {alike}"
        )


def _of_storage(found: Findings, data: DataConfig, check: str) -> Iterator[str]:
    of = f"of {found.looked_at:,} training images"
    of += "" if found.looked_at == found.images["training"] else " looked at"
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
    if number := found.modes.get(TRANSPARENT):
        yield f"With an alpha channel (DATA.BACKGROUND={data.BACKGROUND}): {number:,} {of}"
    if number := found.modes.get(DEEP):
        yield f"With 16 bits, of which 8 are read: {number:,} {of}. DATA.BITS=16 reads all (docs/bands.md)"
    if found.turned and not data.EXIF_ROTATE:
        yield (
            f"To be turned by their EXIF data, but read as they are stored: {found.turned:,} {of}. "
            f"DATA.EXIF_ROTATE=true turns them{', in pack_images.py too' if data.DATASET == 'shards' else ''}; "
            f"`{check}` lists them"
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
    training, validation = found.classes["training"], found.classes["validation"]
    if found.series and data.GROUP is not None:
        yield f"{found.series}."
    if found.companions:
        yield f"{found.companions}."
    missing = [name for name, count in training.items() if count and not validation[name]]
    # Of a validation split that comes with the data, these have warned, before DATA.EXCLUDE.
    warned = data.DATASET.partition(":")[0] in ("hf", "imagefolder", "imagenet2012", "shards")
    if missing and (not warned or data.EXCLUDE or comes_unsplit(data)):
        of = f"{len(missing):,} of {len(training):,} (the first: {missing[0]})"
        yield f"Classes without validation images, of which no metric tells: {of}. Validation needs images of them."
    for one, other, copies in found.pairs():
        for copy, original in copies.examples[:1]:
            labels = f", {copies.relabelled:,} of them with another label there" if copies.relabelled else ""
            of = f"{copies.found:,} of {copies.compared:,} {one} images{labels}. {copy} has the bytes of {original}"
            lists = f"`{check}` lists them"
            if other == "training":
                lists = f"`{check} -fix exclude.txt` lists the copies, and with -near edited ones, too; train with "
                lists += "DATA.EXCLUDE=exclude.txt"
            yield f"Copies of {other} images, on which a model does better than on new ones: {of}. {lists}."
    if words := alike_in_words(found.alike):
        yield f"{words}. `{check} -alike DIR` shows them."
