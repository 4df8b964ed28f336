"""Group finished runs into contenders by their settings, and give the verdict on them.

The runs may come from anywhere, not only from compare.py.
"""

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
    overlap_of,
    paired_images,
    run_number,
    seed_or_fold_of,
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
"""Settings that distinguish the runs of one contender"""
PLACES = deciding("nothing")
"""Settings that do not make a run another contender, like those that hold for one start of a run only"""
IMAGE_SOURCE = deciding("source")
"""Settings that say where the images are"""
HIDDEN_PATCHES = deciding("patches")
"""Settings that say which patches are hidden from the model"""
MOST_NAMED = 3
"""Most settings in a contender's name; contenders that differ in more are named after the folder of a run."""


def validation_keys(config: Config) -> list[str]:
    """Return the settings that may change what a run is validated on, except its fold."""
    keys = deciding("source", "images", "split", "random split")
    if config.task == NO_LABELS:
        keys += HIDDEN_PATCHES
    return [key for key in keys if key not in PAIRED_BY]


class Finished(NamedTuple):
    """A finished run: its folder, settings and metrics."""

    folder: Path
    config: Config
    metrics: Metrics


def verdict_of(folders: Sequence[Path]) -> list[str]:
    """Write the lines of the verdict on the runs in `folders`; none for a single run.

    Each contender is compared with that of the first run, the baseline. First come the lines by the metric that decides
    by default in the task, then those by each other metric that a SAVE_BEST_BY names, if all runs have measured it.
    """
    if len(folders) < 2:
        return []
    contenders = contenders_of(folders)
    if isinstance(contenders, str):
        return [f"No verdict: {contenders}"]
    judged = contenders.judged
    lines = _verdict_by(contenders.runs, contenders.names, judged)

    # The verdicts by further metrics must not repeat speed and memory, so these are removed from the rows of all runs.
    without_speed = dict[str, dict[int, Metrics]]()
    all_rows = list[Metrics]()
    for name, rows in contenders.runs.items():
        without_speed[name] = {}
        for number, row in rows.items():
            row_without_speed = row | {"images_per_second": None, "peak_memory_gb": None, "device": ""}
            without_speed[name][number] = row_without_speed
            all_rows.append(row_without_speed)
    compared_folders = contenders.contender_of.keys()
    for metric in dict.fromkeys(metric_named(config_of_run(folder).SAVE_BEST_BY) for folder in compared_folders):
        judged_by_metric = replace(judged, metric=metric)
        if metric != judged.metric and all(judged_by_metric.last_value(row) is not None for row in all_rows):
            lines += _verdict_by(without_speed, contenders.names, judged_by_metric)
    return lines


def _verdict_by(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    """Return the lines of the verdict by one metric: each contender against the first of `names`, and the best two.

    Of three or more contenders, the comparison of the best two comes first.
    """
    images = images_of(runs, judged)
    base, *others = names
    best = best_two(runs, names, judged) if len(others) > 1 else []

    # Several runs of a contender show how much its runs vary.
    if any(len(rows) > 1 for rows in runs.values()):
        verdicts = judge(runs, names, judged, named=True, images=images)
        # False sorts before True, so the verdict on the best two comes first.
        return in_words(sorted(verdicts, key=lambda verdict: {verdict["mode"], verdict["against"]} != set(best)))

    # With one run of each contender, only the variation between images is known.
    pairs = [(name, base) for name in others]
    if len(best) == 2 and base not in best:
        pairs.insert(0, (best[0], best[1]))
    pairs.sort(key=lambda pair: set(pair) != set(best))  # the best two first, also if the base is one of them
    comparisons = math.comb(len(names), 2)
    return [_one_run_each(name, against, runs, judged, comparisons, images) for name, against in pairs]


class Contenders(NamedTuple):
    """Finished runs as the contenders of a comparison, with the metric by which they are compared."""

    runs: ByName
    names: list[str]
    """The baseline first"""
    judged: Judged
    contender_of: dict[Path, str]
    """Folder of a run -> its contender"""


def contenders_of(folders: Sequence[Path]) -> Contenders | str:
    """Group the finished runs in `folders` into contenders: runs with the same settings except seed and fold.

    Returns a sentence with the reason if they cannot be compared.
    """
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

    # The metrics of each run as compare.json holds them, where "mode" is the contender's name.
    rows = list[Metrics]()
    folders_by_run = dict[tuple[str, int], Path]()  # (contender, seed or fold) -> folder
    for name, run in zip(names, runs, strict=True):
        row: Metrics = {"mode": name, "seed": run.config.SEED}
        if run.config.DATA.FOLD is not None:
            row["fold"] = str(run.config.DATA.FOLD)
        row |= {"folder": f"{run.folder}", **run.metrics}
        rows.append(row)
        first_folder = folders_by_run.setdefault((name, run_number(row)), run.folder)
        if first_folder is not run.folder:  # another run has this seed or fold already
            return f"{first_folder} and {run.folder} have the same settings, and the same {seed_or_fold_of([row])}."
    contender_of = {folder: name for (name, _number), folder in folders_by_run.items()}
    return Contenders(by_name(rows), list(dict.fromkeys(names)), judged, contender_of)


def _names(runs: Sequence[Finished]) -> list[str]:
    """Return the name of each run's contender: the settings in which the runs differ, except seed and fold.

    Runs with equal names are runs of one contender. The name is the precision if the runs differ in nothing else, and
    the folder of the contender's first run if they differ in more than MOST_NAMED settings.
    """
    varied = _varied(runs)
    # The values of each run for these settings. They are equal for the runs of one contender.
    values_by_run = list(zip(*varied.values(), strict=True)) if varied else [() for _ in runs]
    if varied and all(key.startswith("AMP.") for key in varied):
        precisions = [run.metrics["precision"] for run in runs]
        # Precisions follow from these settings, so as many of them as contenders means one for each contender.
        if len(set(precisions)) == len(set(values_by_run)):
            return precisions
    if len(varied) <= MOST_NAMED:
        short_keys = [key.rpartition(".")[2] for key in varied]
        names = []
        for values in values_by_run:
            names.append(", ".join(f"{key}={value}" for key, value in zip(short_keys, values, strict=True)))
        return names
    first_folders = dict[tuple[str, ...], Path]()
    for values, run in zip(values_by_run, runs, strict=True):
        first_folders.setdefault(values, run.folder)
    has_unique_names = len({folder.name for folder in first_folders.values()}) == len(first_folders)
    return [first_folders[values].name if has_unique_names else str(first_folders[values]) for values in values_by_run]


def _varied(runs: Sequence[Finished]) -> dict[str, list[str]]:
    """Return the settings in which the runs differ, with the value of each run as text.

    Left out are those that do not make another contender: seed, fold, and names of places.
    """
    values = differing_settings([run.config for run in runs], besides=PAIRED_BY + PLACES)
    # DATA.BATCH_SIZE is per process, so equal settings on more processes are another global batch.
    processes = []
    for run in runs:
        batch_per_process = run.config.DATA.BATCH_SIZE * run.config.TRAIN.ACCUM_ITER
        processes.append(str(run.metrics["global_batch"] // batch_per_process))
    if len(set(processes)) > 1:
        values["processes"] = processes
    return values


def _not_comparable(runs: Sequence[Finished]) -> str:
    """Explain why the runs may not be validated on the same images or patches; '' if they are."""
    fold_counts = {run.config.DATA.fold.folds if run.config.DATA.fold else None for run in runs}
    if len(fold_counts) > 1:
        return "they are on different numbers of folds (DATA.FOLD), and so on different images."

    # Settings in which the runs differ and on which the validation images depend.
    varied = _varied(runs)
    different_keys = [key for key in validation_keys(runs[0].config) if key in varied]
    data_hashes = {last_meta(run.folder).get("val_data") for run in runs}  # of names and labels; None: unknown
    same_split = len(data_hashes) == 1 and None not in data_hashes
    if same_split:
        # Whatever chose the images, their names and labels are equal, so only pixels or hidden patches may differ.
        different_keys = [key for key in different_keys if key in IMAGE_SOURCE + HIDDEN_PATCHES]

    # Runs of the same fold must have validated on equally many images.
    sizes_by_fold = dict[object, set[object]]()
    for run in runs:
        sizes_by_fold.setdefault(run.config.DATA.FOLD, set()).add(run.metrics["validation_images"])
    if not different_keys and all(len(sizes) == 1 for sizes in sizes_by_fold.values()):
        return ""
    noun = "patches" if set(different_keys) & set(HIDDEN_PATCHES) else "images"
    reason = ", ".join(different_keys) or "their number differs"
    return f"the runs may validate on different {noun} ({reason})."


def _one_run_each(name: str, against: str, runs: ByName, judged: Judged, comparisons: int, images: Images) -> str:
    """Compare two contenders that have one run each: say whether the choice of images could explain the difference.

    `comparisons`: the number of pairs of contenders. The interval allows for all of them, because the best pair, which
    is shown first, is picked among them. `images`: from `images_of`.
    """
    our_seed, our_row = next(iter(runs[name].items()))
    their_seed, their_row = next(iter(runs[against].items()))
    our_value = judged.last_value(our_row)
    their_value = judged.last_value(their_row)
    if our_value is None or their_value is None:
        return f"{name} against {against}: no verdict, because a run was never validated."
    difference = our_value - their_value
    same_seed = run_number(our_row) == run_number(their_row)
    runs_of = "one seed each" if same_seed else "one run each, of different seeds"
    compared = f"{name} against {against}: {judged.words} after the last epoch{judged.weights_phrase}"
    sentence = f"{compared} {judged.difference_in_words(difference)}, with {runs_of}"

    # The best interval compares the two results for each image. The runs are paired even if their seeds differ, so both
    # are entered with the same number, 0.
    image_count = our_row["validation_images"]
    images_by_run = {(name, 0): images.get((name, our_seed)), (against, 0): images.get((against, their_seed))}
    paired = paired_images(images_by_run, name, against, [0])
    if paired is not None and judged.metric.percent and not overlap_of([our_row, their_row]):
        interval = crossed_interval(difference, *paired, comparisons=comparisons)
        our_values, _their_values, _means, _groups = paired
        _seeds, image_count = our_values.shape
        low = interval.low or 0.0
        high = interval.high or 0.0
    # Without the results for each image, the two accuracies give a wider one; not if images are in groups.
    elif judged.metric.counts_images and image_count and not our_row.get("grouped"):
        low, high = of_different_images((our_value, their_value), image_count, comparisons)
    else:
        return f"{sentence}. That is too few to tell: repeat both with more seeds."
    within = "within chance" if low <= 0 <= high else "more than the choice of images explains"
    by_image = "" if paired is None else ", paired,"
    of_all = f" for all {comparisons} pairs" if comparisons > 1 else ""
    return (
        f"{sentence}. On {image_count:,} images{by_image} this is {within}: 95 % interval{of_all} {low:+.1f} to "
        f"{high:+.1f} points. Whether another seed would give the same, only more seeds can tell."
    )
