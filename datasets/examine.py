"""What is found in a data set, and what is said of it before training (DATA.CHECK): classes, copies of images in both
splits, odd images.

Nothing here changes a training. In a large data set, only as much is looked at as a few seconds allow. check_data.py
reads all images, and adds to these findings.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np

from datasets.base import Encoded, ImageDataset, Samples, Unreadable
from datasets.decoding import DEEP, TRANSPARENT, Header, header_of
from datasets.labels import ANY_LABEL, distinct_names, images_of_classes
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
# Fractions of them after which no more sizes are looked up, so that time is left to compare contents
SIZES_OF_VALIDATION = 0.2
SIZES_OF_BOTH = 0.65
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
# Most of all images, and of those of a class, with one such name, for it to say what they show: not IMG_, no class
OF_IMAGES = 0.05
OF_CLASS = 0.25
TORN = 0.1
"""Least fraction of a split whose names other splits have too, for a note"""
MOST_NAMES = 200_000
"""Most images whose names are read"""
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
    """Of all splits."""

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

    @classmethod
    def of(cls, splits: Mapping[str, Samples], data: DataConfig, unnamed: str, num_classes: int = ANY_LABEL) -> Self:
        """What labels and names say. `unnamed`: words before the label of a class that has no name."""
        return cls(
            images={title: len(samples) for title, samples in splits.items()},
            classes=_images_by_class(splits, unnamed, num_classes),
            series=series_of(splits, data),
            companions=companions_of(splits),
        )

    def pairs(self) -> list[tuple[str, str, Copies]]:
        """For each two splits that were compared: the one, the other, and the images of the one that are copies."""
        if self.copies is None:
            return []
        of_test = [("test", title, copies) for title, copies in self.copies_in_test.items()]
        return [("validation", "training", self.copies), *of_test]


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
        _look_at_headers(findings, train, data)
    return findings


def _images_by_class(splits: Mapping[str, Samples], unnamed: str, num_classes: int) -> dict[str, dict[str, int]]:
    """Images per class, by split: by name, with the label where classes share one, and by label where it has no class.

    Without names, the labels from 0 to the largest valid one are the names.
    """
    first = next(iter(splits.values()))
    several = first.labels.ndim == 2
    names = distinct_names(first.classes or ())
    if not names:
        largest = max(samples.labels[samples.labels < num_classes].max(initial=-1) for samples in splits.values())
        number = first.labels.shape[1] if several else int(largest) + 1
        names = [f"{unnamed}{label}" for label in range(number)]
    by_split = {title: dict.fromkeys(names, 0) for title in splits}
    for title, samples in splits.items():
        if several:
            found = enumerate(images_of_classes(samples.labels, len(names)))
        else:
            found = zip(*np.unique(samples.labels, return_counts=True), strict=True)
        for label, count in found:
            name = names[label] if 0 <= label < len(names) else f"label {label}"
            by_split[title][name] = int(count)
    return by_split


def companions_of(splits: Mapping[str, Samples]) -> str:
    """A sentence, if many images have the name of another one but for its ending, as masks have."""
    if not _have_names(splits):
        return ""
    names = set[str]()  # images of tables may share a file
    for samples in splits.values():
        names.update(samples.name(index) for index in range(len(samples)))
    by_stem = defaultdict[str, list[str]](list)
    for name in sorted(names):
        by_stem[os.path.splitext(name)[0]].append(name)
    pairs = [same for same in by_stem.values() if len(same) > 1]
    number = sum(map(len, pairs))
    if number < TORN * len(names):
        return ""
    first, second, *_ = pairs[0]
    return (
        f"{number:,} of {len(names):,} images have the name of another one but for the ending, such as "
        f"{first} and {second}. If one is the other's mask, list the masks in a file for DATA.EXCLUDE"
    )


def _have_names(splits: Mapping[str, Samples]) -> bool:
    """Whether the images are files, and not too many to read the names of."""
    return sum(map(len, splits.values())) <= MOST_NAMES and all(one.stored == "files" for one in splits.values())


def _named_alike(splits: Mapping[str, Samples], group: str) -> dict[str, list[str]]:
    """Of each image, by split, what this pattern finds in its name; '' where it says nothing: a whole name, or one
    that many have."""
    pattern = re.compile(f"(?:.*/)?{group}")
    names = dict[str, list[str]]()
    labels = list[int]()
    for title, of in splits.items():
        matches = (pattern.match(of.name(index)) for index in range(len(of)))
        names[title] = [match[1] if match and match.end(1) < match.end() else "" for match in matches]
        labels += of.labels.tolist() if of.labels.ndim == 1 else [0] * len(of)
    everywhere = list(chain.from_iterable(names.values()))
    of_class = Counter(labels)
    of_both = Counter(zip(everywhere, labels, strict=True))
    nothing = {name for name, images in Counter(everywhere).items() if images > OF_IMAGES * len(everywhere)}
    nothing |= {name for (name, label), images in of_both.items() if images > OF_CLASS * of_class[label]}
    return {title: ["" if name in nothing else name for name in of_split] for title, of_split in names.items()}


def series_of(splits: Mapping[str, Samples], data: DataConfig) -> str:
    """A sentence, if images of one group are in several splits; without DATA.GROUP, of those that names hint at."""
    if data.GROUP is not None:
        groups = {title: samples.groups or [] for title, samples in splits.items()}
        number = sum(map(len, splits.values()))
        if len(set(chain.from_iterable(groups.values()))) == number:
            each = f"each of {counted(number, 'image')} is a group of its own, which changes nothing"
            return f"DATA.GROUP {data.GROUP}: {each}"
        torn = _in_several(groups)
        if not torn.groups:
            return ""
        return (
            f"DATA.GROUP {data.GROUP}: {counted(len(torn.groups), 'group')} in more than one split, such as "
            f"{min(torn.groups)}: {torn.images}. Metrics may be better there than on new groups (docs/splits.md)"
        )
    if not _have_names(splits):
        return ""
    for word, (pattern, what) in IN_NAMES.items():
        torn = _in_several(_named_alike(splits, pattern))
        if torn.most >= TORN:
            keeps = "keeps them on one side of the split" if comes_unsplit(data) else "names them; split by them"
            return (
                f"{what}, the names of {torn.images} are also those of images in another split, such as "
                f"{min(torn.groups)}. If such images show one thing, 'DATA.GROUP={word}' {keeps} (docs/splits.md)"
            )
    return ""


class Torn(NamedTuple):
    """Groups that several splits have."""

    groups: set[str]
    images: str
    """How many of each later split are of groups that an earlier one has, in words"""
    most: float
    """The largest fraction of them"""


def _in_several(groups: Mapping[str, Sequence[str]]) -> Torn:
    first = dict[str, str]()
    torn = set[str]()
    counts = list[str]()
    most = 0.0
    for title, of_images in groups.items():
        shared = [group for group in of_images if group and first.setdefault(group, title) != title]
        if shared:
            torn.update(shared)
            counts.append(f"{len(shared):,} of {len(of_images):,} {title} images")
            most = max(most, len(shared) / len(of_images))
    return Torn(torn, ", ".join(counts), most)


def _look_at_headers(findings: Findings, train: Samples, data: DataConfig) -> None:
    """How the training images are stored."""
    count = len(train)
    seconds = float("inf")
    if data.CHECK == "quick":
        count = min(LOOKED_AT, count)
        seconds = HEADER_SECONDS
    end = time.monotonic() + seconds
    looked_at = list(_until(end, _headers(train, count, data)))
    headers = [header for _, header in looked_at]
    rare = rare_formats(headers)
    findings.unlike = [f"{train.name(at)} ({header.format})" for at, header in looked_at if header.format in rare]
    findings.looked_at = len(headers)
    findings.modes = dict(Counter(header.mode for header in headers if header.mode))
    findings.turned = sum(header.turned for header in headers)
    shorter = shorter_sides(headers)
    findings.shorter = round(float(np.median(shorter))) if shorter else 0


def shorter_sides(headers: Iterable[Header]) -> list[int]:
    """In pixels, where they are known."""
    shorter = (min(header.size) for header in headers)
    return [side for side in shorter if side > 0]


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
    without_twin = len(known) - np.isin(known, shared).sum()
    copies = Copies(found=0, compared=int(without_twin), training=int((of_training >= 0).sum()))
    training_of = _by_size(of_training)
    validation_of = _by_size(of_validation)
    for size in np.random.default_rng(0).permutation(shared).tolist():
        twins = dict(_digests(train, training_of(size), end))
        validating = validation_of(size)
        digests = list(_digests(validation, validating, end))
        if time.monotonic() > end:
            break
        copies.compared += len(validating)
        for digest, index in digests:
            if digest in twins:
                twin = twins[digest]
                relabelled = not np.array_equal(validation.labels[index], train.labels[twin])
                copies.found += 1
                copies.relabelled += int(relabelled)
                names = validation.name(index), train.name(twin)
                copies.examples.insert(0 if relabelled else MOST_NAMED, names)
                del copies.examples[MOST_NAMED:]
    return copies


def _by_size(sizes: np.ndarray) -> Callable[[int], list[int]]:
    """Gives the indices of the images of a size."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]

    def images_of(size: int) -> list[int]:
        first, end = np.searchsorted(ordered, (size, size + 1))
        return order[first:end].tolist()

    return images_of


def digest_of(encoded: Encoded) -> bytes:
    """Equal for images of equal bytes."""
    return hashlib.blake2b(bytes(encoded), digest_size=16).digest()


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
            yield digest_of(samples.read(index)), index


def _headers(samples: Samples, count: int, data: DataConfig) -> Iterator[tuple[int, Header]]:
    """Headers of `count` images, always the same ones, and their numbers; without images that cannot be read."""
    for index in np.random.default_rng(0).permutation(len(samples))[:count].tolist():
        with contextlib.suppress(OSError, Unreadable):
            yield index, header_of(samples.read(index), data)


def median_side(samples: Samples, data: DataConfig) -> int | None:
    """Median of the shorter sides of some images, in pixels; None if no image has a readable header.

    Other than `examine`, it reads the same images however long that takes, because every rank has to find the same.
    """
    shorter = shorter_sides(header for _, header in _headers(samples, MEASURED, data))
    return statistics.median_low(shorter) if shorter else None


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
    if found.turned and not data.EXIF_ROTATE:
        where = ", in pack_images.py too" if data.DATASET == "shards" else ""
        yield (
            f"To be turned by their EXIF data, but read as they are stored: {found.turned:,} {of}. "
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
    training = found.classes["training"]
    validation = found.classes["validation"]
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
