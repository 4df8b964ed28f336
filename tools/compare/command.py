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
    number_of,
    of_rounds,
    paired_images,
    spread,
    times_as_fast,
    troubles,
    unit,
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
    line = TOOL.read(argv)
    out = results_folder(line.asked.output)

    from tools.compare.runs import make_plan, train_all

    plan = make_plan(line, out)
    log_lines(plan.remarks)
    names = ("; " if plan.varied else ", ").join(plan.contenders)
    if plan.folds is None:
        noun = "seeds" if len(plan.seeds) > 1 else "seed"
        rounds = f"each with {noun} {', '.join(map(str, plan.seeds))}"
    else:
        rounds = f"on each of {plan.folds} folds, with seed {plan.seeds[0]}"
    log.info("%s: %s, %s; in %s", counted(len(plan.runs), "run"), names, rounds, out)
    said = power(plan)
    if said:
        log.info("%s", said)
    if_interrupted.append(f"finished runs are in {out}, and the same command resumes")
    trained = train_all(plan, lambda so_far: write(plan, so_far, out))
    report(write(plan, trained, out), out)
    return EXIT_FAILED if trained.failed else EXIT_DONE


def power(plan: Plan) -> str:
    """Which difference these seeds and images would show, before the time is spent; '' where it is not known."""
    seeds = len(plan.seeds)
    judged = plan.judged
    if plan.folds is not None or plan.these_images or seeds < 2 or not judged.metric.percent:
        return ""
    noise = _noise_of_finished(plan)
    how = "measured on the finished runs"
    if noise is None:
        if judged.metric is not ONE_LABEL.best:
            return ""
        import torch

        from datasets.registry import open_dataset

        config = plan.runs[0].config
        try:
            data = open_dataset(config.DATA, False, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
        except UserError:  # training names it
            return ""
        noise = assumed_noise(seeds, len(data))
        how = f"assumed: runs of two settings disagree on {100 * DISAGREE:.0f} % of the images, half of it by the seed"
        if data.groups():
            how += ", and images of a group are independent"
    least = noise.half_width(bonferroni_level(len(plan.contenders) - 1), POWER)
    seen = f"a difference in {judged.words} of {least:.1f} points is seen 8 times of 10"
    return f"With {seeds} seeds and {noise.images:,} validation images, {seen} ({how})."


def _noise_of_finished(plan: Plan) -> Noise | None:
    """Of the first contender that has two or more finished seeds in common with the baseline."""
    runs = by_name(_finished(plan))
    images = images_of(runs, plan.judged, plan.runs[0].folder.parent)
    base, *others = plan.contenders
    for name in others:
        common = runs.get(name, {}).keys() & runs.get(base, {}).keys()
        paired = paired_images(images, name, base, sorted(common))
        if paired is not None and len(paired[0]) > 1:
            return noise_of(*paired).planned(len(plan.seeds))
    return None


def _finished(plan: Plan) -> list[Metrics]:
    """Of each finished run, what tells it from others."""
    rows = list[Metrics]()
    for run in plan.runs:
        if is_finished(run.folder):
            fold = {} if run.fold is None else {"fold": str(run.fold)}
            rows.append({"mode": run.contender, "seed": run.seed, **fold, "folder": run.folder.name})
    return rows


def write(plan: Plan, trained: Trained, out: Path, script: str = "scripts/compare.py") -> dict[str, Any]:
    """Write compare.json with all metrics so far, and return its contents. `script`: of the command."""
    names = list(plan.contenders)
    judged = plan.judged
    rows = [row | metrics_of(out / row["folder"]) for row in _finished(plan)]
    reasons: dict[str, list[str]] = {name: [] for name in names}
    for run in plan.runs:
        if run.folder.name in trained.failed:
            reasons[run.contender].append(trained.failed[run.folder.name])
    runs = by_name(rows)
    images = None if plan.these_images else images_of(runs, judged, out)
    of_classes = dict[str, dict[str, list[float]]]()
    all_folds = dict[str, dict[str, float]]()
    for name, found in in_all_runs(runs, judged, out).items():
        first_run = next(iter(runs[name].values()))
        of_classes[name] = recall(found, last_meta(out / first_run["folder"]).get("classes"))
        if plan.folds is not None:
            all_folds[name] = _accuracy(found)
    about: dict[str, Any] = {"compared": names}
    if plan.varied:
        about["varied"] = list(plan.varied)
    about |= {"metric": judged.metric.name, "weights": judged.weights.name, "seeds": plan.seeds}
    if plan.folds is not None:
        about["folds"] = plan.folds
    about |= {
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
        about |= {"left_out": trained.left_out, "advice": trained.advice}
    about["verdicts"] = judge(runs, names, judged, images=images)
    about["recall"] = of_classes
    if all_folds:
        about["all_folds"] = all_folds
    about["troubles"] = troubles(runs, reasons, names)
    about["data"] = read_data(out / rows[0]["folder"]).get("warnings", []) if rows else []
    about = redacted_values(about)
    try:
        write_json(out / "compare.json", about)
    except OSError as error:  # not fatal: the runs' folders have everything, and it is written again after each run
        log.warning("%s: cannot be written (%s).", out / "compare.json", error.strerror)
        return {**about, "unwritten": True}
    return about


def _without(row: Metrics, keys: Sequence[str]) -> Metrics:
    return {key: value for key, value in row.items() if key not in keys}


def _common_settings(plan: Plan) -> dict[str, Any]:
    """Those of all runs that are no defaults."""
    first, *others = (non_defaults(run.config) for run in plan.runs)
    found = {}
    for key, value in first.items():
        if key != "SEED" and all(one.get(key) == value for one in others):
            found[key] = value
    return found


def in_all_runs(runs: ByName, judged: Judged, out: Path) -> dict[str, PerImage]:
    """Contender -> top-1 of its last validations, all together; without contenders of which one is unknown."""
    found = dict[str, PerImage]()
    hits = images_of(runs, replace(judged, metric=ONE_LABEL.best), out)
    for name, of_one in runs.items():
        every = of_rounds(hits, name, of_one)
        if every:
            found[name] = PerImage._make(map(np.concatenate, zip(*every, strict=True)))
    return found


def _accuracy(found: PerImage) -> dict[str, float]:
    """Of a cross-validation, with its interval."""
    right = int((found.values > 0).sum())
    images = len(found.values)
    accuracy = 100 * right / images
    low, high = wilson(accuracy, effective_images(found.values, found.groups))
    return {"acc1": accuracy, "low": low, "high": high, "right": right, "images": images}


def recall(found: PerImage, classes: Sequence[str] | None) -> dict[str, list[float]]:
    """Class -> its recognised images, and all of its images; where they are in groups, as how many independent ones."""
    counts = dict[str, list[float]]()
    for label in np.unique(found.labels).tolist():
        of = found.labels == label
        name = str(classes[label] if classes else label)
        right = found.values[of]
        counts[name] = [int((right > 0).sum()), len(right)]
        if len(found.groups):
            counts[name].append(effective_images(right, found.groups[of]))
    return counts


def recall_table(about: dict[str, Any]) -> list[list[str]]:
    """Recall of each class, of a cross-validation, and where classes weigh alike; empty where classes are many."""
    found = about["recall"]
    by_class = judged_of(about).metric in (BALANCED, MACRO_F1)
    folds = about.get("folds")
    labels = dict.fromkeys(itertools.chain.from_iterable(found.values()))
    if not (by_class or folds) or not 0 < len(labels) <= MOST_CLASSES:
        return []
    runs = by_name(about["runs"])

    def cell(name: str, label: str) -> str:
        if label not in found[name]:
            return "-"
        hits, images, *independent = found[name][label]
        percent = 100 * hits / images
        # Folds have different images, seeds the same ones.
        different = images if folds else images / len(runs[name])
        low, high = wilson(percent, min(independent + [different]))
        return f"{percent:.1f} % ({low:.0f} to {high:.0f}; {hits} of {images})"

    rows = [[f"recall, all {unit(about['runs'])}s (95 % interval)"] + list(found)]
    for label in labels:
        rows.append([label] + [cell(name, label) for name in found])
    return rows


def report(about: dict[str, Any], out: Path) -> dict[Path, Any]:
    """Print the table and the verdict, and write report.html. Return what best checkpoints predicted, by their runs."""
    predicted: dict[Path, Any] = {}
    judged = judged_of(about)
    said = sentences(about)
    of_classes = recall_table(about)
    what = "settings" if "varied" in about or len(about["compared"]) == 1 else "mode"
    lines = [""] + in_columns(table(by_name(about["runs"]), about["compared"], judged, what)) + [""]
    if of_classes:
        lines += in_columns(of_classes) + [""]
    lines += [f"  {note}" for note in notes(about)] + [""] + said + [""]
    print("\n".join(lines))
    left_out = about.get("left_out")
    if left_out:
        log.warning(
            "-budget_min: no time for %s: %s; %s", counted(len(left_out), "run"), "; ".join(left_out), about["advice"]
        )
    if "unwritten" not in about:
        log.info("all metrics: %s", out / "compare.json")
    if about["runs"]:
        from tools.common.report_page.page import write_report

        rows = sorted(about["runs"], key=lambda row: (about["compared"].index(row["mode"]), number_of(row)))
        of = {out / row["folder"]: row["mode"] for row in rows}
        try:
            contenders = Contenders(by_name(rows), about["compared"], judged, of)
            more: Any = {"contenders": contenders, "predicted": predicted, "recall": of_classes}
            page = write_report(list(of), out / "report.html", "\n".join(said), **more)
            log.info("report: %s", page)
        except UserError as error:  # not fatal
            log.warning("%s", error)
    return predicted


def table(runs: ByName, names: Sequence[str], judged: Judged, what: str = "mode") -> list[list[str]]:
    """One row per contender. `what`: the heading of their names."""
    from engine.measure.throughput import shown_rate

    measured = set[str]()
    for of_one in runs.values():
        measured = measured.union(*of_one.values())
    # What the winner costs in the metric that a task is usually judged by
    usual = [kind.best for kind in TASKS if f"last_{kind.best.name}" in measured and kind.best is not judged.metric]
    head = [what, "runs", "images/s", "s/epoch", "speed", "peak memory"]
    head += [f"last {judged.metric.heading}", f"best {judged.metric.heading}"]
    head += [f"last {metric.heading}" for metric in usual]
    head.append("skipped")
    rows = [head]
    digits = judged.digits + 1
    for name in names:
        ours = list(runs.get(name, {}).values())
        if not ours:
            rows.append([name, "0"] + ["-" for _ in head[2:]])
            continue
        speed = times_as_fast(runs[name], runs.get(names[0], {}), max(len(names) - 1, 1))
        row = [
            name,
            str(len(ours)),
            _median(values_of(ours, "images_per_second"), shown_rate),
            _median(values_of(ours, "seconds_per_epoch"), "{:.3g}".format),
            f"{speed.value:.2f}" if speed else "-",
            _median(values_of(ours, "peak_memory_gb"), "{:.2f} GB".format),
            _spread(judged.values(ours), digits),
            _spread(values_of(ours, f"best_{judged.metric.name}"), digits),
        ]
        if name == names[0]:
            row[head.index("speed")] = "1"
        row += [_spread(replace(judged, metric=metric).values(ours), 2) for metric in usual]
        row.append(str(sum(one["skipped"] for one in ours)))
        rows.append(row)
    if len(names) == 1:
        for row in rows:
            del row[4]  # the speed
    return rows


def _median(values: Sequence[float], form: Callable[[float], str]) -> str:
    return form(statistics.median(values)) if values else "-"


def _spread(values: Sequence[float], digits: int) -> str:
    return spread(values, digits) if values else "-"


def sentences(about: dict[str, Any]) -> list[str]:
    """The verdicts, each with its details, or the sentence about a single contender; and the problems."""
    lines = in_words(about["verdicts"])
    rows = about["runs"]
    judged = judged_of(about)
    alone = len(about["compared"]) == 1
    if alone and rows:
        lines = of_all_folds(about)
    shares = values_of(rows, "largest_class_percent")
    means = list[float]()
    for of_one in by_name(rows).values():
        values = judged.values(of_one.values())
        if values:
            means.append(statistics.fmean(values))
    # Then the comparison tells nothing.
    if judged.metric is ONE_LABEL.best and shares and means and max(means) <= max(shares):
        what = "this is not" if alone else "none is"
        lines.append(
            f"{what} better than always guessing the largest class, which has "
            f"{max(shares):.1f} % of the validation images: train longer, or judge by another -metric"
        )
    return lines + about["troubles"] + about["data"]


def of_all_folds(about: dict[str, Any]) -> list[str]:
    """How good a single recipe is, by all of its folds together."""
    (name,) = about["compared"]
    rows = about["runs"]
    folds = about["folds"]
    judged = judged_of(about)
    said = list[str]()
    values = judged.values(rows)
    found = about.get("all_folds", {}).get(name)
    if found:
        of = f"{found['right']:,} of the {counted(found['images'], 'image')}"
        of += "" if len(rows) == folds else f" of {len(rows)} of {folds} folds"
        interval = Interval(found["low"], found["high"]).words()
        said.append(f"accuracy {found['acc1']:.2f} %, right on {of} (95 % interval {interval})")
    if values:
        lowest = judged.metric.number(min(values))
        highest = judged.metric.number(max(values))
        by_fold = f"{spread(values, judged.digits + 1)} ({lowest} to {highest})"
        said.append(f"{judged.words}{judged.whose} from fold to fold {by_fold}")
    part = f"{100 * (folds - 1) / folds:.0f} %"
    return [
        f"{name}: {'; '.join(said)}",
        "  (after the last epoch, each image judged by the model that was not trained on it; this is what the recipe "
        f"reaches with {part} of the images, on images like these, not what one of its {len(rows)} models does)",
    ]


def notes(about: dict[str, Any]) -> list[str]:
    """How the metrics were measured, and their noise."""
    rows = about["runs"]
    by = unit(rows)
    rounds = about.get("folds") or len(about["seeds"])
    judged = judged_of(about)
    lines = [
        f"images/s: median over a run's log lines except the first, then over the {by}s",
        f"{judged.words}: after the last epoch{judged.whose}, mean ± standard deviation over the {by}s",
        f"best {judged.metric.words}: over all validations of any of the weights that a run keeps",
    ]
    if about["device"].startswith("cpu"):
        lines.append("memory: peak of the whole process, libraries and data included, because there is no GPU")
    if len(about["compared"]) == 1:
        return lines
    lines.insert(1, f"speed: geometric mean, over the {by}s, of the ratio to the baseline's images/s")
    noises = [variation(of_one.values()) for of_one in by_name(rows).values() if len(of_one) > 1]
    if noises:
        lines.append(f"noise: the speed of runs of the same mode varied by up to {100 * (max(noises) - 1):.0f} %")
    if 1 < rounds < 5:
        lines.append(f"{rounds} {by}s are few: only large differences in {judged.words} show")
    if any(row["start_up_counted"] for row in rows):
        lines.append("some runs have only slow first updates: the verdict leaves their speed out")
    return lines
