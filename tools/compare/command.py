"""Compare settings: train with each, with several seeds or folds, and say which is better, or that it cannot be told.

    python scripts/compare.py -cfg configs/vit_digits.yaml -modes fp32,bf16 -seeds 3
    python scripts/compare.py -cfg mine.yaml -vary DATA.SAMPLER=shuffle,balanced -seeds 5
    python scripts/compare.py -cfg mine.yaml -vary lr=1e-3,3e-4 -vary TRAIN.MODEL_EMA=false,true -budget_min 60
    python scripts/compare.py -vary cfg=vit.yaml,swin.yaml -data_path /data/flowers -folds 5
    python scripts/compare.py -cfg mine.yaml -data_path /data/flowers -folds 5      # how good is this one?

-vary takes a setting, a flag that sets one, or cfg; several -vary make a grid. -modes varies the
precision: fp32 (or off), tf32, fp16, bf16, fp8, auto; O2-bf16, O2-fp16, NAIVE-bf16, NAIVE-fp16, O3-bf16,
O3-fp16, apex; and every other value of -amp, as it is resolved on this device. O2:bf16 means O2-bf16.

The first values are the baseline. Every run has a process and a folder of its own: DIR/bf16-0 is bf16 with seed 0,
DIR/SAMPLER-balanced-fold2 the balanced sampler on fold 2. Runs alternate, in reverse order for every other seed or
fold. When run again, the command skips finished runs and resumes an interrupted one; values and seeds may then be
added. The report is a verdict and a table; all metrics are in DIR/compare.json and DIR/report.html. docs/compare.md
explains the verdict.

Exit codes: 0 done, 1 a run failed (the others are compared), 2 an error found before training, 130 interrupted.

The flags and settings of main_single_gpu.py are accepted (with -ngpus, those of main_multi_gpu.py;
-ngpus -1 means all visible GPUs).
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.common.command_line import Tool, above_zero, tool
from tools.common.comparison import (
    ByName,
    Judged,
    by_name,
    images_of,
    in_words,
    judge,
    judged_of,
    of_rounds,
    paired_images,
    run_number,
    seed_or_fold_of,
    spread,
    times_as_fast,
    troubles,
    values_of,
    variation,
)
from tools.common.contenders import Contenders
from tools.common.output_file import if_interrupted, results_folder
from tools.common.per_image import PerImage
from tools.common.run_metrics import Metrics, is_finished, last_meta, metrics_of
from tools.common.tables import in_columns, non_defaults
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.flags import Flag, whole
from utils.log import log, log_lines
from utils.program import typed
from utils.record.run_folder import git_state, read_data, write_json
from utils.statistics.crossed import DISAGREE, Noise, assumed_noise, noise_of
from utils.statistics.differences import POWER, bonferroni_level
from utils.statistics.groups import effective_images
from utils.statistics.proportions import Interval, wilson
from utils.text import counted, redacted_values
from vitamp.metrics import AVERAGE, BALANCED, MACRO_F1, ONE_LABEL, PLAIN, TASKS

if TYPE_CHECKING:
    from tools.compare.runs import Plan, Trained


OWN = (
    Flag(
        "modes",
        "precisions to compare, the baseline first",
        "A,B",
        default_text="fp32,auto, if nothing varies and without -folds",
    ),
    Flag("vary", "a setting or flag and the values to compare; may be given several times", "KEY=A,B", append=True),
    Flag("seeds", "number of seeds, such as 3, or a list of seeds, such as 0,1,5", "N", default="3"),
    Flag("folds", "cross-validation with N folds of the data, instead of seeds", "N", kind=whole(2)),
    Flag(
        "metric", "metric that decides, such as balanced_acc or loss", "NAME", default_text="acc1; several labels: map"
    ),
    Flag(
        "weights",
        f"weights that are judged: plain ({PLAIN.name}), or the {AVERAGE.label} of runs that have one",
        f"{PLAIN.name}|{AVERAGE.name}",
        default_text=f"{PLAIN.name}; {AVERAGE.name} if {AVERAGE.setting}* varies",
        choices=(PLAIN.name, AVERAGE.name),
    ),
    Flag("these_images", "judge for these validation images alone, not for others like them"),
    Flag("budget_min", "start no run that would end after so many minutes", "N", kind=above_zero),
    Flag("output", "folder of all runs", "DIR", default=Path("output/compare"), kind=Path),
)
TOOL = Tool("compare.py", __doc__, OWN)
MOST_CLASSES = 20
"""Classes in the table of their recall; compare.json has all"""


@tool
def main(argv: list[str]) -> int:
    """Plan the comparison, train all its runs, report the verdict, and return the exit code."""
    line = TOOL.read(argv)
    out = results_folder(line.asked.output)

    from tools.compare.plan import make_plan
    from tools.compare.runs import train_all

    plan = make_plan(line, out)
    log_lines(plan.remarks)
    separator = "; " if plan.varied else ", "  # names of contenders have commas if several things vary
    names = separator.join(plan.contenders)
    if plan.folds is None:
        noun = "seeds" if len(plan.seeds) > 1 else "seed"
        rounds = f"each with {noun} {', '.join(map(str, plan.seeds))}"
    else:
        rounds = f"on each of {plan.folds} folds, with seed {plan.seeds[0]}"
    log.info("%s: %s, %s; in %s", counted(len(plan.runs), "run"), names, rounds, out)
    smallest_difference = power(plan)
    if smallest_difference:
        log.info("%s", smallest_difference)
    if_interrupted.append(f"finished runs are in {out}, and the same command resumes")
    trained = train_all(plan, after_each=lambda so_far: write(plan, so_far, out))
    comparison = write(plan, trained, out)
    report(comparison, out)
    return EXIT_FAILED if trained.failed else EXIT_DONE


def power(plan: Plan) -> str:
    """Say which difference in the metric these seeds and images would show, before time is spent on training.

    Returns '' where that is not known, such as for folds, for a metric that is not in percent, or for a verdict on
    these validation images alone.
    """
    number_of_seeds = len(plan.seeds)
    judged = plan.judged
    if plan.folds is not None or plan.these_images or number_of_seeds < 2 or not judged.metric.percent:
        return ""
    noise = _noise_of_finished(plan)
    source = "measured on the finished runs"
    if noise is None:
        if judged.metric is not ONE_LABEL.best:
            return ""
        import torch

        from datasets.registry import open_dataset

        config = plan.runs[0].config
        try:
            data = open_dataset(config.DATA, False, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
        except UserError:  # training will report it
            return ""
        noise = assumed_noise(number_of_seeds, len(data))
        source = (
            f"assumed: runs of two settings disagree on {100 * DISAGREE:.0f} % of the images, half of it by the seed"
        )
        if data.groups():
            source += ", and images of a group are independent"
    # A true difference of this size is outside the noise with the probability POWER, 80 %.
    comparisons = len(plan.contenders) - 1
    difference = noise.half_width(bonferroni_level(comparisons), POWER)
    seen = f"a difference in {judged.words} of {difference:.1f} points is seen 8 times of 10"
    return f"With {number_of_seeds} seeds and {noise.images:,} validation images, {seen} ({source})."


def _noise_of_finished(plan: Plan) -> Noise | None:
    """Measure the noise on the first contender that has two or more finished seeds in common with the baseline.

    Returns the noise to expect with all seeds of the plan; None if there is no such contender.
    """
    runs = by_name(_finished(plan))  # contender -> seed -> run
    images = images_of(runs, plan.judged, plan.runs[0].folder.parent)
    baseline, *others = plan.contenders
    for name in others:
        common_seeds = runs.get(name, {}).keys() & runs.get(baseline, {}).keys()
        paired = paired_images(images, name, baseline, sorted(common_seeds))
        if paired is not None and len(common_seeds) > 1:
            noise_of_finished = noise_of(*paired)
            return noise_of_finished.planned(seeds=len(plan.seeds))
    return None


def _finished(plan: Plan) -> list[Metrics]:
    """Return a row for each finished run with its contender, seed, fold and folder, as in compare.json."""
    rows = list[Metrics]()
    for run in plan.runs:
        if is_finished(run.folder):
            fold = {} if run.fold is None else {"fold": str(run.fold)}
            rows.append({"mode": run.contender, "seed": run.seed, **fold, "folder": run.folder.name})
    return rows


def write(plan: Plan, trained: Trained, out: Path, script: str = "scripts/compare.py") -> dict[str, Any]:
    """Write compare.json with all metrics so far, and return its content.

    `script` is the script of the command, which the file records. If it cannot be written, this is logged, and the
    content has the key `unwritten`.
    """
    names = list(plan.contenders)
    judged = plan.judged
    rows = [row | metrics_of(out / row["folder"]) for row in _finished(plan)]
    reasons: dict[str, list[str]] = {name: [] for name in names}
    for run in plan.runs:
        if run.folder.name in trained.failed:
            reasons[run.contender].append(trained.failed[run.folder.name])
    runs = by_name(rows)
    # With predictions of each image, the verdict holds for other images like these. It need not with -these_images.
    images = None if plan.these_images else images_of(runs, judged, out)

    # Accuracy and recall of each contender, over the images of all its runs
    recall_by_contender = dict[str, dict[str, list[float]]]()
    all_folds = dict[str, dict[str, float]]()
    for name, hits in in_all_runs(runs, judged, out).items():
        first_run = next(iter(runs[name].values()))
        recall_by_contender[name] = recall(hits, last_meta(out / first_run["folder"]).get("classes"))
        if plan.folds is not None:
            all_folds[name] = _accuracy(hits)

    # The content of the file, in the order in which people read it.
    comparison: dict[str, Any] = {"compared": names}
    if plan.varied:
        comparison["varied"] = list(plan.varied)
    comparison |= {"metric": judged.metric.name, "weights": judged.weights.name, "seeds": plan.seeds}
    if plan.folds is not None:
        comparison["folds"] = plan.folds
    comparison |= {
        "date": time.strftime("%Y-%m-%d"),
        "command": typed(script, sys.argv[1:]),
        "device": rows[0]["device"] if rows else plan.device,
        "versions": rows[0]["versions"] if rows else {},
        "git": git_state(),
        "settings": _common_settings(plan),
        "runs": [_without(row, ("device", "versions")) for row in rows],
        "failed": trained.failed,
    }
    if trained.left_out:
        comparison |= {"left_out": trained.left_out, "advice": trained.advice}
    comparison["verdicts"] = judge(runs, names, judged, images=images)
    comparison["recall"] = recall_by_contender
    if all_folds:
        comparison["all_folds"] = all_folds
    comparison["troubles"] = troubles(runs, reasons, names)
    from engine.report.trust import UNWARNED, doubts  # imports torch

    data = read_data(out / rows[0]["folder"]) if rows else {}
    unwarned = [doubt.words() for doubt in doubts(data) if doubt.kind in UNWARNED]
    comparison["data"] = data.get("warnings", []) + unwarned
    comparison = redacted_values(comparison)
    try:
        write_json(out / "compare.json", comparison)
    except OSError as error:  # not fatal: the runs' folders have everything, and it is written again after each run
        log.warning("%s: cannot be written (%s).", out / "compare.json", error.strerror)
        return {**comparison, "unwritten": True}
    return comparison


def _without(row: Metrics, keys: Sequence[str]) -> Metrics:
    return {key: value for key, value in row.items() if key not in keys}


def _common_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that have one value in all runs, without the seed and without defaults."""
    first_settings, *other_settings = (non_defaults(run.config) for run in plan.runs)
    common = {}
    for key, value in first_settings.items():
        if key != "SEED" and all(settings.get(key) == value for settings in other_settings):
            common[key] = value
    return common


def in_all_runs(runs: ByName, judged: Judged, out: Path) -> dict[str, PerImage]:
    """Return, for each contender, the hits (top-1) on all images of the last validations of all its runs.

    A contender is missing if the predictions of one of its runs are.
    """
    hits_of_contender = dict[str, PerImage]()
    hits_of_run = images_of(runs, replace(judged, metric=ONE_LABEL.best), out)
    for name, rounds in runs.items():
        hits_by_run = of_rounds(hits_of_run, name, rounds)
        if hits_by_run:
            # Join the runs field by field: values with values, labels with labels, and so on.
            joined_fields = map(np.concatenate, zip(*hits_by_run, strict=True))
            hits_of_contender[name] = PerImage._make(joined_fields)
    return hits_of_contender


def _accuracy(hits: PerImage) -> dict[str, float]:
    """Return the accuracy over all folds with its 95 % interval, in percent, and the counts of images behind it."""
    right = int((hits.values > 0).sum())
    images = len(hits.values)
    accuracy = 100 * right / images
    low, high = wilson(accuracy, effective_images(hits.values, hits.groups))
    groups = len(set(hits.groups))
    return {"acc1": accuracy, "low": low, "high": high, "right": right, "images": images, "groups": groups}


def recall(hits: PerImage, classes: Sequence[str] | None) -> dict[str, list[float]]:
    """Return, for each class, the number of its recognised images and the number of all its images.

    If images are in groups, a third number follows: how many independent images would tell as much. `classes`: names of
    the classes; without them, the keys of the result are labels.
    """
    counts = dict[str, list[float]]()
    for label in np.unique(hits.labels).tolist():
        in_class = hits.labels == label
        name = str(classes[label] if classes else label)
        hits_in_class = hits.values[in_class]  # 100 for a recognised image, else 0
        counts[name] = [int((hits_in_class > 0).sum()), len(hits_in_class)]
        if len(hits.groups):
            counts[name].append(effective_images(hits_in_class, hits.groups[in_class]))
    return counts


def recall_table(comparison: dict[str, Any]) -> list[list[str]]:
    """Return a table of the recall of each class (row) by each contender (column).

    It is empty unless folds are compared or the metric weighs classes alike, and if there are too many classes.
    """
    counts = comparison["recall"]
    weighs_classes_alike = judged_of(comparison).metric in (BALANCED, MACRO_F1)
    folds = comparison.get("folds")
    classes = dict.fromkeys(itertools.chain.from_iterable(counts.values()))
    if not (weighs_classes_alike or folds) or not 0 < len(classes) <= MOST_CLASSES:
        return []
    runs = by_name(comparison["runs"])

    def cell(contender: str, name: str) -> str:
        if name not in counts[contender]:
            return "-"
        # The third number, that of independent images, is there only if images are in groups.
        hits, images, *independent_images = counts[contender][name]
        percent = 100 * hits / images
        # Folds have different images, seeds the same ones.
        different_images = images if folds else images / len(runs[contender])
        low, high = wilson(percent, min([different_images] + independent_images))
        return f"{percent:.1f} % ({low:.0f} to {high:.0f}; {hits} of {images})"

    rows = [[f"recall, all {seed_or_fold_of(comparison['runs'])}s (95 % interval)"] + list(counts)]
    for name in classes:
        rows.append([name] + [cell(contender, name) for contender in counts])
    return rows


def report(comparison: dict[str, Any], out: Path) -> dict[Path, Any]:
    """Print the table and the verdict of a comparison (the content of compare.json), and write report.html.

    Returns the predictions of the best checkpoints that the page was made from, by the folders of their runs; none
    without a page.
    """
    predictions: dict[Path, Any] = {}
    judged = judged_of(comparison)
    verdict = sentences(comparison)
    recall_rows = recall_table(comparison)
    compares_modes_alone = "varied" not in comparison and len(comparison["compared"]) > 1
    heading = "mode" if compares_modes_alone else "settings"
    lines = [""] + in_columns(table(by_name(comparison["runs"]), comparison["compared"], judged, heading)) + [""]
    if recall_rows:
        lines += in_columns(recall_rows) + [""]
    lines += [f"  {note}" for note in notes(comparison)] + [""] + verdict + [""]
    print("\n".join(lines))

    left_out = comparison.get("left_out")
    if left_out:
        log.warning(
            "-budget_min: no time for %s: %s; %s",
            counted(len(left_out), "run"),
            "; ".join(left_out),
            comparison["advice"],
        )
    if "unwritten" not in comparison:
        log.info("all metrics: %s", out / "compare.json")

    if comparison["runs"]:
        from tools.common.report_page.page import write_report

        rows = sorted(comparison["runs"], key=lambda row: (comparison["compared"].index(row["mode"]), run_number(row)))
        contender_of = {out / row["folder"]: row["mode"] for row in rows}
        try:
            contenders = Contenders(by_name(rows), comparison["compared"], judged, contender_of)
            # The page adds the predictions that it computes to the dictionary `predictions`.
            more: Any = {"contenders": contenders, "predicted": predictions, "recall": recall_rows}
            page = write_report(list(contender_of), out / "report.html", "\n".join(verdict), **more)
            log.info("report: %s", page)
        except UserError as error:  # not fatal: the verdict is printed and in compare.json
            log.warning("%s", error)
    return predictions


def table(runs: ByName, names: Sequence[str], judged: Judged, heading: str = "mode") -> list[list[str]]:
    """Return a table of speed, memory and metrics: a row of headings, then one row per contender.

    `names`: the contenders, the baseline first. `heading`: that of their names.
    """
    from engine.measure.throughput import shown_rate

    # Where another metric decides, the usual metric of the task is shown too: it is what the winner may lose in.
    keys_of_metrics = set[str]()  # such as last_acc1, in any run
    for runs_of_contender in runs.values():
        keys_of_metrics = keys_of_metrics.union(*runs_of_contender.values())
    usual = []
    for task in TASKS:
        is_measured = f"last_{task.best.name}" in keys_of_metrics
        if is_measured and task.best is not judged.metric:
            usual.append(task.best)
    head = [heading, "runs", "images/s", "s/epoch", "speed", "peak memory"]
    head += [f"last {judged.metric.heading}", f"best {judged.metric.heading}"]
    head += [f"last {metric.heading}" for metric in usual]
    head.append("skipped")

    rows = [head]
    digits = judged.digits + 1
    baseline, *others = names
    comparisons = max(len(others), 1)
    for name in names:
        metrics = list(runs.get(name, {}).values())
        if not metrics:
            rows.append([name, "0"] + ["-" for _ in head[2:]])
            continue
        speed = times_as_fast(runs[name], runs.get(baseline, {}), comparisons)
        row = [
            name,
            str(len(metrics)),
            _median(values_of(metrics, "images_per_second"), shown_rate),
            _median(values_of(metrics, "seconds_per_epoch"), "{:.3g}".format),
            f"{speed.value:.2f}" if speed else "-",
            _median(values_of(metrics, "peak_memory_gb"), "{:.2f} GB".format),
            _spread(judged.values(metrics), digits),
            _spread(values_of(metrics, f"best_{judged.metric.name}"), digits),
        ]
        if name == baseline:
            row[head.index("speed")] = "1"
        row += [_spread(replace(judged, metric=metric).values(metrics), 2) for metric in usual]
        row.append(str(sum(of_run["skipped"] for of_run in metrics)))
        rows.append(row)
    if not others:  # there is nothing to compare the speed with
        speed_column = head.index("speed")
        for row in rows:
            del row[speed_column]
    return rows


def _median(values: Sequence[float], form: Callable[[float], str]) -> str:
    return form(statistics.median(values)) if values else "-"


def _spread(values: Sequence[float], digits: int) -> str:
    return spread(values, digits) if values else "-"


def sentences(comparison: dict[str, Any]) -> list[str]:
    """Return the verdicts, each with its details, or the sentences about a single contender; then the problems."""
    lines = in_words(comparison["verdicts"])
    rows = comparison["runs"]
    judged = judged_of(comparison)
    alone = len(comparison["compared"]) == 1  # a cross-validation of one recipe
    if alone and rows:
        lines = _words_on_only_contender(comparison)

    # If no contender is better than guessing, the comparison means nothing.
    guessing = values_of(rows, "largest_class_percent")
    means = list[float]()
    for runs_of_contender in by_name(rows).values():
        values = judged.values(runs_of_contender.values())
        if values:
            means.append(statistics.fmean(values))
    is_guessing = bool(guessing and means) and max(means) <= max(guessing)
    if judged.metric is ONE_LABEL.best and is_guessing:
        subject = "this is not" if alone else "none is"
        lines.append(
            f"{subject} better than always guessing the largest class, which has "
            f"{max(guessing):.1f} % of the validation images: train longer, or judge by another -metric"
        )
    return lines + comparison["troubles"] + comparison["data"]


def _words_on_only_contender(comparison: dict[str, Any]) -> list[str]:
    """Say how good the only contender of a cross-validation is, by the images of all its folds."""
    (name,) = comparison["compared"]
    rows = comparison["runs"]
    folds = comparison["folds"]
    judged = judged_of(comparison)
    results = list[str]()
    # The accuracy over the images of all folds, unless predictions are missing or images have several labels.
    accuracy = comparison.get("all_folds", {}).get(name)
    like_these = "images like these"
    if accuracy:
        right = f"right on {accuracy['right']:,} of the {counted(accuracy['images'], 'image')}"
        if len(rows) != folds:  # some folds are not trained
            right += f" of {len(rows)} of {folds} folds"
        interval = Interval(accuracy["low"], accuracy["high"]).words()
        if 0 < accuracy.get("groups", 0) < accuracy["images"]:
            interval += f", which allows for {counted(accuracy['groups'], 'group')} of DATA.GROUP"
            like_these = "images of other groups like these"
        results.append(f"accuracy {accuracy['acc1']:.2f} %, {right} (95 % interval {interval})")
    # The metric that decides, by fold.
    values = judged.values(rows)
    if values:
        lowest = judged.metric.number(min(values))
        highest = judged.metric.number(max(values))
        by_fold = f"{spread(values, judged.digits + 1)} ({lowest} to {highest})"
        results.append(f"{judged.words}{judged.weights_phrase} from fold to fold {by_fold}")
    training_part = f"{100 * (folds - 1) / folds:.0f} %"
    return [
        f"{name}: {'; '.join(results)}",
        f"  (after the last epoch; each image is judged by that of the {len(rows)} models that was not trained on it: "
        f"the accuracy of the recipe with {training_part} of the images, for {like_these})",
    ]


def notes(comparison: dict[str, Any]) -> list[str]:
    """Return notes on how the metrics were measured, and on their noise."""
    rows = comparison["runs"]
    seed_or_fold = seed_or_fold_of(rows)
    rounds = comparison.get("folds") or len(comparison["seeds"])
    judged = judged_of(comparison)
    lines = [
        f"images/s: median over a run's log lines except the first, then over the {seed_or_fold}s",
        f"{judged.words}: after the last epoch{judged.weights_phrase}, mean ± standard deviation "
        f"over the {seed_or_fold}s",
        f"best {judged.metric.words}: over all validations of any of the weights that a run keeps",
    ]
    if comparison["device"].startswith("cpu"):
        lines.append("memory: peak of the whole process, libraries and data included, because there is no GPU")
    if len(comparison["compared"]) == 1:
        return lines
    # Notes on comparisons. That on the speed follows the one on images/s.
    lines.insert(1, f"speed: geometric mean, over the {seed_or_fold}s, of the ratio to the baseline's images/s")
    variations = [variation(repeated.values()) for repeated in by_name(rows).values() if len(repeated) > 1]
    if variations:
        lines.append(f"noise: the speed of runs of the same mode varied by up to {100 * (max(variations) - 1):.0f} %")
    if 1 < rounds < 5:
        lines.append(f"{rounds} {seed_or_fold}s are few: only large differences in {judged.words} show")
    if any(row["start_up_counted"] for row in rows):
        lines.append("some runs have only slow first updates: the verdict leaves their speed out")
    return lines
