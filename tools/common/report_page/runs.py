"""Read runs for the report: settings, metrics and environment from the files in a run's folder, in words."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from datasets.examine.trust import Doubt
from engine.measure.throughput import shown_rate
from engine.report.trust import Result, Source, doubts, splits_of
from tools.common.tables import differing_settings
from utils.config import Config, config_of_run
from utils.errors import UserError
from utils.program import started_as
from utils.record.history import History, Line
from utils.record.predictions import GROUPS, read_predictions
from utils.record.run_folder import LookAlikes, is_run_folder, read_about, read_data
from utils.statistics.groups import effective_images
from utils.statistics.proportions import wilson
from utils.text import clock, counted
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import LOSS, METRICS, ONE_LABEL, SEVERAL_LABELS, TOP1, Metric, metric_named
from vitamp.weights import chosen_at

T = TypeVar("T")
Row = tuple[str, list[str]]
"""Title, and one text per run"""
NOTHING = "-"
AT_BEST = "{} of the best checkpoint"
"""Title of the row of a metric"""
LAYOUTS = ("csv", "imagefolder", "images", "imagenet2012", "shards")
"""Values of DATA.DATASET that only say how images are stored: the folder's name says more."""
MAIN_FIGURES = ("precision", "images/s", "peak memory", "training time", "updates skipped")
"""Titles of the rows that the page opens with, beside metrics"""


@dataclass(frozen=True)
class Run:
    """A run, read from its folder."""

    folder: Path
    name: str
    config: Config | None
    """Its settings; None if they cannot be read"""
    about: Line
    """Content of run.json; empty if it cannot be read"""
    history: History

    @property
    def subject(self) -> str:
        """Model and data set; '' if the settings are unknown."""
        return f"{self.config.MODEL.NAME} on {self.config.DATA.DATASET}" if self.config else ""

    @property
    def precision(self) -> str:
        """The precision that the run trained in, such as 'bf16'."""
        return str(self.about.get("choices", {}).get("precision", "unknown"))

    @property
    def deciding(self) -> Metric:
        """The metric that decides which validation is the best."""
        return metric_named(self.config.SAVE_BEST_BY) if self.config else self.history.task.best

    @property
    def state(self) -> str:
        """Whether the run has finished, is paused, or has not ended."""
        events = self.history.of("run")
        last_event = events[-1].get("what", "") if events else ""
        if last_event == "end":
            return "finished"
        if last_event == "paused":
            return "paused, to be resumed"
        return "running, or cut off" if self.history.lines else "no metrics yet"

    @cached_property
    def verdict(self) -> Line:
        """The run's last verdict on where its time went, from `Bottleneck.as_dict`; empty without one."""
        verdicts = [line["perf"]["verdict"] for line in self.history.lines if "verdict" in line.get("perf", {})]
        return verdicts[-1] if verdicts else {}

    @property
    def epochs(self) -> str:
        """Finished epochs and their planned number, '2 of 40'; '' without metrics, only '2' without settings."""
        if not self.history.lines:
            return ""
        done = max((line.get("epoch") or 0 for line in self.history.of("epoch")), default=0)
        return f"{done} of {self.config.TRAIN.NUM_EPOCHS}" if self.config else f"{done}"


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """Return the folder of the run that each path is or is in, such as a checkpoint's; each folder once.

    Raises UserError for a path that is in no run.
    """
    folders: list[Path] = []
    for path in paths:
        folder = run_folder_of(path) or path  # None for a run without checkpoints
        if not path.exists() or not folder.is_dir() or not is_run_folder(folder):
            raise UserError(f"{path}: no run there (looked for config.yaml, run.json, metrics.jsonl).")
        if folder.resolve() not in [known.resolve() for known in folders]:
            folders.append(folder)
    return folders


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the run that each path is or is in.

    A run has the name of its folder. If two folders have the same name, each run has the path of its folder, from the
    deepest folder that holds all of them.
    """
    folders = folders_of(paths)
    resolved = [folder.resolve() for folder in folders]
    names = [folder.name for folder in resolved]
    if len(set(names)) < len(names):
        names = [os.path.relpath(folder, os.path.commonpath(resolved)) for folder in resolved]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        # A config.yaml that cannot be read may be of a later version, or not written yet: the rest can be shown.
        config = _unless_damaged(config_of_run, folder, None)
        about = _unless_damaged(read_about, folder, {})
        runs.append(Run(folder, name, config=config, about=about, history=History.of_run(folder)))
    return runs


def _unless_damaged(read: Callable[[Path], T], folder: Path, instead: T) -> T:
    """Return what `read` returns for the folder of a run, or `instead` if it raises UserError."""
    try:
        return read(folder)
    except UserError:
        return instead


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """Return the program's metrics, and the users' own metrics that the runs have measured."""
    metrics = dict.fromkeys(METRICS.values())
    for run in runs:
        metrics |= dict.fromkeys(run.history.metrics)
    return list(metrics)


def summary(runs: Sequence[Run], judged: Metric | None) -> tuple[list[Row], list[Row]]:
    """Build the table of runs, and a short table of its main rows, which the page opens with. Return the rows of both.

    `judged`: the metric by which a comparison judges; None without a comparison. The short table has this metric and
    the task's main one after the last epoch; without a comparison, it has the metric that chose the best checkpoint of
    each run. Rows in which no run has a value are left out.
    """
    deciding = [judged] if judged else [run.deciding for run in runs]
    listed = [metric for metric in metrics_of(runs) if metric in deciding or _is_listed_by_default(metric)]
    columns = [_metrics_column(run, listed) | _column(run) for run in runs]
    rows = {}
    for title in columns[0]:  # all columns have the same titles
        values = [column[title] for column in columns]
        texts = [NOTHING if value in (None, "") else str(value) for value in values]
        if texts.count(NOTHING) < len(texts):
            rows[title] = texts

    main_titles = [AT_BEST.format(metric.words) for metric in deciding]
    if judged:  # a comparison is by the last epoch; its metric may be another than the task's main one
        main_titles.insert(0, f"last {judged.words}")
        main_titles.append(f"last {runs[0].history.task.best.words}")
    main_titles += MAIN_FIGURES
    short_table = [(title, rows[title]) for title in dict.fromkeys(main_titles) if title in rows]
    return list(rows.items()), short_table


def _is_listed_by_default(metric: Metric) -> bool:
    """Whether the table of runs has this metric even if it decides in no run: if it has a chart and could decide.

    The loss is left out: its charts say more than its values.
    """
    has_chart = metric.title != ""
    return has_chart and metric.decides and metric is not LOSS


def _metrics_column(run: Run, metrics: Sequence[Metric]) -> dict[str, str]:
    """Return each metric of the best checkpoint and of the last validation of a run, by title; '' if it is unknown."""
    history = run.history
    column = {}
    # When the best checkpoint was validated, and with which weights: those other than the plain ones have a mark.
    best = history.best(run.deciding)
    when = ""
    if best:
        when = f"epoch {best.line['epoch']}" if best.line["epoch"] else "before training"
        if best.which.mark:
            when += f", {best.which.mark}"
    for metric in metrics:
        best_value = best.line.get(f"{best.which.prefix}{metric.name}") if best else None
        best_text = "" if best_value is None else f"{metric.number(best_value)} ({when})"
        column[AT_BEST.format(metric.words)] = best_text
        last = history.last(metric).items()  # by each set of weights
        column[f"last {metric.words}"] = ", ".join(weights.marked(metric.number(value)) for weights, value in last)
    return column


def _column(run: Run) -> dict[str, Any]:
    """Return speed, settings and environment of a run, by the title of their row; None or '' if they are unknown."""
    history = run.history
    config = run.config
    about = run.about
    choices = about.get("choices", {})
    # run.json is about the last start of the run. A resumed run has its first start in the field "begun".
    was_resumed = "begun" in about
    first_start = about.get("begun", about)
    speed = history.images_per_second
    memory = history.peak_memory_gb
    counts = about.get("parameters")
    parameters = ""
    if counts:
        parameters = f"{counts['all']:,}"
        if counts["trainable"] != counts["all"]:
            parameters += f", trainable {counts['trainable']:,}"
    splits = ", ".join(f"{count:,} {split}" for split, count in about.get("samples", {}).items())
    dataset = config.DATA.DATASET if config else ""
    # Which weights the tools take from the run, in words; '' if it has none that can be read.
    chosen_weights = _unless_damaged(lambda folder: chosen_at(folder).words, run.folder, "")
    return {
        "checkpoint": chosen_weights,
        "precision": run.precision,
        "images/s": shown_rate(speed) if speed else "",
        "peak memory": f"{memory:.2f} GB" if memory else "",
        "training time": clock(history.seconds) if history.seconds else "",
        "epochs": run.epochs,
        "updates skipped": history.skipped if history.of("train") else "",
        "state": run.state,
        "model": config.MODEL.NAME if config else "",
        "parameters": parameters,
        "data": f"{dataset} ({splits})" if dataset and splits else dataset or splits,
        "device": about.get("device"),
        "processes": choices.get("world_size"),
        "tag": about.get("tag"),
        # 2026-11-20T10:15:00+00:00 -> 2026-11-20 10:15
        "started": re.sub(r"T(\d\d:\d\d).*", r" \1", first_start.get("started") or ""),
        "versions": ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items()),
        "command": first_start.get("command"),
        "last resumed by": about.get("command") if was_resumed else "",
        "folder": run.folder.resolve(),
    }


def data_notes(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what the runs reported of their data before training, with the names of these runs; warnings first."""
    notes: dict[str, list[str]] = {}
    for kind in ("warnings", "notes"):
        for run in runs:
            for line in read_data(run.folder).get(kind, []):
                notes.setdefault(str(line), []).append(run.name)
    return notes


def varied_settings(runs: Sequence[Run], besides: Sequence[str] = ("SAVE",)) -> dict[str, list[str]]:
    """Return the settings in which the runs differ, with the value of each run as text, without those in `besides`.

    There are none if the settings of one run are unknown.
    """
    configs = [run.config for run in runs if run.config is not None]
    return {} if len(configs) < len(runs) else differing_settings(configs, besides)


def opening_of(run: Run, measured: Result | None) -> dict[str, Any]:
    """Write the first sentences of the report of one run: what was learnt, and how well.

    `measured`: the metric; None if nothing was measured. Returns the sentence on what was learnt, remarks, and a
    sentence on the metric in three parts: the words before the number, the number ("figure"), which the page shows
    large, and the words after it. If nothing was measured, the number is '' and the words are missing.
    """
    learnt = _learnt(run)
    remarks = _remarks(run, measured)
    if measured is None:
        return {"learnt": learnt, "figure": "", "remarks": remarks}

    # After the number: on how many images it was measured, and its interval.
    interval = measured.interval
    after = ""
    if measured.images:
        after += f" on {counted(measured.images, measured.image)}"
    if interval:
        after += f" (95 % interval {interval.words()})"

    # The metric of guessing: bad news belongs to the sentence, other news is the first remark.
    if measured.guess is not None:
        guess = measured.metric.number(measured.guess)
        guessing = measured.guessing  # such as "always guessing the largest class"
        guessing_gives = f"{guessing[0].upper()}{guessing[1:]} gives {guess}"
        if measured.value <= measured.guess:
            after += f", which is no better than {guessing} ({guess})"
        elif interval and interval.low <= measured.guess:
            remarks.insert(0, f"{guessing_gives}, so the model may be no better than that.")
        else:
            remarks.insert(0, f"{guessing_gives}.")

    name = measured.metric.plain_words or measured.metric.words
    return {
        "learnt": learnt,
        "before": f"Its {name} is ",
        "figure": measured.metric.number(measured.value),
        "after": f"{after}.",
        "remarks": remarks,
    }


def _remarks(run: Run, measured: Result | None) -> list[str]:
    """Return the remarks on a metric, after one on whether the run has finished. None: nothing was measured."""
    remarks = list(measured.remarks) if measured else []
    if run.state != "finished" and not run.history.lines:
        remarks.insert(0, "The run has no metrics yet.")
    elif run.state != "finished":
        epochs = f" ({run.epochs} epochs)" if run.epochs else ""
        after = ", so this may still change." if measured else "; no validation yet."
        remarks.insert(0, f"The run has not finished{epochs}{after}")
    elif not measured:
        remarks.append("The run ended without a validation.")
    return remarks


def doubts_about(run: Run, measured: Result | None) -> list[Doubt]:
    """Return the reasons to doubt the best validation of a run, or what its data alone raise if it has none."""
    source = Source(run.folder)
    if run.config:
        source = Source(run.folder, splits_of(run.config.DATA), fold=run.config.DATA.FOLD is not None)
    return doubts(read_data(run.folder), measured, source)


def searched_in_vain(run: Run) -> str:
    """Say what the start of a run has looked for in its data and not found; '' if it has not looked at all images."""
    data = read_data(run.folder)
    copies = data.get("copies") or {}
    all_images = {"training": copies.get("training"), "validation": copies.get("compared")}
    if copies.get("found") != 0 or data.get("images") != all_images:
        return ""
    # Half of all edited copies are more similar to their original than the limit from which images look alike.
    alike = data.get("alike")
    if alike and LookAlikes(*alike).images:
        return ""
    edited = "none is as similar to one as half of edited copies are" if alike else "edited copies were not counted"
    show = f"{started_as('scripts/check_data.py')} -alike DIR shows the most similar ones"
    return f"No validation image has the bytes of a training image, {edited}; {show}."


def _learnt(run: Run) -> str:
    """Write the sentence that says which model was trained on which images, and for which task.

    For example: 'vit_tiny_patch16_224 was trained on 1,347 images of digits to tell 10 classes apart.'
    """
    samples = run.about.get("samples", {}).get("train")
    if run.config is None:
        return f"{run.name} was trained on {counted(samples, 'image')}." if samples else f"{run.name} was trained."
    model = run.config.MODEL

    # "1,347 images of digits"; or "1,347 images from flowers/" if the data set's name is only a layout of files, such
    # as imagefolder.
    data_name = run.config.DATA.DATASET
    data_path = run.config.DATA.DATA_PATH
    of_or_from = "of"
    layout = data_name.partition(":")[0]
    if layout in LAYOUTS and data_path:
        resolved = Path(str(data_path)).resolve()
        of_or_from = "from"
        data_name = resolved.name if resolved.is_file() else f"{resolved.name}/"
    images = f"{counted(samples, 'image')} {of_or_from} {data_name}" if samples else data_name

    task = ""
    if run.config.task not in (ONE_LABEL, SEVERAL_LABELS):
        task = ", without labels"
    elif isinstance(model.NUM_CLASSES, int):
        several = ", several per image" if run.config.task == SEVERAL_LABELS else ""
        task = f" to tell {model.NUM_CLASSES:,} classes apart{several}"
    # A run of 0 epochs only fits a linear probe to the features of pretrained weights.
    only_probe = model.starts_at_probe and not run.config.TRAIN.NUM_EPOCHS
    if only_probe:
        return f"A linear classifier of {model.NAME}'s features was fitted to {images}{task}."
    return f"{model.NAME} was trained on {images}{task}."


def validated(run: Run) -> Result | None:
    """Return the metric of the best validation of the run itself; None if there was none."""
    # The metric that decides, unless it is a loss, which says little to a reader.
    metric = run.deciding if run.deciding.percent else run.history.task.best
    best = run.history.best(metric)
    if best is None:
        return None
    result = Result(metric, best.value, images=run.about.get("samples", {}).get("val"))
    result.validations = len(run.history.of("val"))
    result.last = run.history.last(metric).get(best.which)
    result.related = read_data(run.folder).get("related", [])

    # Which images are right is known if the best validation was the last one, whose predictions are kept.
    table = read_predictions(run.folder, best.line["update"]) or {}
    guesses = table.get(f"{best.which.prefix}guess")
    if metric is TOP1 and guesses is not None:
        is_right = table["labels"] == guesses
        result.is_right = is_right
        result.groups = list(table.get(GROUPS, ()))
        result.interval = wilson(best.value, effective_images(is_right, result.groups))
    elif result.images and metric.counts_images and not run.about.get("val_groups"):
        result.interval = wilson(best.value, result.images)

    # The metric of guessing, and how such a guess is made.
    result.guess, result.guessing = metric.without_learning or (None, "")
    if metric is TOP1:
        result.guess = run.about.get("largest_class_percent")
        result.guessing = "always guessing the largest class"
    return result
