"""Says how far to trust a metric: the reasons why it may be another on new images, with what each may be worth.

The log, evaluate.py, the report, the model card and check_data.py all take these doubts from here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets import comes_unsplit, has_test
from datasets.examine.trust import Doubt
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.program import tool
from utils.record.run_folder import CONFIG, alike_in_words, known_to_training
from utils.statistics.groups import Groups, effective_images
from utils.statistics.proportions import Interval, newcombe, wilson
from utils.text import counted, some_of
from vitamp.metrics import Metric

MOST = 7
"""Most doubts that are shown; those of the smallest effect are left out."""
FEW = 100
"""With fewer validation images than this, folds are advised."""
CHANCE = "chance"
"""Kind of the doubt that the interval of a metric expresses."""


class Splits(NamedTuple):
    """Facts about the data's splits that advice depends on.

    A run collects them before it trains, since the data may be gone at its end.
    """

    unsplit: bool = False
    """The program makes the validation split."""
    test: bool = False
    """There is a test split that is not used for validation."""


def splits_of(data: DataConfig) -> Splits:
    """Collect the facts about the splits of `data`; those of no data if it cannot be read."""
    with suppress(UserError):
        return Splits(comes_unsplit(data), has_test(data))
    return Splits()


@dataclass
class Result:
    """A metric of a model on the images of one split, and what is known of these images."""

    metric: Metric
    value: float
    interval: Interval | None = None
    """The 95 % interval; None if it is unknown"""
    images: int | None = None
    """Number of images; None if it is unknown"""
    image: str = "validation image"
    """What an image of the split is called"""
    guess: float | None = None
    """The metric of guessing without looking at the images; None if it is unknown"""
    guessing: str = ""
    """How such a guess is made, such as 'always guessing the largest class'"""
    is_right: np.ndarray | None = None
    """Whether each image is recognised; None if that is unknown, or with several labels per image"""
    groups: Groups = ()
    """Group of each image (DATA.GROUP); empty without groups"""
    related: Sequence[int] = ()
    """Indices of the images that have relatives among the training images"""
    validations: int = 0
    """Number of validations on these images of which the best chose the weights; 0 if none did"""
    last: float | None = None
    """The metric of the last of them; None if it is unknown"""
    problems: list[Doubt] = field(default_factory=list)
    """Doubts that the predictions raise, as `strange` finds them"""
    remarks: list[str] = field(default_factory=list)
    """Sentences on the metric that are no doubts"""


class Source(NamedTuple):
    """The run that a metric is of, for the commands that advice names."""

    run: Path | None = None
    """Its folder; None if there is none, as for check_data.py"""
    splits: Splits = Splits()
    fold: bool = False
    """Whether it validates on a fold of its data (DATA.FOLD)"""


NO_RUN = Source()


def doubts(data: Mapping[str, Any], result: Result | None = None, source: Source = NO_RUN) -> list[Doubt]:
    """Return the reasons to doubt an accuracy, those of the largest known effect first.

    `data`: what is known of training and validation images (data.json); empty if the metric is of other images.
    `result`: what was measured; None if nothing was measured yet.
    """
    found = [_by_relatives(data, result, source), _by_shortcut(data, result), _by_names(data), _by_classes(data)]
    if result is not None:
        found += [_by_chance(result, source), _by_choice(result, source), *result.problems]
    known = [doubt for doubt in found if doubt is not None]
    known.sort(key=lambda doubt: abs(doubt.points or 0.0), reverse=True)
    return known[:MOST]


def _by_relatives(data: Mapping[str, Any], result: Result | None, source: Source) -> Doubt | None:
    """Return the doubt that images with relatives in training raise: copies, look-alikes, images of their group."""
    copies = data.get("copies") or {}
    related = data.get("related", []) if result is None else result.related
    number = max(len(related), copies.get("found", 0))
    command = ""
    if source.run is not None:
        command = f"{tool('check_data')} {shlex.join(['-cfg', str(source.run / CONFIG), *data.get('use', ())])} "
    shows = f"`{command}-alike DIR` shows them"
    if number == 0:  # some may look alike, without being relatives
        images = "validation images" if result is None else f"{result.image}s"
        look_alike = alike_in_words(data.get("alike") or [], f"{images} look like training images")
        return Doubt("relatives", look_alike, advice=shows) if look_alike else None

    if result is not None and result.is_right is not None and len(related) > 0:
        doubt = _compare_relatives(result, result.is_right)
    else:
        total = data["images"]["validation"] if result is None or result.images is None else result.images
        doubt = Doubt("relatives", f"{number:,} of {total:,} validation images have relatives in training")
        doubt.points = 100 * number / total  # without them, the accuracy cannot be lower by more
    # Training sees the originals of copies, so checkpoints that remember them look better than they are.
    if result is not None and result.validations > 1 and known_to_training(dict(data)):
        doubt.sentence += "; they also favour checkpoints that remember them"
    doubt.advice = f"{shows}; -split FILE divides the images so that no part has relatives"
    doubt.images = [copy for copy, _original in copies.get("examples", [])]
    return doubt


def _compare_relatives(result: Result, is_right: np.ndarray) -> Doubt:
    """Compare top-1 on the images that have relatives with top-1 on the others, which may be what to expect.

    The relatives are worth a number of points only if the difference is beyond chance.
    """
    has_relatives = np.zeros(len(is_right), bool)
    has_relatives[[index for index in result.related if index < len(is_right)]] = True
    number = np.count_nonzero(has_relatives)
    if has_relatives.all():
        return Doubt("relatives", f"all {number:,} {result.image}s have relatives in training")
    group_of = np.array(result.groups) if len(result.groups) else np.arange(len(is_right))
    percents = list[float]()
    independent = list[float]()
    texts = list[str]()
    for chosen in (has_relatives, ~has_relatives):
        percent = 100 * float(is_right[chosen].mean())
        images = effective_images(is_right[chosen], group_of[chosen])
        percents.append(percent)
        independent.append(images)
        texts.append(f"{percent:.2f} % ({wilson(percent, images).words()})")
    with_relatives, without = texts
    sentence = (
        f"{number:,} of {len(is_right):,} {result.image}s have relatives in training: top-1 {with_relatives} on them, "
        f"{without} on the other {len(is_right) - number:,}"
    )
    lowest_difference, _ = newcombe((percents[0], percents[1]), independent)
    if lowest_difference <= 0:
        return Doubt("relatives", f"{sentence}, which may be chance")
    points = 100 * float(is_right.mean()) - percents[1]
    return Doubt("relatives", f"{sentence}, as on new images like these", points=points)


def _by_shortcut(data: Mapping[str, Any], result: Result | None) -> Doubt | None:
    """Return the doubt that the strongest shortcut raises: properties of files that recognise validation images."""
    shortcuts = [one for one in data.get("shortcuts", []) if one["of_file"] and one["in_validation"]]
    if not shortcuts:
        return None
    strongest = max(shortcuts, key=lambda one: one["validation_top1"])
    interval = Interval(*strongest["validation_interval"])
    points = strongest["points"]
    if result is not None and result.guess is not None:
        points = min(points, max(result.value - result.guess, 0.0))
    return Doubt(
        "shortcut",
        f"without the picture, {strongest['properties']} alone recognise {strongest['validation_top1']:.1f} % of the "
        f"validation images ({interval.words()}), so a model may know the files instead of the pictures",
        points=points,
        advice=strongest["advice"],
        images=strongest["images"],
    )


def _by_names(data: Mapping[str, Any]) -> Doubt | None:
    """Return the doubt that names of images raise: they may show one thing in several splits."""
    series = data.get("series", "")
    is_known = series.startswith("DATA.GROUP")  # these images are relatives
    return None if is_known or not series else Doubt("names", f"{series[0].lower()}{series[1:]}")


def _by_classes(data: Mapping[str, Any]) -> Doubt | None:
    """Return the doubt that classes without validation images raise, of which no accuracy speaks."""
    classes = data.get("classes", {})
    training = classes.get("training", {})
    missing = [name for name, images in classes.get("validation", {}).items() if not images and training.get(name)]
    if not missing:
        return None
    verb = "has" if len(missing) == 1 else "have"
    sentence = f"{counted(len(missing), 'class')} of {len(training):,} {verb} no validation image: {some_of(missing)}"
    return Doubt("classes", sentence, advice="Validation needs images of each class")


def _by_chance(result: Result, source: Source) -> Doubt | None:
    """Return the doubt that the number of images leaves: how far the metric may be from that of all such images."""
    if result.interval is None or result.images is None:
        return None
    advice = "More of them narrow it"
    if result.images < FEW and result.image == "validation image":
        advice = _advice_of_folds(source) or advice
    sentence = f"chance, on {counted(result.images, result.image)}"
    groups = len(set(result.groups))
    if 0 < groups < result.images:
        sentence += f" in {counted(groups, 'group')}, which the interval allows for (DATA.GROUP)"
    return Doubt(CHANCE, sentence, points=result.value - result.interval.low, advice=advice)


def _advice_of_folds(source: Source) -> str:
    """Return the advice to judge by folds, and its command; '' if folds cannot help."""
    if source.run is None or source.fold or not source.splits.unsplit:
        return ""
    words = shlex.join(["-cfg", str(source.run / CONFIG), "-folds", "5", "-output", f"{source.run}-folds"])
    return f"To judge by all images, each once, train on five folds: `{tool('compare')} {words}`"


def _by_choice(result: Result, source: Source) -> Doubt | None:
    """Return the doubt that the best of several validations raises, which flatters on the images that chose it."""
    if result.validations < 2:
        return None
    doubt = Doubt("choice", f"it is the best of {result.validations} validations on these images")
    if result.last is not None and result.metric.percent:
        doubt.points = abs(result.value - result.last) or None
        doubt.sentence += f"; the last had {result.metric.number(result.last)}"
    doubt.advice = "Only a test split, of images that choose nothing, shows what to expect (docs/splits.md)"
    if source.splits.test and source.run is not None:
        command = f"{tool('evaluate')} {shlex.quote(str(source.run))} -part test"
        doubt.advice = f"Measure on the test images, which chose nothing, once you have decided: `{command}`"
    return doubt
