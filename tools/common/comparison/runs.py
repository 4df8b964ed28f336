"""Metrics of runs, read from their folders, and the verdict on runs that were trained separately."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.common.comparison.verdict import (
    CONFIDENCE,
    ByName,
    Judged,
    Metrics,
    best_two,
    by_name,
    in_words,
    judge,
    judged_by,
    number_of,
)
from utils.config import Config, config_of_run
from utils.config.keys import OF_ONE_START, settings, value_of
from utils.config.kinds import one_line
from utils.errors import UserError
from utils.record.history import History, Line, is_end, is_start, last_line
from utils.record.run_folder import read_about
from utils.text import wilson
from vitamp.metrics import PLAIN

DIVERGED = 1.1
"""A run diverged if its last losses exceed this multiple of the first; smaller rises may be noise of the batches."""
PAIRED_BY = ("SEED", "DATA.FOLD")
PLACES = ("SAVE", "TAG", "DATA.CACHE")
"""Settings that do not make another contender of a run, beside those of one start."""
VALIDATION = (
    "DATA.DATASET",
    "DATA.DATA_PATH",
    "DATA.VAL_FRACTION",
    "DATA.SPLIT_SEED",
    "DATA.GROUP",
    "DATA.COLUMNS",
    "DATA.EXCLUDE",
)
MOST_NAMED = 3
"""Contenders that differ in more settings are called by a run's folder."""


def is_finished(folder: Path) -> bool:
    return is_end(last_line(folder))


def fraction_done(folder: Path, epochs: int, updates: int | None) -> float:
    """Progress of a run by its last line; `updates`: TRAIN.MAX_UPDATES."""
    last = last_line(folder)
    if not last:
        return 0.0
    whole = last["epoch"] - (last["event"] not in ("epoch", "val"))
    return min(1.0, max(whole / epochs, last.get("update", 0) / updates if updates else 0.0))


def metrics_of(folder: Path) -> Metrics:
    """Metrics of a finished run, as compare.json holds them."""
    about, config, history = read_about(folder), config_of_run(folder), History.of_run(folder)
    speed, speeds = history.images_per_second, history.speeds
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    return {
        "precision": about["choices"]["precision"],
        "images_per_second": speed,
        "images_per_second_quartiles": statistics.quantiles(speeds, n=4)[::2] if len(speeds) > 3 else None,
        "seconds_per_update": batch / speed if speed else None,
        "seconds_per_epoch": history.seconds_per_epoch,
        "start_up_counted": history.speed_includes_start,
        "peak_memory_gb": history.peak_memory_gb,
        "updates": max((line["update"] for line in history.lines), default=0),
        "skipped": history.skipped,
        "diverged": _diverged(history.of("train")),
        **{
            f"last_{which.prefix}{metric.name}": value
            for metric in history.metrics
            for which, value in {PLAIN: None, **history.last(metric)}.items()
        },
        **{f"best_{metric.name}": best.value for metric in history.metrics if (best := history.best(metric))},
        "seconds": history.seconds,
        "starts": sum(map(is_start, history.lines)),
        "validation_images": about.get("samples", {}).get("val"),
        "largest_class_percent": about.get("largest_class_percent"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(train: list[Line]) -> bool:
    """Whether the loss ended as NaN, or clearly above its start."""
    if not train:
        return False
    first, last = train[0]["loss"], [line["loss"] for line in train[-3:]]
    if last[-1] is None:
        return True
    known = [loss for loss in last if loss is not None]
    return first is not None and statistics.fmean(known) > DIVERGED * first


@dataclass(frozen=True)
class Finished:
    folder: Path
    config: Config
    metrics: Metrics


@dataclass(frozen=True)
class Contenders:
    """Finished runs by their settings, seeds and folds aside. The first contender is the baseline."""

    runs: ByName
    names: list[str]
    judged: Judged
    folders: dict[str, Path]
    """A run of each contender"""


def verdict_of(folders: Sequence[Path]) -> list[str]:
    """Sentences about these runs, the first of which is the baseline; none about a single run.

    Of three or more contenders, the first sentence compares the best two.
    """
    if len(folders) < 2:
        return []
    found = contenders_of(folders)
    return _sentences(found) if isinstance(found, Contenders) else [f"No verdict: {found}"]


def contenders_of(folders: Sequence[Path], judged: Judged | None = None) -> Contenders | str:
    """The contenders among these runs, or why they cannot be compared. `judged`: None for that of their task."""
    try:
        runs = [Finished(each, config_of_run(each), metrics_of(each)) for each in folders if is_finished(each)]
    except UserError as error:
        return str(error)
    if len(runs) < 2:
        return "fewer than two of these runs are finished."
    names = _names(runs)
    if len(set(names)) == 1:
        return "these runs have the same settings but for the seed or fold."
    if problem := _not_comparable(runs):
        return problem
    judged = judged or judged_by(None, None, [run.config for run in runs])
    rows: list[Metrics] = []
    for name, run in zip(names, runs, strict=True):
        fold = run.config.DATA.FOLD
        place = {"seed": run.config.SEED, **({} if fold is None else {"fold": str(fold)})}
        rows.append({"mode": name, **place, **run.metrics})
    first = dict(zip(reversed(names), (run.folder for run in reversed(runs)), strict=True))
    return Contenders(by_name(rows), list(dict.fromkeys(names)), judged, first)


def _names(runs: Sequence[Finished]) -> list[str]:
    """The settings in which each run differs from others, without seed and fold; runs with equal names are paired."""
    keys = [key for key in settings() if key not in (*OF_ONE_START, *PAIRED_BY, *PLACES)]
    texts = {key: [one_line(value_of(run.config, key)) for run in runs] for key in keys}
    varied = [key for key, of_runs in texts.items() if len(set(of_runs)) > 1]
    contenders = list(zip(*(texts[key] for key in varied), strict=True)) or [()] * len(runs)
    if varied and all(key.startswith("AMP.") for key in varied):
        precisions = [run.metrics["precision"] for run in runs]
        if len(set(precisions)) == len(set(contenders)):
            return precisions
    if len(varied) <= MOST_NAMED:
        tails = [key.rpartition(".")[2] for key in varied]
        return [", ".join(f"{tail}={text}" for tail, text in zip(tails, each, strict=True)) for each in contenders]
    return [runs[contenders.index(each)].folder.name for each in contenders]


def _not_comparable(runs: Sequence[Finished]) -> str:
    kinds = {run.config.task for run in runs}
    if len(kinds) > 1:
        return "the metrics of one and of several labels per image differ."
    different = [key for key in VALIDATION if len({one_line(value_of(run.config, key)) for run in runs}) > 1]
    by_fold: dict[object, set[object]] = {}
    for run in runs:
        by_fold.setdefault(run.config.DATA.FOLD, set()).add(run.metrics["validation_images"])
    if different or any(len(images) > 1 for images in by_fold.values()):
        return f"the runs may validate on different images ({', '.join(different) or 'their number differs'})."
    return ""


def _sentences(found: Contenders) -> list[str]:
    runs, (base, *others), judged = found.runs, found.names, found.judged
    best = best_two(runs, found.names, judged) if len(others) > 1 else []
    if all(len(runs[name].keys() & runs[base].keys()) < 2 for name in others):
        pairs = [(name, base) for name in others]
        first = [] if len(best) < 2 or base in best else [(best[0], best[1])]
        pairs = sorted([*first, *pairs], key=lambda pair: set(pair) != set(best))
        every = math.comb(len(found.names), 2)
        return [_one_run_each(name, against, runs, judged, every) for name, against in pairs]
    verdicts = judge(runs, found.names, judged, named=True)
    return in_words(sorted(verdicts, key=lambda each: {each["mode"], each["against"]} != set(best)))


def _one_run_each(name: str, against: str, runs: ByName, judged: Judged, comparisons: int) -> str:
    """What one run each can tell: whether the images alone could explain the difference, the largest of many pairs."""
    rows = [next(iter(runs[which].values())) for which in (name, against)]
    ours, theirs = (judged.of(row) for row in rows)
    images = rows[0]["validation_images"]
    if ours is None or theirs is None:
        return f"{name} against {against}: no verdict, because a run was never validated."
    difference = ours - theirs
    word = "higher" if difference > 0 else "lower"
    how = f"{judged.difference(abs(difference))} {word}" if difference else "equal"
    said = f"{name} against {against}: {judged.words} after the last epoch{judged.whose} {how}, with "
    said += "one seed each" if number_of(rows[0]) == number_of(rows[1]) else "one run each, of different seeds"
    if not judged.metric.counts_images or not images:
        return f"{said}. That is too few to tell: repeat both with more seeds."
    low, high = chance((ours, theirs), images, comparisons)
    within = "within chance" if low <= 0 <= high else "more than the choice of images explains"
    return (
        f"{said}. On {images:,} images this is {within}: 95 % interval"
        f"{f' for all {comparisons} pairs' * (comparisons > 1)} {low:+.1f} to {high:+.1f} points. "
        "Whether another seed would give the same, only more seeds can tell."
    )


def chance(percents: tuple[float, float], images: int, comparisons: int = 1) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares of as many images, in percentage points.

    It takes the images of the two for independent, which makes it wider than that of the same images, not narrower.
    """
    z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / comparisons / 2)
    (ours, theirs), (one, other) = percents, (wilson(each, images, z) for each in percents)
    low = ours - theirs - math.hypot(ours - one.low, other.high - theirs)
    return low, ours - theirs + math.hypot(one.high - ours, theirs - other.low)
