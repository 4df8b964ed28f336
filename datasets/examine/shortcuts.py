"""Search for shortcuts: properties of the files, such as their size, that show the class without the picture.

A model learns whatever separates the classes of its training images. If each class is of a source of its own, it may
learn the source; then its accuracy is another on new images.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from datasets.decoding import Facts
from datasets.examine.copies import until
from datasets.examine.findings import Image, Shortcut
from utils.statistics.differences import CONFIDENCE
from utils.statistics.groups import effective_images
from utils.statistics.proportions import Interval, Z, newcombe, wilson

FOLDS = 5
FEWEST = 10
"""Fewest images of a class that is examined; images of smaller classes count as others"""
LEAF = 5
"""Fewest images from which the classifier learns a rule"""
MOST_WORDS = 100
"""Values of a property, such as sizes or cameras, that the classifier can learn one by one"""
MOST_CLASSES = 100
"""Classes that are examined, the largest; the time grows with their number"""
MOST = 10_000
"""Images from which the classifiers learn. More would take longer, and hardly narrow an interval."""
# How many percentage points more of a class than of the others must be taken for it, at the interval's lower end
CLEAR = 20.0
CLEAR_WITH_CAVEAT = 60.0
"""For properties that may be right, such as the colour, in which most classes differ a little"""
NEARLY_ALL = 80.0
"""For a defect"""
MOST_NAMED = 3
"""Images that are named as examples"""
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
    """Return a pattern of the words of class names, with or without an s; it matches nothing if there are none."""
    words = {word.rstrip("s") for word in re.findall(r"[^\W\d_]{3,}", " ".join(class_names).lower())}
    longest_first = sorted(words, key=len, reverse=True)
    any_word = "|".join(longest_first) or "(?!)"
    return re.compile(f"(?:{any_word})s*", re.IGNORECASE)


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


def _detail(image: Image) -> Facts:
    pixels = _pixels(image).astype(np.float32)
    return {"contrast": float(pixels.std()), "detail": float(np.abs(np.diff(pixels)).mean())}


def _colour(image: Image) -> Facts:
    means = _pixels(image).mean((1, 2))
    red, green, blue = np.resize(means, 3).tolist()  # one channel is repeated
    return {"lightness": float(means.mean()), "red less green": red - green, "blue less green": blue - green}


class Group(NamedTuple):
    """Properties of an image that may show its class together."""

    name: str
    properties: Callable[[Image], Facts]
    """Reads the properties of one image"""
    advice: str
    caveat: str = ""
    """Why an accuracy may be true all the same. With it, only a large difference is reported, and it is no defect."""
    explanation: Callable[[Image], Facts] | None = None
    """Reads properties of the picture that may be the cause. The caveat is SHOWN if they show classes too, or if there
    are too few thumbnails to know."""
    of_pixels: bool = False
    """Whether `properties` needs a thumbnail"""

    @property
    def clear(self) -> float:
        """Percentage points of `Taken.gain` from which the group recognises a class."""
        return CLEAR_WITH_CAVEAT if self.caveat else CLEAR


NAMES = "A model cannot see names; they may contain the class, or the images may be of different sources"
SHOWN = "This may be what the images show"
TEST = "Test with images of another source, or train with images of each class from each source"
CUT = f"Cut or resize all images alike. {TEST}"
ENCODE = f"Encode all images alike, best from originals of one kind. {TEST}"
FRAME = f"Look at the edges; cut off borders, bars and markers. {TEST}"
GROUPS = (
    Group("size and shape", _size, CUT),
    Group("format, colour mode and JPEG settings", _encoding, ENCODE),
    Group("bytes per pixel", _bytes, ENCODE, explanation=_detail),
    Group("camera and date (EXIF)", _camera, TEST),
    Group("file names without numbers", _name, TEST, NAMES),
    Group("edges and corners", _frame, FRAME, SHOWN, of_pixels=True),
    Group("lightness and mean colour", _colour, TEST, SHOWN, of_pixels=True),
)


class Taken(NamedTuple):
    """How many percent of the images of a class, and of other images, are taken for the class."""

    recall: float
    interval: Interval
    """The 95 % interval of the recall"""
    mistaken: float
    """Of other images"""
    gain: Interval
    """Interval of the difference, in percentage points"""


class _Labelled:
    """Images with the numbers of their classes. Images of other classes than these have the last number."""

    def __init__(self, images: Sequence[Image], classes: Sequence[str] | None = None) -> None:
        """`classes`: by default, those that are large enough to be examined, and leave as many other images."""
        names = [image.label for image in images]
        if classes is None:
            counts = Counter(names).most_common(MOST_CLASSES)
            classes = [name for name, count in counts if FEWEST <= count <= len(images) - FEWEST]
        self.images = images
        self.classes = classes
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = np.array([numbers.get(name, len(classes)) for name in names], int)
        groups = list[str]()
        for image in images:
            names = image.split.samples.groups
            groups.append(names[image.index_in_split] if names else str(image.index_in_split))
        self.groups = np.unique(groups, return_inverse=True)[1]

    def percent(self, chosen: np.ndarray, among: np.ndarray) -> tuple[float, float]:
        """Return how many percent of the images `among` are `chosen`, and the effective number of these images."""
        values = chosen[among]
        return 100 * float(values.mean()), effective_images(values, self.groups[among])

    def taken(self, number: int, guesses: np.ndarray, z: float = Z) -> Taken:
        """Return how many images of a class, and of others, are taken for it.

        `guesses` is the class for which each image is taken. `z` is the normal quantile of the interval of the gain.
        """
        inside = self.labels == number
        if not 0 < inside.sum() < len(inside):
            return Taken(0.0, Interval(0.0, 100.0), 0.0, Interval(-100.0, 100.0))
        recall, count = self.percent(guesses == number, inside)
        mistaken, count_of_others = self.percent(guesses == number, ~inside)
        gain = newcombe((recall, mistaken), (count, count_of_others), z)
        return Taken(recall, wilson(recall, count), mistaken, gain)

    def top1(self, probabilities: np.ndarray) -> tuple[float, Interval]:
        """Return the percentage of images whose class is the most probable one, with its 95 % interval."""
        right = (probabilities.argmax(1) == self.labels) & (self.labels < len(self.classes))
        percent, count = self.percent(right, np.ones(len(right), bool))
        return percent, wilson(percent, count)


def why_not_examined(training: Sequence[Image]) -> str:
    """Say why no shortcuts are searched for in these training images; '' if they are."""
    images = _sample(training)
    if not any(image.header.bytes for image in images):
        return "nothing is known of the files, as of arrays and bands"
    if images[0].split.samples.labels.ndim > 1:
        return "the images have several labels"
    labelled = _Labelled(images)
    if not labelled.classes:
        return f"of {len(images):,} training images, no class has {FEWEST}, and other classes as many"
    if labelled.groups.max() < FOLDS:
        return f"the training images are of at most {FOLDS} groups"
    return ""


def find_shortcuts(
    training: Sequence[Image], open_validation: Callable[[], Sequence[Image]], seconds: float = 0.0
) -> list[Shortcut]:
    """Find the properties of training images that show their classes.

    `open_validation` returns the validation images. It is called only if there are such properties. In at most so many
    `seconds`, thumbnails of training images without one are made, and again of validation images.
    """
    if why_not_examined(training):
        return []
    images = with_thumbnails(_sample(training), seconds)

    # With this quantile, the chance of any false claim is at most 5 %.
    comparisons = len(GROUPS) * len(_Labelled(images).classes)
    z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / comparisons)
    open_validation = cache(open_validation)
    shortcuts = []
    for group in GROUPS:
        search = _Search(group, images, z)
        if search.recognised and group.explanation is not None:
            explanation = group._replace(properties=group.explanation, of_pixels=True)
            explained = _Search(explanation, images, z)
            if explained.recognised or not explained.images.classes:
                search = _Search(group._replace(caveat=SHOWN), images, z)
        if search.recognised:
            validation = open_validation()
            if group.of_pixels:
                validation = with_thumbnails(validation, seconds)
            shortcuts.append(search.shortcut(validation))
    return shortcuts


def _sample(images: Sequence[Image]) -> list[Image]:
    """Return MOST of the images, drawn at random, or all if they are fewer."""
    return random.Random(0).sample(images, min(MOST, len(images)))


def with_thumbnails(images: Sequence[Image], seconds: float) -> list[Image]:
    """Make thumbnails of images that have none, of as many as so many seconds allow."""
    result = list(images)
    for index in until(time.monotonic() + seconds, range(len(images))):
        image = images[index]
        if image.scan.thumbnail or not image.header.bytes:
            continue
        # A damaged image can raise anything, and Pillow warns of images that it can read.
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            opened = PIL.Image.open(io.BytesIO(bytes(image.split.samples.read(image.index_in_split))))
            opened.draft("RGB", (2 * SIDE, 2 * SIDE))
            pixels = np.asarray(opened.convert("RGB").resize((SIDE, SIDE), PIL.Image.Resampling.BILINEAR))
            result[index] = image._replace(scan=image.scan._replace(thumbnail=pixels.transpose(2, 0, 1).tobytes()))
    return result


def _usable(images: Sequence[Image], group: Group) -> list[Image]:
    """Return the images whose header, and thumbnail if the group needs it, could be read."""
    return [image for image in images if image.header.bytes and (image.scan.thumbnail or not group.of_pixels)]


class _Search:
    """Search for the classes that a group of properties recognises, by a decision tree.

    Each training image is judged by a tree that learned neither from it nor from its group (DATA.GROUP). An image is
    taken for the class whose probability grows by the largest factor, so that large classes have no advantage.
    """

    def __init__(self, group: Group, images: Sequence[Image], z: float) -> None:
        """`images`: those of training. `z`: as in `_Labelled.taken`."""
        from sklearn.feature_extraction import DictVectorizer
        from sklearn.tree import DecisionTreeClassifier

        self.group = group
        usable = _usable(images, group)
        self.images = _Labelled(usable)
        self.recognised = list[int]()
        """Numbers of the classes that the properties recognise, the clearest first"""
        labels = self.images.labels
        groups = self.images.groups
        if not self.images.classes or groups.max() < FOLDS:
            return

        # Each word, such as the name of a camera, becomes a column, if enough images have it.
        self.columns = DictVectorizer()
        table = self.columns.fit_transform(map(group.properties, usable))
        frequent = np.flatnonzero(np.bincount(table.indices) >= max(LEAF, len(labels) / MOST_WORDS))
        self.columns.restrict(frequent, indices=True)
        self.table = table[:, frequent].toarray()
        if (self.table == self.table[0]).all():
            return

        self.tree = DecisionTreeClassifier(min_samples_leaf=LEAF, random_state=0)
        self.frequencies = np.bincount(labels) / len(labels)
        self.probabilities = np.zeros((len(labels), len(self.frequencies)))
        for fold in range(FOLDS):
            held_out = groups % FOLDS == fold
            self.tree.fit(self.table[~held_out], labels[~held_out])
            self.probabilities[np.ix_(held_out, self.tree.classes_)] = self.tree.predict_proba(self.table[held_out])
        self.tree.fit(self.table, labels)
        self.guesses = self._guesses(self.probabilities)
        self.taken = [self.images.taken(number, self.guesses, z) for number in range(len(self.images.classes))]
        clear = [number for number, taken in enumerate(self.taken) if taken.gain.low >= group.clear]
        self.recognised = sorted(clear, key=self._clearness, reverse=True)

    def _clearness(self, number: int) -> tuple[float, float]:
        """Order classes by their gain, and those of one gain by the images that are mistaken for them."""
        taken = self.taken[number]
        return round(taken.gain.low, 6), -taken.mistaken

    def _guesses(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the class for which each image is taken."""
        return (probabilities / self.frequencies).argmax(1)

    def shortcut(self, validation: Sequence[Image]) -> Shortcut:
        """Describe what the properties recognise, also of validation images."""
        images = self.images
        group = self.group
        clearest = self.recognised[0]
        name = images.classes[clearest]
        inside = images.labels == clearest
        taken = images.taken(clearest, self.guesses)
        low, high = taken.interval
        top1, top1_interval = images.top1(self.probabilities)
        fact, has = self._clearest_fact(inside)
        counts = [int(chosen.sum()) for chosen in (has & inside, inside, has & ~inside, ~inside)]
        having, of_class, others_having, others = counts
        shortcut = Shortcut(
            kind="shortcut",
            sentence=(
                f"{name}: {group.name} alone recognise {taken.recall:.0f} % ({low:.0f} to {high:.0f} %) of its "
                f"{of_class:,} training images, mistaking {taken.mistaken:.0f} % of others; {fact}: {having:,} of "
                f"these, {others_having:,} of {others:,} others"
            ),
            advice=f"{group.caveat}. {group.advice}".removeprefix(". "),
            images=[images.images[index].name for index in np.flatnonzero(inside)[:MOST_NAMED].tolist()],
            properties=group.name,
            of_file=not group.caveat,
            nearly_all=not group.caveat and taken.gain.low >= NEARLY_ALL,
            classes={images.classes[number]: self.taken[number].recall for number in self.recognised},
            interval=taken.interval,
            mistaken=taken.mistaken,
            fact=fact,
            fact_counts=counts,
            top1=top1,
            top1_interval=top1_interval,
        )
        usable = _usable(validation, group)
        if usable:
            shortcut.sentence += f". {self._judge_validation(shortcut, _Labelled(usable, images.classes))}"
        return shortcut

    def _judge_validation(self, shortcut: Shortcut, validation: _Labelled) -> str:
        """Measure the properties on validation images, record that in the shortcut, and return a sentence about it."""
        table = self.columns.transform(map(self.group.properties, validation.images))
        probabilities = np.asarray(self.tree.predict_proba(table.toarray()))
        top1, shortcut.validation_interval = validation.top1(probabilities)
        guessing = 100 * float(np.bincount(validation.labels).max()) / len(validation.labels)
        gain = validation.taken(self.recognised[0], self._guesses(probabilities)).gain
        shortcut.validation_top1 = top1
        wrong = np.flatnonzero(probabilities.argmax(1) != validation.labels)
        shortcut.misled = [validation.images[index].index_in_split for index in wrong.tolist()]
        shortcut.in_validation = gain.low >= self.group.clear
        count = f"{len(validation.images):,}"
        if shortcut.in_validation:
            if shortcut.of_file:
                shortcut.points = max(top1 - guessing, 0.0)
            return (
                f"Validation has it too: without the picture, {top1:.0f} % of its {count} images are classified "
                f"correctly; by guessing, {guessing:.0f} %"
            )
        if gain.high < self.group.clear:
            return "Validation does not have it, so accuracy there does not profit from it"
        return f"Its {count} validation images are too few to say whether validation has it too"

    def _clearest_fact(self, inside: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the single property that separates the images of a class best from others, and which images have it.

        `inside`: whether an image is of that class. The best property has the largest difference between the fractions
        of both that have it. If two are equal, words say more than numbers.
        """
        from scipy.stats import ks_2samp

        names = self.columns.feature_names_
        tests: list[Any] = [ks_2samp(values[inside], values[~inside], method="asymp") for values in self.table.T]
        best = max(range(len(names)), key=lambda column: (tests[column].statistic, "=" in names[column]))
        limit = tests[best].statistic_location
        fact = names[best].replace("=", " ", 1)
        if "=" not in names[best]:
            fact += f" above {limit:,.4g}"
        return fact, self.table[:, best] > limit
