"""Runs as the report reads them: settings, metrics and environment from the files in a run's folder, in words."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.measure.throughput import shown_rate
from engine.report.outcome import favoured, flatters, splits_of
from tools.common.tables import differing_settings
from utils.config import Config, config_of_run
from utils.errors import UserError
from utils.program import started_as
from utils.record.history import History, Line
from utils.record.run_folder import alike_in_words, copies_unknown, is_run_folder, read_about, read_data
from utils.statistics.proportions import Interval, wilson
from utils.text import clock, counted
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import LOSS, METRICS, ONE_LABEL, SEVERAL_LABELS, TOP1, Metric, metric_named
from vitamp.weights import chosen_at

T = TypeVar("T")
Row = tuple[str, list[str]]
"""Title, and one text per run"""
NOTHING = "-"
AT_BEST = "{} of the best checkpoint"
LAYOUTS = ("csv", "imagefolder", "images", "imagenet2012", "shards")
"""Values of DATA.DATASET that say how images are stored: the folder's name says more"""
MAIN_FIGURES = ("precision", "images/s", "peak memory", "training time", "updates skipped")
WIDE = 20.0
"""Width of an interval in percentage points, from which on the page warns of it"""


@dataclass(frozen=True)
class Run:
    """One run, read from its folder."""

    folder: Path
    name: str
    config: Config | None
    about: Line
    """run.json"""
    history: History

    @property
    def subject(self) -> str:
        return f"{self.config.MODEL.NAME} on {self.config.DATA.DATASET}" if self.config else ""

    @property
    def precision(self) -> str:
        return str(self.about.get("choices", {}).get("precision", "unknown"))

    @property
    def deciding(self) -> Metric:
        """The metric that decides which validation is the best."""
        return metric_named(self.config.SAVE_BEST_BY) if self.config else self.history.task.best

    @property
    def state(self) -> str:
        """How the run ended, or that it has not."""
        events = self.history.of("run")
        last = events[-1].get("what", "") if events else ""
        if last == "end":
            return "finished"
        if last == "paused":
            return "paused, to be resumed"
        return "running, or cut off" if self.history.lines else "no metrics yet"

    @cached_property
    def verdict(self) -> Line:
        """Last verdict of the run on where its time went, as `Bottleneck.as_dict` has it; empty without one."""
        verdicts = [line["perf"]["verdict"] for line in self.history.lines if "verdict" in line.get("perf", {})]
        return verdicts[-1] if verdicts else {}

    @property
    def epochs(self) -> str:
        """'2 of 40'; empty without metrics."""
        if not self.history.lines:
            return ""
        done = max((line.get("epoch") or 0 for line in self.history.of("epoch")), default=0)
        return f"{done} of {self.config.TRAIN.NUM_EPOCHS}" if self.config else f"{done}"


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """The folders of the runs that these paths are in, each once."""
    folders: list[Path] = []
    for path in paths:
        folder = run_folder_of(path) or path
        if not path.exists() or not folder.is_dir() or not is_run_folder(folder):
            raise UserError(f"{path}: no run there (looked for config.yaml, run.json, metrics.jsonl).")
        if folder.resolve() not in [known.resolve() for known in folders]:
            folders.append(folder)
    return folders


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, called by their folders, with as much of the paths as these need to differ."""
    folders = folders_of(paths)
    whole = [folder.resolve() for folder in folders]
    names = [folder.name for folder in whole]
    if len(set(names)) < len(names):
        names = [os.path.relpath(folder, os.path.commonpath(whole)) for folder in whole]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        # A config.yaml that cannot be read is perhaps of a later version, or not written yet: the rest can be shown.
        config = _unless_damaged(config_of_run, folder, None)
        about = _unless_damaged(read_about, folder, {})
        runs.append(Run(folder, name, config=config, about=about, history=History.of_run(folder)))
    return runs


def _unless_damaged(read: Callable[[Path], T], folder: Path, instead: T) -> T:
    try:
        return read(folder)
    except UserError:
        return instead


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """The program's metrics, and those of the users' own that the runs have measured."""
    found = dict.fromkeys(METRICS.values())
    for run in runs:
        found |= dict.fromkeys(run.history.metrics)
    return list(found)


def summary(runs: Sequence[Run], judged: Metric | None) -> tuple[list[Row], list[Row]]:
    """The table of runs, and those of its rows that the page opens with. Rows without any text are left out.

    These are the metric that chose the best checkpoints, or that a comparison is `judged` by, with its last values.
    """
    deciding = [judged] if judged else [run.deciding for run in runs]
    shown = [one for one in metrics_of(runs) if one in deciding or (one.title and one.decides and one is not LOSS)]
    columns = [_metrics_column(run, shown) | _column(run) for run in runs]
    rows = {}
    for title in columns[0]:
        values = [column[title] for column in columns]
        texts = [NOTHING if value in (None, "") else str(value) for value in values]
        if texts.count(NOTHING) < len(texts):
            rows[title] = texts
    first = [AT_BEST.format(metric.words) for metric in deciding]
    if judged:
        first.insert(0, f"last {judged.words}")
        first.append(f"last {runs[0].history.task.best.words}")
    first += MAIN_FIGURES
    return list(rows.items()), [(title, rows[title]) for title in dict.fromkeys(first) if title in rows]


def _metrics_column(run: Run, metrics: Sequence[Metric]) -> dict[str, str]:
    """Each metric of the best checkpoint and of the last validation, by title; '' where it is unknown."""
    history = run.history
    found = {}
    best = history.best(run.deciding)
    at = ""
    if best:
        at = f"epoch {best.line['epoch']}" if best.line["epoch"] else "before training"
        if best.which.mark:
            at += f", {best.which.mark}"
    for metric in metrics:
        value = best.line.get(f"{best.which.prefix}{metric.name}") if best else None
        found[AT_BEST.format(metric.words)] = "" if value is None else f"{metric.number(value)} ({at})"
        last = history.last(metric).items()
        found[f"last {metric.words}"] = ", ".join(which.marked(metric.number(value)) for which, value in last)
    return found


def _column(run: Run) -> dict[str, Any]:
    """What else is known of a run, by title; None or '' where it is not."""
    history = run.history
    config = run.config
    about = run.about
    choices = about.get("choices", {})
    begun = about.get("begun", about)
    rate = history.images_per_second
    memory = history.peak_memory_gb
    weights = about.get("parameters")
    parameters = ""
    if weights:
        parameters = f"{weights['all']:,}"
        if weights["trainable"] != weights["all"]:
            parameters += f", trainable {weights['trainable']:,}"
    counts = ", ".join(f"{count:,} {part}" for part, count in about.get("samples", {}).items())
    data = config.DATA.DATASET if config else ""
    return {
        "checkpoint": _unless_damaged(lambda folder: chosen_at(folder).words, run.folder, ""),
        "precision": run.precision,
        "images/s": shown_rate(rate) if rate else "",
        "peak memory": f"{memory:.2f} GB" if memory else "",
        "training time": clock(history.seconds) if history.seconds else "",
        "epochs": run.epochs,
        "updates skipped": history.skipped if history.of("train") else "",
        "state": run.state,
        "model": config.MODEL.NAME if config else "",
        "parameters": parameters,
        "data": f"{data} ({counts})" if data and counts else data or counts,
        "device": about.get("device"),
        "processes": choices.get("world_size"),
        "tag": about.get("tag"),
        "started": re.sub(r"T(\d\d:\d\d).*", r" \1", begun.get("started") or ""),
        "versions": ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items()),
        "command": begun.get("command"),
        "last resumed by": about.get("command") if "begun" in about else "",
        "folder": run.folder.resolve(),
    }


def data_notes(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What was said of the data before training, warnings first -> names of the runs of which it was said."""
    notes: dict[str, list[str]] = {}
    for kind in ("warnings", "notes"):
        for run in runs:
            for line in read_data(run.folder).get(kind, []):
                notes.setdefault(str(line), []).append(run.name)
    return notes


def varied_settings(runs: Sequence[Run], besides: Sequence[str] = ("SAVE",)) -> dict[str, list[str]]:
    """Settings in which the runs differ, with the text of each run; none if the settings of one are unknown."""
    configs = [run.config for run in runs if run.config is not None]
    return {} if len(configs) < len(runs) else differing_settings(configs, besides)


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
    remarks: list[str]


def opening_of(run: Run, headline: Headline | None) -> dict[str, Any]:
    """First sentences of the report of one run: what was learnt, how well, and how far to trust that.

    `headline`: of the evaluation; None: as the run's own validation measured it. `before`, `figure` and `after` are one
    sentence about the figure, which is missing if nothing was measured; the page lists the `remarks`.
    """
    found = headline or _validated(run)
    learnt = _learnt(run)
    remarks = _remarks(run, found)
    if found is None:
        return {"learnt": learnt, "figure": "", "remarks": remarks}
    after = ""
    if found.images:
        images = counted(found.images, found.image)
        after += f" on {images}"
        if found.interval and found.interval.high - found.interval.low >= WIDE:
            remarks.append(f"{images} are few: the interval is wide.")
    if found.interval:
        after += f" (95 % interval {found.interval.words()})"
    if found.guess is not None:
        guess = found.metric.number(found.guess)
        gives = f"{found.guessing[0].upper()}{found.guessing[1:]} gives {guess}"
        if found.value <= found.guess:
            after += f", which is no better than {found.guessing} ({guess})"
        elif found.interval and found.interval.low <= found.guess:
            remarks.insert(0, f"{gives}, so the model may be no better than that.")
        else:
            remarks.insert(0, f"{gives}.")
    name = found.metric.plain_words or found.metric.words
    figure = found.metric.number(found.value)
    return {"learnt": learnt, "before": f"Its {name} is ", "figure": figure, "after": f"{after}.", "remarks": remarks}


def _remarks(run: Run, found: Headline | None) -> list[str]:
    """How far to trust the figure: whether the run has finished, and copies of training images."""
    remarks = list(found.remarks) if found else []
    if run.state != "finished" and not run.history.lines:
        remarks.insert(0, "The run has no metrics yet.")
    elif run.state != "finished":
        epochs = f" ({run.epochs} epochs)" if run.epochs else ""
        after = ", so this may still change." if found else "; no validation yet."
        remarks.insert(0, f"The run has not finished{epochs}{after}")
    elif not found:
        remarks.append("The run ended without a validation.")
    if found and found.image == "test image":  # copies are counted in validation alone
        return remarks
    remarks.append(_about_copies(read_data(run.folder)))
    if found and run.config:
        remarks.append(favoured(run.folder, run.history, run.config.MODEL.starts_at_probe))
    return [words for words in remarks if words]


def _about_copies(data: Line) -> str:
    """What the run has found about copies of training images in validation; '' without a search."""
    copies = data.get("copies") or {}
    alike = data.get("alike") or []
    if copies.get("compared") and copies.get("found"):
        have = "image has a copy" if copies["found"] == 1 else "images have a copy"
        return f"{copies['found']:,} validation {have} in training: expect less on new images."
    words = alike_in_words(alike)
    if words:
        return f"{words}." if copies_unknown(alike) else f"{words}. Expect less on new images."
    compared = {"training": copies.get("training"), "validation": copies.get("compared")}
    if copies.get("found") == 0 and data.get("images") == compared:
        looks = "none is as similar to one as half of edited copies are" if alike else "edited copies were not counted"
        show = f"{started_as('scripts/check_data.py')} -alike DIR shows the most similar ones"
        return f"No validation image has the bytes of a training image, {looks}; {show}."
    return ""


def _learnt(run: Run) -> str:
    samples = run.about.get("samples", {}).get("train")
    if run.config is None:
        return f"{run.name} was trained on {counted(samples, 'image')}." if samples else f"{run.name} was trained."
    model = run.config.MODEL
    name = run.config.DATA.DATASET
    path = run.config.DATA.DATA_PATH
    word = "of"
    if name.partition(":")[0] in LAYOUTS and path:
        place = Path(str(path)).resolve()
        word = "from"
        name = place.name if place.is_file() else f"{place.name}/"
    images = f"{counted(samples, 'image')} {word} {name}" if samples else name
    told = ""
    if run.config.task not in (ONE_LABEL, SEVERAL_LABELS):
        told = ", without labels"
    elif isinstance(model.NUM_CLASSES, int):
        several = ", several per image" if run.config.task == SEVERAL_LABELS else ""
        told = f" to tell {model.NUM_CLASSES:,} classes apart{several}"
    if model.starts_at_probe and not run.config.TRAIN.NUM_EPOCHS:
        return f"A linear classifier of {model.NAME}'s features was fitted to {images}{told}."
    return f"{model.NAME} was trained on {images}{told}."


def _validated(run: Run) -> Headline | None:
    """The best validation of the run itself."""
    deciding = run.deciding if run.deciding.percent else run.history.task.best
    best = run.history.best(deciding)
    if best is None:
        return None
    images = run.about.get("samples", {}).get("val")
    interval = None
    if images and deciding.counts_images and not run.about.get("val_groups"):  # groups: only predictions give one
        interval = wilson(best.value, images)
    guess, guessing = deciding.without_learning or (None, "")
    if deciding is TOP1:
        guess = run.about.get("largest_class_percent")
        guessing = "always guessing the largest class"
    flattered = ""
    if run.config:
        flattered = flatters(len(run.history.of("val")), run.folder, splits_of(run.config.DATA))
    return Headline(
        deciding,
        best.value,
        interval=interval,
        images=images,
        image="validation image",
        guess=guess,
        guessing=guessing,
        remarks=[flattered] if flattered else [],
    )
