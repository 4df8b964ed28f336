"""First sentences of the report of one run: what was learnt, how well, and how far to trust that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.common.report_page.runs import Run
from utils.config import Config
from utils.text import Interval, counted, wilson
from vitamp.metrics import ONE_LABEL, SEVERAL_LABELS, TOP1, Metric

LAYOUTS = ("csv", "imagefolder", "images", "imagenet2012", "shards")
"""Values of DATA.DATASET that say how images are stored: the folder's name says more"""
WIDE = 20.0
"""Width of an interval in percentage points, from which on the page warns of it"""


class Headline(NamedTuple):
    """How good the model is on the images of a split."""

    metric: Metric
    value: float
    interval: Interval | None
    images: int | None
    image: str
    """What an image of the split is called"""
    guess: float | None
    """The same metric without looking at the images"""
    guessing: str
    """How that is done"""
    remarks: Sequence[str] = ()


class Opening(NamedTuple):
    """`before`, `figure` and `after` are one sentence about the figure; `figure` is empty if nothing was measured."""

    learnt: str
    before: str
    figure: str
    after: str
    remarks: list[str]


def opening_of(run: Run, headline: Headline | None) -> Opening:
    """`headline`: of the evaluation; None: as the run's own validation measured it."""
    found = headline or _validated(run)
    remarks = [*_unfinished(run, found), *(found.remarks if found else ()), *_copies(run), *_few(found)]
    if found is None:
        return Opening(_learnt(run), "", "", "", remarks)
    place = f" on {counted(found.images, found.image)}" if found.images else ""
    between = f" (95 % interval {found.interval.words()})" if found.interval else ""
    figure = found.metric.number(found.value)
    before = f"Its {found.metric.plain_words or found.metric.words} is "
    return Opening(_learnt(run), before, figure, f"{place}{between}{_against(found)}.", remarks)


def _learnt(run: Run) -> str:
    samples = run.about.get("samples", {}).get("train")
    if run.config is None:
        return f"{run.name} was trained" + (f" on {counted(samples, 'image')}." if samples else ".")
    task, name = run.config.task, _data_name(run.config)
    images = f"{counted(samples, 'image')} {'from' if name.endswith('/') else 'of'} {name}" if samples else name
    labels = {ONE_LABEL: "", SEVERAL_LABELS: ", several per image"}.get(task)
    classes = run.config.MODEL.NUM_CLASSES
    told = f" to tell {classes:,} classes apart{labels}" if labels is not None and isinstance(classes, int) else ""
    told = told or ("" if labels is not None else ", without labels")
    return f"{run.config.MODEL.NAME} was trained on {images}{told}."


def _data_name(config: Config) -> str:
    """Name of the data set, or of its folder, with a slash."""
    path = config.DATA.DATA_PATH
    if config.DATA.DATASET in LAYOUTS and path:
        return f"{Path(str(path)).resolve().name}/"
    return config.DATA.DATASET


def _validated(run: Run) -> Headline | None:
    """The best validation of the run itself."""
    deciding = run.deciding if run.deciding.percent else run.history.task.best
    best = run.history.best(deciding)
    if best is None:
        return None
    images = run.about.get("samples", {}).get("val")
    interval = wilson(best.value, images) if images and deciding.counts_images else None
    guess, guessing = deciding.without_learning or (None, "")
    if deciding is TOP1:
        guess, guessing = run.about.get("largest_class_percent"), "always guessing the largest class"
    return Headline(deciding, best.value, interval, images, "validation image", guess, guessing)


def _against(found: Headline) -> str:
    """How the figure compares with guessing."""
    if found.guess is None:
        return ""
    guess = found.metric.number(found.guess)
    if found.value <= found.guess:
        return f", which is no better than {found.guessing} ({guess})"
    if found.interval and found.interval.low <= found.guess:
        return f"; {found.guessing} gives {guess}, so it may be no better than that"
    return f"; {found.guessing} gives {guess}"


def _unfinished(run: Run, found: Headline | None) -> list[str]:
    if run.state == "finished":
        return [] if found else ["The run ended without a validation."]
    if not run.history.lines:
        return ["The run has no metrics yet."]
    epochs = f" ({run.epochs} epochs)" if run.epochs else ""
    return [f"The run has not finished{epochs}" + (", so this may still change." if found else "; no validation yet.")]


def _copies(run: Run) -> list[str]:
    """What the data check found of copies."""
    copies, images = run.data_check.get("copies") or {}, run.data_check.get("images", {}).get("validation")
    compared, found = copies.get("compared"), copies.get("found")
    if not compared or found is None:
        return []
    if found:
        have = "image has a copy" if found == 1 else "images have a copy"
        of = "" if compared == images else f" (of {compared:,} compared)"
        return [f"{found:,} validation {have} in training{of}: expect less on new images."]
    return ["No validation image is a copy of a training image."] if compared == images else []


def _few(found: Headline | None) -> list[str]:
    if not found or not found.images or not found.interval or found.interval.high - found.interval.low < WIDE:
        return []
    return [f"{counted(found.images, found.image)} are few: the interval is wide."]
