"""Finished runs of any origin by their settings, as contenders of a comparison; and the verdict on them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tools.common.comparison import (
    ByName,
    Images,
    Judged,
    best_two,
    by_name,
    images_of,
    in_words,
    judge,
    judged_by,
    number_of,
    overlap_of,
    paired_images,
    unit,
)
from tools.common.run_metrics import Metrics, is_finished, last_meta, metrics_of
from tools.common.tables import differing_settings
from utils.config import Config, config_of_run
from utils.config.keys import deciding
from utils.errors import UserError
from utils.statistics.crossed import crossed_interval
from utils.statistics.differences import of_different_images
from vitamp.metrics import NO_LABELS, metric_named

PAIRED_BY = ("SEED", "DATA.FOLD")
PLACES = deciding("nothing")
"""Settings that do not make another contender of a run, beside those of one start."""
FOUND_IN = deciding("source")
HIDDEN = deciding("patches")
MOST_NAMED = 3
"""Contenders that differ in more settings are called by a run's folder."""


def validation_keys(config: Config) -> list[str]:
    """Settings that may choose what a run is validated on, but for its fold."""
    keys = deciding("source", "images", "split", "random split")
    if config.task == NO_LABELS:
        keys += HIDDEN
    return [key for key in keys if key not in PAIRED_BY]


class Finished(NamedTuple):
    folder: Path
    config: Config
    metrics: Metrics


def verdict_of(folders: Sequence[Path]) -> list[str]:
    """Sentences about these runs, the first of which is the baseline; none about a single run.

    By the task's metric, and by those of SAVE_BEST_BY. Of three or more contenders, the first compares the best two.
    """
    if len(folders) < 2:
        return []
    found = contenders_of(folders)
    if isinstance(found, str):
        return [f"No verdict: {found}"]
    judged = found.judged
    lines = _verdict_by(found.runs, found.names, judged)
    without_speed = dict[str, dict[int, Metrics]]()
    every = list[Metrics]()
    for name, rows in found.runs.items():
        without_speed[name] = {}
        for number, row in rows.items():
            every.append(row | {"images_per_second": None, "peak_memory_gb": None, "device": ""})
            without_speed[name][number] = every[-1]
    for metric in dict.fromkeys(metric_named(config_of_run(folder).SAVE_BEST_BY) for folder in found.of):
        own = replace(judged, metric=metric)
        if metric != judged.metric and all(own.of(row) is not None for row in every):
            lines += _verdict_by(without_speed, found.names, own)
    return lines


def _verdict_by(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    images = images_of(runs, judged)
    base, *others = names
    best = best_two(runs, names, judged) if len(others) > 1 else []
    if any(len(of_one) > 1 for of_one in runs.values()):
        verdicts = judge(runs, names, judged, named=True, images=images)
        return in_words(sorted(verdicts, key=lambda each: {each["mode"], each["against"]} != set(best)))
    pairs = [(name, base) for name in others]
    if len(best) == 2 and base not in best:
        pairs.insert(0, (best[0], best[1]))
    pairs.sort(key=lambda pair: set(pair) != set(best))
    comparisons = math.comb(len(names), 2)
    return [_one_run_each(name, against, runs, judged, comparisons, images) for name, against in pairs]


class Contenders(NamedTuple):
    runs: ByName
    names: list[str]
    """The baseline first"""
    judged: Judged
    of: dict[Path, str]
    """Folder of a run -> its contender"""


def contenders_of(folders: Sequence[Path]) -> Contenders | str:
    """Finished runs by their settings, seeds and folds aside; or why they cannot be compared."""
    try:
        runs = [Finished(each, config_of_run(each), metrics_of(each)) for each in folders if is_finished(each)]
        if len(runs) < 2:
            return "fewer than two of these runs are finished."
        judged = judged_by(None, None, [run.config for run in runs])
    except UserError as error:
        return str(error)
    names = _names(runs)
    if len(set(names)) == 1:
        return "these runs have the same settings but for the seed or fold."
    problem = _not_comparable(runs)
    if problem:
        return problem
    rows = list[Metrics]()
    folder_of = dict[tuple[str, int], Path]()
    for name, run in zip(names, runs, strict=True):
        row: Metrics = {"mode": name, "seed": run.config.SEED}
        if run.config.DATA.FOLD is not None:
            row["fold"] = str(run.config.DATA.FOLD)
        row |= {"folder": f"{run.folder}", **run.metrics}
        rows.append(row)
        other = folder_of.setdefault((name, number_of(row)), run.folder)
        if other is not run.folder:
            return f"{other} and {run.folder} have the same settings, and the same {unit([row])}."
    of = {folder: name for (name, _), folder in folder_of.items()}
    return Contenders(by_name(rows), list(dict.fromkeys(names)), judged, of)


def _names(runs: Sequence[Finished]) -> list[str]:
    """The settings in which each run differs from others, without seed and fold; runs with equal names are paired."""
    varied = _varied(runs)
    contenders = list(zip(*varied.values(), strict=True)) if varied else [() for _ in runs]
    if varied and all(key.startswith("AMP.") for key in varied):
        precisions = [run.metrics["precision"] for run in runs]
        if len(set(precisions)) == len(set(contenders)):
            return precisions
    if len(varied) <= MOST_NAMED:
        tails = [key.rpartition(".")[2] for key in varied]
        names = []
        for texts in contenders:
            names.append(", ".join(f"{tail}={text}" for tail, text in zip(tails, texts, strict=True)))
        return names
    first = dict[tuple[str, ...], Path]()
    for texts, run in zip(contenders, runs, strict=True):
        first.setdefault(texts, run.folder)
    unique = len({folder.name for folder in first.values()}) == len(first)
    return [first[texts].name if unique else str(first[texts]) for texts in contenders]


def _varied(runs: Sequence[Finished]) -> dict[str, list[str]]:
    """Settings that make other contenders, with the text of each run."""
    texts = differing_settings([run.config for run in runs], PAIRED_BY + PLACES)
    # The batch is per process, so the same settings on more processes train otherwise.
    processes = []
    for run in runs:
        own = run.config.DATA.BATCH_SIZE * run.config.TRAIN.ACCUM_ITER
        processes.append(str(run.metrics["global_batch"] // own))
    if len(set(processes)) > 1:
        texts["processes"] = processes
    return texts


def _not_comparable(runs: Sequence[Finished]) -> str:
    folds = {run.config.DATA.fold.folds if run.config.DATA.fold else None for run in runs}
    if len(folds) > 1:
        return "they are on different numbers of folds (DATA.FOLD), and so on different images."
    varied = _varied(runs)
    different = [key for key in validation_keys(runs[0].config) if key in varied]
    validated_on = {last_meta(run.folder).get("val_data") for run in runs}  # hashes of names and labels of the images
    if len(validated_on) == 1 and None not in validated_on:
        different = [key for key in different if key in FOUND_IN + HIDDEN]
    by_fold = dict[object, set[object]]()
    for run in runs:
        by_fold.setdefault(run.config.DATA.FOLD, set()).add(run.metrics["validation_images"])
    if not different and all(len(images) == 1 for images in by_fold.values()):
        return ""
    what = "patches" if set(different) & set(HIDDEN) else "images"
    why = ", ".join(different) or "their number differs"
    return f"the runs may validate on different {what} ({why})."


def _one_run_each(name: str, against: str, runs: ByName, judged: Judged, comparisons: int, images: Images) -> str:
    """What one run each can tell: whether the images alone could explain the difference, the largest of many pairs."""
    our_row = next(iter(runs[name].values()))
    their_row = next(iter(runs[against].values()))
    ours = judged.of(our_row)
    theirs = judged.of(their_row)
    if ours is None or theirs is None:
        return f"{name} against {against}: no verdict, because a run was never validated."
    difference = ours - theirs
    how = judged.compared(difference)
    same_seed = number_of(our_row) == number_of(their_row)
    runs_of = "one seed each" if same_seed else "one run each, of different seeds"
    said = f"{name} against {against}: {judged.words} after the last epoch{judged.whose} {how}, with {runs_of}"
    number = our_row["validation_images"]
    # Runs of two seeds are paired by image, too.
    of_first = {(who, 0): images.get((who, next(iter(runs[who])))) for who in (name, against)}
    paired = paired_images(of_first, name, against, [0])
    if paired is not None and judged.metric.percent and not overlap_of([our_row, their_row]):
        found = crossed_interval(difference, *paired, comparisons=comparisons)
        number = len(paired[0][0])
        low = found.low or 0.0
        high = found.high or 0.0
    elif judged.metric.counts_images and number and not our_row.get("grouped"):
        low, high = of_different_images((ours, theirs), number, comparisons)
    else:
        return f"{said}. That is too few to tell: repeat both with more seeds."
    within = "within chance" if low <= 0 <= high else "more than the choice of images explains"
    by_image = "" if paired is None else ", paired,"
    of_all = f" for all {comparisons} pairs" if comparisons > 1 else ""
    return (
        f"{said}. On {number:,} images{by_image} this is {within}: 95 % interval{of_all} {low:+.1f} to {high:+.1f} "
        "points. Whether another seed would give the same, only more seeds can tell."
    )
