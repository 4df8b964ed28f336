"""Runs as the report reads them: settings, metrics and environment from the files in a run's folder."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.measure.meters import clock
from engine.measure.throughput import shown_rate
from utils.config import Config, config_of_run
from utils.config.keys import OF_ONE_START, settings, value_of
from utils.config.kinds import one_line
from utils.errors import UserError
from utils.record.history import History, Line
from utils.record.run_folder import is_run_folder, read_about, read_data, read_data_notes
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import LOSS, METRICS, Metric, metric_named
from vitamp.weights import chosen_at


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
        if last in ("end", "paused"):
            return {"end": "finished", "paused": "paused, to be resumed"}[last]
        return "running, or cut off" if self.history.lines else "no metrics yet"

    @cached_property
    def verdict(self) -> Line:
        """Last verdict of the run on where its time went, as `Bottleneck.as_dict` has it; empty without one."""
        verdicts = [line["perf"]["verdict"] for line in self.history.lines if "verdict" in line.get("perf", {})]
        return verdicts[-1] if verdicts else {}

    @property
    def data_notes(self) -> list[str]:
        """What was said of the data before training."""
        try:
            return read_data_notes(self.folder)
        except UserError:  # damaged
            return []

    @cached_property
    def data_check(self) -> dict[str, Any]:
        """data.json, which a run without image files does not have; empty if it is damaged."""
        try:
            return read_data(self.folder)
        except UserError:
            return {}

    @property
    def class_counts(self) -> list[tuple[str, int, int]]:
        """(name, training images, validation images) of each class by data.json, the largest first."""
        found = self.data_check.get("classes", {})
        validation = found.get("validation", {})
        rows = [(name, count, validation.get(name, 0)) for name, count in found.get("training", {}).items()]
        return sorted(rows, key=lambda row: -row[1])

    @property
    def epochs(self) -> str:
        """'2 of 40'; empty without metrics."""
        done = max((line.get("epoch") or 0 for line in self.history.of("epoch")), default=0)
        of_all = f" of {self.config.TRAIN.NUM_EPOCHS}" if self.config else ""
        return f"{done}{of_all}" if self.history.lines else ""

    @property
    def best_checkpoint(self) -> str:
        """Best checkpoint, its better weights, and their metrics."""
        try:
            return chosen_at(self.folder).words
        except UserError:  # there is no complete checkpoint
            return ""

    @property
    def shares(self) -> dict[str, float]:
        """Percent of the time by stage, of the last verdict."""
        return {stage: percent for stage, percent in self.verdict.get("shares", {}).items() if percent > 0}


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
    folders = folders_of(paths)
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        config, about = None, {}
        with contextlib.suppress(UserError):  # perhaps of a later version, or not written yet: the rest can be shown
            config = config_of_run(folder)
        with contextlib.suppress(UserError):
            about = read_about(folder)
        runs.append(Run(folder, name, config, about, History.of_run(folder)))
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with as many parent folders as they need to differ."""
    paths = [folder.resolve().parts for folder in folders]
    names = [path[-1] for path in paths]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, paths)):
        depth += 1
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = ["/".join(path[-depth:]) if name in twice else name for name, path in zip(names, paths, strict=True)]
    return names


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """The program's metrics, and those of the users' own that the runs have measured."""
    return list(dict.fromkeys([*METRICS.values(), *(metric for run in runs for metric in run.history.metrics)]))


NOTHING = "-"


def summary(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows of the table of runs: a title and one text per run. Rows without any text are left out."""
    shown = [metric for metric in metrics_of(runs) if metric.title and metric.decides and metric is not LOSS]
    columns = [_column(run, shown) for run in runs]
    rows = [
        (title, [NOTHING if column[title] in (None, "") else str(column[title]) for column in columns])
        for title in columns[0]
    ]
    return [(title, texts) for title, texts in rows if any(text != NOTHING for text in texts)]


def _column(run: Run, metrics: Sequence[Metric]) -> dict[str, Any]:
    """What is known of a run, by title; None or '' where it is not."""
    history, config, about = run.history, run.config, run.about
    found: dict[str, Any] = {}
    for metric in metrics:
        best = history.best(metric)
        mark = f", {best.which.mark}" if best and best.which.mark else ""
        text = f"{metric.number(best.value)} (epoch {best.line['epoch']}{mark})" if best else ""
        found[f"best {metric.words}"] = text
        last = history.last(metric).items()
        found[f"last {metric.words}"] = ", ".join(which.marked(metric.number(value)) for which, value in last)
    rate, memory = history.images_per_second, history.peak_memory_gb
    weights = about.get("parameters")
    some = f", trainable {weights['trainable']:,}" if weights and weights["trainable"] != weights["all"] else ""
    counts = ", ".join(f"{count:,} {part}" for part, count in about.get("samples", {}).items())
    data = config.DATA.DATASET if config else ""
    return found | {
        "checkpoint": run.best_checkpoint,
        "precision": run.precision,
        "images/s": shown_rate(rate) if rate else "",
        "peak memory": f"{memory:.2f} GB" if memory else "",
        "training time": clock(history.seconds) if history.seconds else "",
        "epochs": run.epochs,
        "updates skipped": history.skipped if history.of("train") else "",
        "state": run.state,
        "model": config.MODEL.NAME if config else "",
        "parameters": f"{weights['all']:,}{some}" if weights else "",
        "data": f"{data} ({counts})" if data and counts else data or counts,
        "device": about.get("device"),
        "processes": about.get("choices", {}).get("world_size"),
        "tag": about.get("tag"),
        "started": re.sub(r"T(\d\d:\d\d).*", r" \1", about.get("started", "")),
        "versions": ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items()),
        "command": about.get("command"),
        "folder": run.folder.resolve(),
    }


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the value of each run."""
    configs = [run.config for run in runs if run.config is not None]
    rows = []
    for key in settings() if len(configs) == len(runs) else ():
        texts = [one_line(value_of(config, key)) for config in configs]
        if key not in (*OF_ONE_START, "SAVE") and len(set(texts)) > 1:
            rows.append((key, texts))
    return rows
