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
from utils.record.run_folder import CONFIG, LookAlikes, alike_in_words, known_to_training, may_be_copies
from utils.statistics.groups import Groups, effective_images
from utils.statistics.proportions import Interval, newcombe, wilson
from utils.text import counted, some_of
from vitamp.metrics import Metric

MOST = 7
"""Most doubts that are shown; those of the smallest effect are left out."""
FEW = 100
"""With fewer validation images than this, folds are advised."""
TOO_HIGH = "Perhaps too high"
TOO_LOW = "Perhaps too low"
"""Effects of doubts of which nothing was measured, or nothing beyond chance"""
CHANCE = "chance"
"""Kind of the doubt that the number of images leaves"""
UNWARNED = ("names", "shortcut")
"""Kinds of doubts that the start of a run does not warn of, since they may be nothing"""
FEWEST_COMPARED = 5
"""Fewer images than this say nothing."""
FEWEST_TOLD = 20
"""Of fewer images than this, a difference that may be chance is not called so: they are too few to tell."""
WIDE = 10.0
"""A bound of more points than this says too little to be shown."""
SMALL = 0.5
"""A doubt about fewer points than this is not worth a line."""


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
    """A metric of a model on the images of one split, and facts about these images."""

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
    own_data: bool = True
    """Whether the evaluated images are of the run's own data, which check_data.py reads"""


NO_RUN = Source()


def doubts(data: Mapping[str, Any], result: Result | None = None, source: Source = NO_RUN) -> list[Doubt]:
    """Return the reasons to doubt an accuracy, those of the largest known effect first.

    `data`: the content of data.json, about training and validation images; empty if the metric is of other images.
    `result`: what was measured; None if nothing was measured yet.
    """
    found = [
        _by_relatives(data, result, source),
        _by_shortcut(data, result),
        _by_names(data, result, source),
        _by_classes(data, result),
    ]
    if result is not None:
        found += [_by_chance(data, result, source), _by_choice(data, result, source), *result.problems]
    known = [doubt for doubt in found if doubt is not None and (result is None or not _is_small(doubt))]
    # What makes it too high is not worth more than all that is above guessing, below which only chance may lead.
    if result is not None and result.guess is not None:
        for doubt in known:
            if doubt.points is not None and doubt.kind != CHANCE:
                doubt.points = min(doubt.points, max(result.value - result.guess, 0.0))
    if result is None:
        # Before anything is measured, the points only say how many images are concerned, as the sentences do.
        for doubt in known:
            doubt.effect_in_words = TOO_HIGH
    known.sort(key=lambda doubt: abs(doubt.points or 0.0), reverse=True)
    return known[:MOST]


def _is_small(doubt: Doubt) -> bool:
    """Whether a doubt is about so few points that it is not worth a line."""
    return not doubt.effect_in_words and doubt.points is not None and abs(doubt.points) < SMALL


def _by_relatives(data: Mapping[str, Any], result: Result | None, source: Source) -> Doubt | None:
    """Return the doubt that images with relatives in training raise: copies, look-alikes, images of their group."""
    related = data.get("related", [])
    images = "validation images"
    if result is not None:
        related = result.related
        images = f"{result.image}s"
    total = result.images if result is not None and result.images else data.get("images", {}).get("validation", 0)
    copies = data.get("copies") or {}
    number = max(len(related), copies.get("found", 0))
    sentence = _relatives_in_words(data, number, total, images)
    if not sentence:
        return None

    command = ""
    if source.run is not None:
        command = f"{tool('check_data')} {shlex.join(['-cfg', str(source.run / CONFIG), *data.get('use', ())])}"
    doubt = Doubt("relatives", sentence)
    if source.own_data:
        has_weights = data.get("pretrained", True)  # which -alike needs
        doubt.advice = f"`{command} -alike DIR` shows them" if has_weights else f"`{command}` names copies"
    if number == 0:
        return doubt
    if source.own_data:
        doubt.advice += "; -split FILE divides the images, with these in one part"
    most = 100 * number / total  # without them, the accuracy cannot be lower by more
    doubt.points = most
    if most > WIDE:
        doubt.effect_in_words = TOO_HIGH
    doubt.images = [copy for copy, _original in copies.get("examples", [])]
    if result is not None and result.is_right is not None:
        _compare_with_unrelated(doubt, result, _marked(related, len(result.is_right)), data)
    # Training sees the originals of copies.
    if result is not None and result.validations > 1 and known_to_training(dict(data)):
        doubt.sentence += "; the choice of the best checkpoint favours one that has memorised them"
    return doubt


def _relatives_in_words(data: Mapping[str, Any], number: int, total: int, images: str) -> str:
    """Say how many images have relatives in training, or only look as if; '' if none do.

    `number`: how many have. `total`: of so many. `images`: what they are called.
    """
    alike = data.get("alike") or []
    if number == 0:  # some may look alike, without being relatives; a few of them are no reason to doubt
        if LookAlikes(*alike).images < FEWEST_COMPARED:
            return ""
        return alike_in_words(alike, f"{images} look like training images")
    has_copies = (data.get("copies") or {}).get("found", 0) > 0
    if may_be_copies(alike) and not has_copies and number <= LookAlikes(*alike).images:
        return f"{number:,} of {total:,} {images} look like training images, as edited copies do"
    return f"at least {number:,} of {total:,} {images} have relatives in training"


def _marked(indices: Sequence[int], images: int) -> np.ndarray:
    """Return whether each image is one of `indices`."""
    marks = np.zeros(images, bool)
    marks[[index for index in indices if index < images]] = True
    return marks


def _compare_with_unrelated(doubt: Doubt, result: Result, chosen: np.ndarray, data: Mapping[str, Any]) -> None:
    """Compare top-1 on some images with that on those without any sign of a relative in training, as `_compare` does.

    `chosen`: whether each image is one of those with relatives, or of those with the name of a training image.
    """
    has_sign = chosen | _marked(result.related, len(chosen)) | _marked(data.get("namesakes", []), len(chosen))
    others = f"the other {(~has_sign).sum():,}"
    if (has_sign & ~chosen).any():
        others = f"the {(~has_sign).sum():,} with neither relatives nor such names"
    _compare(doubt, result, easy=chosen, on_easy="on them", telling=~has_sign, on_telling=f"on {others}")


def _compare(
    doubt: Doubt, result: Result, easy: np.ndarray, on_easy: str, telling: np.ndarray, on_telling: str
) -> None:
    """Add to a doubt top-1 on images that may be easier than new ones, and on telling ones, which are like new ones.

    The doubt's points become those by which top-1 on all images is above that on the telling ones, and its effect is
    only perhaps if that may be chance. Nothing is added if either are too few, or of too few groups.

    `easy`, `telling`: whether each image is such a one. `on_easy`, `on_telling`: words for where that is.
    """
    if not (easy.any() and telling.any()):
        return
    is_right = np.asarray(result.is_right)
    group_of = np.array(result.groups) if len(result.groups) else np.arange(len(is_right))
    percents = list[float]()
    independent = list[float]()
    texts = list[str]()
    for chosen in (easy, telling):
        percent = 100 * float(is_right[chosen].mean())
        images = effective_images(is_right[chosen], group_of[chosen])
        percents.append(percent)
        independent.append(images)
        texts.append(f"{percent:.2f} % ({wilson(percent, images).words()})")
    if min(independent) < FEWEST_COMPARED:
        return
    doubt.sentence += f": top-1 {texts[0]} {on_easy}, {texts[1]} {on_telling}"
    lowest_difference, _ = newcombe((percents[0], percents[1]), independent)
    # Without the easy ones, the accuracy cannot be lower by more than their fraction.
    doubt.points = min(max(100 * float(is_right.mean()) - percents[1], 0.0), 100 * float(easy.mean()))
    doubt.effect_in_words = ""
    if lowest_difference <= 0:
        doubt.effect_in_words = TOO_HIGH
        is_few = min(independent) < FEWEST_TOLD
        doubt.sentence += ", too few to tell" if is_few else ", a difference that may be chance"


def _by_shortcut(data: Mapping[str, Any], result: Result | None) -> Doubt | None:
    """Return the doubt that the strongest shortcut raises: properties of files that recognise validation images.

    Where these properties are wrong, only knowledge of the pictures helps: top-1 there shows what they may be worth.
    """
    shortcuts = [one for one in data.get("shortcuts", []) if one["of_file"] and one["in_validation"]]
    if not shortcuts:
        return None
    strongest = max(shortcuts, key=lambda one: one["validation_top1"])
    interval = Interval(*strongest["validation_interval"])
    images = "validation images" if result is None else f"{result.image}s"
    doubt = Doubt(
        "shortcut",
        f"without the picture, {strongest['properties']} alone recognise {strongest['validation_top1']:.1f} % of the "
        f"{images} ({interval.words()})",
        points=strongest["points"],
        advice=strongest["advice"],
        images=strongest["images"],
    )
    if result is not None and result.is_right is not None:
        is_misled = _marked(strongest["misled"], len(result.is_right))
        _compare(
            doubt,
            result,
            easy=~is_misled,
            on_easy="where these name the class",
            telling=is_misled,
            on_telling=f"on the {is_misled.sum():,} images where they name another",
        )
    return doubt


def _by_names(data: Mapping[str, Any], result: Result | None, source: Source) -> Doubt | None:
    """Return the doubt that names of images raise: they may show one thing in several splits.

    Only the advice has an example of such a name, which may be that of a person: the model card leaves advice out.
    """
    namesakes = data.get("namesakes", [])
    if not namesakes:
        return None
    total = data["images"]["validation"]
    sentence = data["series"][0].lower() + data["series"][1:]
    if result is not None:  # examined in place of validation images, and compared with training images alone
        sentence = sentence.replace("validation images", f"{result.image}s")
        sentence = sentence.replace("an image in another split", "a training image")
    advice = data.get("series_advice", "")
    if not source.own_data:
        advice = "If they show the same things, it is the accuracy on new pictures of known things (docs/data.md)"
    doubt = Doubt("names", sentence, points=100 * len(namesakes) / total, advice=advice)
    doubt.effect_in_words = TOO_HIGH  # names alone prove nothing
    if result is not None and result.is_right is not None:
        _compare_with_unrelated(doubt, result, _marked(namesakes, len(result.is_right)), data)
    return doubt


def _by_classes(data: Mapping[str, Any], result: Result | None) -> Doubt | None:
    """Return the doubt that classes without evaluated images raise, of which no accuracy speaks."""
    classes = data.get("classes", {})
    training = classes.get("training", {})
    missing = [name for name, images in classes.get("validation", {}).items() if not images and training.get(name)]
    if not missing:
        return None
    verb = "has" if len(missing) == 1 else "have"
    image = "validation image" if result is None else result.image
    sentence = f"{counted(len(missing), 'class')} of {len(training):,} {verb} no {image}: {some_of(missing)}"
    return Doubt("classes", sentence, advice="An evaluation needs images of each class")


def _by_chance(data: Mapping[str, Any], result: Result, source: Source) -> Doubt | None:
    """Return the doubt that the number of images leaves: how far the metric may be from that of all such images."""
    if result.interval is None or result.images is None:
        return None
    sentence = f"chance, on {counted(result.images, result.image)}"
    too_low = result.interval.high - result.value
    if too_low >= 0.05:  # else it is shown as 0.0, or as -0.0
        sentence += f"; it may as well be {too_low:.1f} points too low"
    advice = "More of them narrow it"
    is_few = result.images < FEW and result.image == "validation image"
    if _is_chosen(result) and _choice_may_be_chance(result):
        sentence += f". It is the best of {_choice_in_words(result)}"
        advice = _advice_of_test(data, source)
    elif is_few and source.splits.test:
        advice = _advice_of_test(data, source)
    if is_few:
        advice = _advice_of_folds(data, source) or advice
    groups = len(set(result.groups))
    if 0 < groups < result.images:
        sentence += f". The interval allows for their {counted(groups, 'group')} (DATA.GROUP)"
    return Doubt(CHANCE, sentence, points=result.value - result.interval.low, advice=advice)


def _advice_of_folds(data: Mapping[str, Any], source: Source) -> str:
    """Return the advice to judge by folds, and its command; '' if folds cannot help."""
    if source.run is None or source.fold or not source.splits.unsplit:
        return ""
    words = ["-cfg", str(source.run / CONFIG), *data.get("use", ()), "-folds", "5", "-output", f"{source.run}-folds"]
    together = ""
    group = data.get("series_group", "")  # keeps images together whose names say that they may show one thing
    if group:
        words.append(f"DATA.GROUP={group}")
        together = ", with images of one name together"
    return f"To judge by all images, each once, train on five folds{together}: `{tool('compare')} {shlex.join(words)}`"


def _by_choice(data: Mapping[str, Any], result: Result, source: Source) -> Doubt | None:
    """Return the doubt that the best of several validations raises, which flatters on the images that chose it.

    None if the difference from the last one may be chance: then the doubt about chance says it.
    """
    if not _is_chosen(result) or _choice_may_be_chance(result):
        return None
    points = None
    if result.last is not None and result.metric.percent:
        points = abs(result.value - result.last)
    sentence = f"it is the best of {_choice_in_words(result)}"
    return Doubt("choice", sentence, points=points, advice=_advice_of_test(data, source))


def _is_chosen(result: Result) -> bool:
    """Whether the metric is the best of several validations, and better than the last."""
    return result.validations > 1 and result.last != result.value


def _choice_may_be_chance(result: Result) -> bool:
    """Whether the last validation's metric is in the interval of the best one."""
    if result.interval is None or result.last is None or not result.metric.percent:
        return False
    return result.last >= result.interval.low


def _choice_in_words(result: Result) -> str:
    words = f"{result.validations} validations on these images"
    if result.last is not None and result.metric.percent:
        words += f"; the last had {result.metric.number(result.last)}"
    return words


def _advice_of_test(data: Mapping[str, Any], source: Source) -> str:
    """Return the advice to evaluate test images, and its command if there are any."""
    if not source.splits.test or source.run is None:
        return "Only a test split, of images that choose nothing, shows what to expect (docs/splits.md)"
    command = f"{tool('evaluate')} {shlex.quote(str(source.run))} -part test"
    if data.get("use"):
        command += " -trust"  # of the user's own code
    return f"Measure on the test images, which chose nothing, once you have decided: `{command}`"
