"""Search for shortcuts: properties of the files, such as their size, that tell the class without the picture.

A model learns whatever separates the classes of its training images. If each class is of a source of its own, it may
learn the source; then its accuracy is another on new images.
"""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from datasets.decoding import Facts
from datasets.examine.findings import Image
from datasets.examine.trust import Doubt
from utils.statistics.differences import CONFIDENCE
from utils.statistics.groups import effective_images
from utils.statistics.proportions import Interval, Z, newcombe, wilson
from utils.text import some_of

FOLDS = 5
FEWEST = 20
"""Images of a class that are needed to say whether it is told; smaller classes are others"""
LEAF = 5
"""Fewest images from which the classifier learns a rule"""
MOST = 10_000
"""Images from which the classifiers learn. More would take longer, and hardly narrow an interval."""
# How many percentage points more of a class than of the others must be taken for it, at the interval's lower end
CLEAR = 20.0
CLEAR_WITH_CAVEAT = 60.0
"""For properties that may be right, such as the colour, in which most classes differ a little"""
NEARLY_ALL = 80.0
"""For a defect"""
MOST_NAMED = 3
"""Classes that a sentence names, and images that are named as examples"""
SIDE = 32
"""Pixels along each side of a thumbnail"""
EDGE = 2
CORNER = 4
"""Sides of the edges and corners of a thumbnail that are looked at"""


def _size(image: Image) -> Facts:
    wide, high = image.header.size
    return {"size": f"{wide} x {high}", "width": wide, "height": high, "width to height": wide / high}


def _encoding(image: Image) -> Facts:
    return {"format": image.header.format, **image.header.encoding}


def _bytes(image: Image) -> Facts:
    return {"bytes per pixel": image.header.bytes / math.prod(image.header.size)}


def _camera(image: Image) -> Facts:
    return image.header.camera


def _name(image: Image) -> Facts:
    """Return the name of the file with # for each number, without words from the names of the classes."""
    words = _words_of(tuple(image.split.class_names))
    pattern = re.sub(r"\d+", "#", words.sub("", PurePath(image.name).stem))
    return {"name": pattern, "length of name": len(pattern)}


@cache
def _words_of(class_names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the words of class names, without the s of plurals; it matches nothing if there are none."""
    words = {word.rstrip("s") for word in re.findall(r"[^\W\d_]{3,}", " ".join(class_names).lower())}
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(longest_first) or "(?!)", re.IGNORECASE)


def _pixels(image: Image) -> np.ndarray:
    """Return the thumbnail: channels x SIDE x SIDE."""
    return np.frombuffer(image.scan.thumbnail, np.uint8).reshape(-1, SIDE, SIDE)


EDGES = (("upper", "upper left"), ("right", "upper right"), ("lower", "lower right"), ("left", "lower left"))
"""An edge, and the corner with which it begins, clockwise; each a quarter turn from the one before"""


def _frame(image: Image) -> Facts:
    lightness = _pixels(image).mean(0)
    facts = dict[str, float]()
    for quarter_turns, (edge, corner) in enumerate(EDGES):
        turned = np.rot90(lightness, quarter_turns)
        for name, pixels in ((f"{edge} edge", turned[:EDGE]), (f"{corner} corner", turned[:CORNER, :CORNER])):
            facts[f"lightness of {name}"] = float(pixels.mean())
            facts[f"contrast of {name}"] = float(pixels.std())
    return facts


def _colour(image: Image) -> Facts:
    means = _pixels(image).mean((1, 2))
    red, green, blue = np.resize(means, 3).tolist()  # one channel is repeated
    return {"lightness": float(means.mean()), "red less green": red - green, "blue less green": blue - green}


class Group(NamedTuple):
    """Properties of an image that may tell its class together."""

    name: str
    words: str
    """Its name in a sentence"""
    properties: Callable[[Image], Facts]
    """Reads the properties of one image"""
    advice: str
    caveat: str = ""
    """Why an accuracy may be true all the same. With it, only a large difference is reported, which is no defect."""
    of_pixels: bool = False
    """Whether it needs a thumbnail"""

    @property
    def clear(self) -> float:
        """Percentage points from which the group tells a class."""
        return CLEAR_WITH_CAVEAT if self.caveat else CLEAR


NAMES = "A model cannot see names; they may contain the class, or the images may be of different sources"
SHOWN = "This may be what the images show"
TEST = "test with images of another source, or train with images of each class from each source"
CUT = f"Cut or resize all images alike; {TEST}"
ENCODE = f"Encode all images alike, best from originals of one kind; {TEST}"
FRAME = f"Look at the edges, and cut off borders, bars and markers; {TEST}"
GROUPS = (
    Group("size", "size and shape", _size, CUT),
    Group("format", "format, colour mode and JPEG settings", _encoding, ENCODE),
    Group("bytes", "bytes per pixel", _bytes, ENCODE),
    Group("camera", "camera and date (EXIF)", _camera, TEST.capitalize()),
    Group("name", "file names without numbers", _name, TEST.capitalize(), NAMES),
    Group("frame", "edges and corners", _frame, FRAME, SHOWN, of_pixels=True),
    Group("colour", "lightness and mean colour", _colour, TEST.capitalize(), SHOWN, of_pixels=True),
)


@dataclass
class Shortcut(Doubt):
    """Properties that tell classes apart without the picture."""

    properties: str = ""
    """Name of their group"""
    of_file: bool = True
    """Whether they are of the file alone; else they may be what the images show, or do no harm"""
    nearly_all: bool = False
    """Whether they are of the file, and tell nearly all images of a class from nearly all others"""
    classes: dict[str, float] = field(default_factory=dict)
    """Class that they tell -> percent of its images that are recognised; the clearest class first"""
    top1: float = 0.0
    """Percent of training images whose class a small classifier tells by these properties, in folds"""
    in_validation: bool = False
    """Whether they tell the clearest class in the validation split, too"""
    validation_top1: float | None = None
    """Percent of validation images whose class the classifier tells; None if none were looked at"""
    validation_interval: tuple[float, float] | None = None
    """The 95 % interval of that"""


class _Labelled:
    """Images with the numbers of their classes. Images of other classes than these have the last number."""

    def __init__(self, images: Sequence[Image], classes: Sequence[str]) -> None:
        self.images = images
        self.classes = classes
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = np.array([numbers.get(image.label, len(classes)) for image in images], int)
        groups = [image.split.samples.groups[image.index_in_split] for image in images if image.split.samples.groups]
        self.groups = np.array(groups)

    def percent(self, chosen: np.ndarray, among: np.ndarray) -> tuple[float, float]:
        """Return how many percent of the images `among` are `chosen`, and the effective number of these images."""
        values = chosen[among]
        groups = self.groups[among] if len(self.groups) else ()
        return 100 * float(values.mean()), effective_images(values, groups)

    def gain(self, number: int, guesses: np.ndarray, z: float = Z) -> Interval:
        """Return how many percentage points more images of a class than others are taken for it.

        `guesses` is the class for which each image is taken. `z` is the normal quantile of the interval.
        """
        inside = self.labels == number
        if not 0 < inside.sum() < len(inside):
            return Interval(-100.0, 100.0)
        percent, count = self.percent(guesses == number, inside)
        percent_of_others, count_of_others = self.percent(guesses == number, ~inside)
        return newcombe((percent, percent_of_others), (count, count_of_others), z)

    def top1(self, probabilities: np.ndarray) -> tuple[float, Interval]:
        """Return the percentage of images whose class is the most probable one, with its 95 % interval."""
        right = (probabilities.argmax(1) == self.labels) & (self.labels < len(self.classes))
        percent, count = self.percent(right, np.ones(len(right), bool))
        return percent, wilson(percent, count)


def _usable(images: Sequence[Image], group: Group) -> list[Image]:
    """Return the images whose header, and thumbnail if the group needs it, were read."""
    return [image for image in images if image.header.bytes and (image.scan.thumbnail or not group.of_pixels)]


def _large_classes(images: Sequence[Image]) -> list[str]:
    """Return the classes with enough images to say whether they are told, if there are as many others."""
    counts = Counter(image.label for image in images)
    return sorted(name for name, count in counts.items() if FEWEST <= count <= len(images) - FEWEST)


def find_shortcuts(training: Sequence[Image], open_validation: Callable[[], Sequence[Image]]) -> list[Shortcut]:
    """Find the properties of training images that tell their classes.

    `open_validation` returns the validation images. It is called only if there are such properties.
    """
    if not training or training[0].split.samples.labels.ndim > 1:
        return []
    chosen = np.random.default_rng(0).permutation(len(training))[:MOST]
    images = [training[index] for index in np.sort(chosen).tolist()]

    # With this quantile, the chance of any false claim is at most 5 %.
    comparisons = len(GROUPS) * max(len(_large_classes(images)), 1)
    z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / comparisons)
    validation: list[Image] | None = None
    shortcuts = []
    for group in GROUPS:
        images_of_group = _usable(images, group)
        classes = _large_classes(images_of_group)
        if not classes:
            continue
        search = _Search(group, _Labelled(images_of_group, classes))
        gains = search.gains(z)
        if max(gains, default=0.0) >= group.clear:
            if validation is None:
                validation = list(open_validation())
            shortcuts.append(search.shortcut(gains, _Labelled(_usable(validation, group), classes)))
    return shortcuts


class _Search:
    """Search for the classes that a group of properties tells, by a decision tree.

    Each training image is judged by a tree that learned neither from it nor from its group (DATA.GROUP). An image is
    taken for the class whose probability grows by the largest factor, so that large classes have no advantage.
    """

    def __init__(self, group: Group, images: _Labelled) -> None:
        self.group = group
        self.images = images
        self.properties = [group.properties(image) for image in images.images]
        self.ranks = _ranks_of_words(self.properties)
        self.numbers = _as_numbers(self.properties, self.ranks)
        self.frequencies = np.bincount(images.labels) / len(images.labels)

    def gains(self, z: float) -> list[float]:
        """Return the lower end of the gain of each class; empty if it cannot be measured. `z` as in `_Labelled.gain`."""
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict
        from sklearn.tree import DecisionTreeClassifier

        groups = self.images.groups if len(self.images.groups) else None
        if (self.numbers == self.numbers[0]).all() or (groups is not None and len(np.unique(groups)) < FOLDS):
            return []
        folds = StratifiedKFold if groups is None else StratifiedGroupKFold
        self.tree = DecisionTreeClassifier(min_samples_leaf=LEAF, random_state=0)
        with warnings.catch_warnings(action="ignore"):  # of classes that are not in every fold
            self.probabilities = cross_val_predict(
                self.tree,
                self.numbers,
                self.images.labels,
                groups=groups,
                cv=folds(FOLDS, shuffle=True, random_state=0),
                method="predict_proba",
            )
        self.guesses = (self.probabilities / self.frequencies).argmax(1)
        return [self.images.gain(number, self.guesses, z).low for number in range(len(self.images.classes))]

    def shortcut(self, gains: Sequence[float], validation: _Labelled) -> Shortcut:
        """Describe what the properties tell of training images, and of validation images. `gains`: of each class."""
        images = self.images
        clear = self.group.clear
        told = [number for number in np.argsort(gains)[::-1].tolist() if gains[number] >= clear]
        recalls = dict[str, float]()
        for number in told:
            recalls[images.classes[number]] = images.percent(self.guesses == number, images.labels == number)[0]
        clearest = told[0]
        inside = images.labels == clearest
        name = images.classes[clearest]
        interval = wilson(*images.percent(self.guesses == clearest, inside))
        mistaken, _ = images.percent(self.guesses == clearest, ~inside)
        top1, top1_interval = images.top1(self.probabilities)
        sentences = [
            f"{self.group.words}: without the picture, {recalls[name]:.0f} % of {inside.sum():,} training images of "
            f"{name} are recognised ({interval.low:.0f} to {interval.high:.0f} %), and {mistaken:.0f} % of others are "
            f"taken for it. {self._clearest_property(inside, name)}",
            f"In all, the class of {top1:.1f} % of {len(inside):,} training images is told "
            f"({top1_interval.words()}; guessing: {100 * self.frequencies.max():.1f} %)",
        ]
        if len(told) > 1:
            others = [f"{other} ({recall:.0f} %)" for other, recall in recalls.items() if other != name]
            sentences.insert(1, f"Also recognised: {some_of(others, MOST_NAMED)}")
        shortcut = Shortcut(
            kind="shortcut",
            sentence="",
            advice=self.group.advice,
            images=[images.images[index].name for index in np.flatnonzero(inside)[:MOST_NAMED].tolist()],
            properties=self.group.name,
            of_file=not self.group.caveat,
            nearly_all=not self.group.caveat and gains[clearest] >= NEARLY_ALL,
            classes=recalls,
            top1=top1,
        )
        if len(validation.images):
            sentences.append(self._add_validation(shortcut, clearest, validation))
        if self.group.caveat:
            sentences.append(self.group.caveat)
        shortcut.sentence = ". ".join(sentences)
        return shortcut

    def _add_validation(self, shortcut: Shortcut, number: int, validation: _Labelled) -> str:
        """Add to a shortcut what the tree tells of validation images, and return a sentence on it.

        `number` is that of the class that is told best in training.
        """
        numbers = _as_numbers([self.group.properties(image) for image in validation.images], self.ranks)
        probabilities = self.tree.fit(self.numbers, self.images.labels).predict_proba(numbers)
        top1, interval = validation.top1(probabilities)
        gain = validation.gain(number, (probabilities / self.frequencies).argmax(1))
        shortcut.validation_top1 = top1
        shortcut.validation_interval = tuple(interval)
        told = f"of {len(validation.images):,} validation images, it is {top1:.1f} % ({interval.words()})"
        shortcut.in_validation = gain.low >= self.group.clear
        if shortcut.in_validation:
            if shortcut.of_file:
                guess = 100 * np.bincount(validation.labels).max() / len(validation.labels)
                shortcut.points = max(top1 - guess, 0.0)
            return f"The validation split has the same, so its accuracy cannot tell what a model sees beside it: {told}"
        if gain.high < self.group.clear:
            return f"The validation split does not have it, so its accuracy does not profit: {told}"
        return f"Too few validation images show whether they have the same: {told}"

    def _clearest_property(self, inside: np.ndarray, name: str) -> str:
        """Say in which property the images of the class `name`, where `inside` is true, differ most from others."""
        from scipy.stats import ks_2samp  # It takes a second to import.

        largest = -1.0
        sentence = ""
        for key in self.properties[0]:
            values = np.array([properties[key] for properties in self.properties])
            own = values[inside]
            other = values[~inside]
            if key in self.ranks:
                words, word_of_image = np.unique(values, return_inverse=True)
                counts = np.bincount(word_of_image[inside], minlength=len(words))
                other_counts = np.bincount(word_of_image[~inside], minlength=len(words))
                differences = np.abs(counts / len(own) - other_counts / len(other))
                best = int(differences.argmax())
                difference = float(differences[best])
                text = f"{key} {words[best]}: {counts[best]:,} of {len(own):,} images of {name}, "
                text += f"{other_counts[best]:,} of {len(other):,} others"
            else:
                difference = float(ks_2samp(own, other).statistic)
                text = f"{key} (median): {np.median(own):.3g} in {name}, {np.median(other):.3g} in others"
            if difference > largest:
                largest = difference
                sentence = text
        return sentence


def _ranks_of_words(all_properties: Sequence[Facts]) -> dict[str, dict[str, int]]:
    """Number the words that are values of each property, from the most frequent on.

    So a rule of a tree separates a frequent word from all rare ones.
    """
    ranks = dict[str, dict[str, int]]()
    for key, value in all_properties[0].items():
        if isinstance(value, str):
            counts = Counter(str(properties[key]) for properties in all_properties)
            ranks[key] = {word: rank for rank, (word, _) in enumerate(counts.most_common())}
    return ranks


def _as_numbers(all_properties: Sequence[Facts], ranks: Mapping[str, Mapping[str, int]]) -> np.ndarray:
    """Return the properties of images as a table of numbers, in which words are their ranks."""
    rows = []
    for properties in all_properties:
        row = dict(properties)
        for key, rank_of in ranks.items():
            row[key] = rank_of.get(str(row[key]), len(rank_of))
        rows.append(list(row.values()))
    return np.array(rows, np.float32)
