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

import math
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
from tools.common.run_metrics import Metrics, is_finished, metrics_of
from tools.common.tables import in_columns, non_defaults
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.flags import Flag, whole
from utils.log import log, log_lines
from utils.program import typed
from utils.record.run_folder import git_state, read_data, write_json
from utils.statistics.crossed import DISAGREE, assumed_noise, noise_of
from utils.statistics.differences import POWER, bonferroni_level
from utils.statistics.groups import effective_images
from utils.statistics.proportions import Interval, wilson
from utils.text import counted, redacted_values
from vitamp.checkpoints import CHECKPOINTS, read_index
from vitamp.meta import unchecked_meta
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
    rounds = f"each with seed{'s' if len(plan.seeds) > 1 else ''} {', '.join(map(str, plan.seeds))}"
    if plan.folds is not None:
        rounds = f"on each of {plan.folds} folds, with seed {plan.seeds[0]}"
    log.info("%s: %s, %s; in %s", counted(len(plan.runs), "run"), names, rounds, out)
    if said := power(plan):
        log.info("%s", said)
    if_interrupted.append(f"finished runs are in {out}, and the same command resumes")
    trained = train_all(plan, lambda so_far: write(plan, so_far, out))
    report(write(plan, trained, out), out)
    return EXIT_FAILED if trained.failed else EXIT_DONE


def power(plan: Plan) -> str:
    """Which difference these seeds and images would show, before the time is spent; '' where it is not known."""
    finished = [run for run in plan.runs if is_finished(run.folder)]
    rows = [{"mode": run.contender, "seed": run.seed, "folder": f"{run.folder}"} for run in finished]
    runs = by_name(rows)
    seeds = len(plan.seeds)
    if plan.folds is not None or plan.these_images or seeds < 2 or not plan.judged.metric.percent:
        return ""
    base, *others = plan.contenders
    images = images_of(runs, plan.judged)
    tables = (paired_images(images, one, base, [*{*runs.get(one, {})} & {*runs.get(base, {})}]) for one in others)
    if measured := next((each for each in tables if each is not None and len(each[0]) > 1), None):
        noise = noise_of(*measured).planned(seeds)
        how = "measured on the finished runs"
    elif plan.judged.metric is ONE_LABEL.best:
        import torch

        from datasets.registry import open_dataset

        config = plan.runs[0].config
        try:
            data = open_dataset(config.DATA, False, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
        except UserError:  # training names it
            return ""
        noise = assumed_noise(seeds, len(data))
        how = f"assumed: runs of two settings disagree on {100 * DISAGREE:.0f} % of the images, half of it by the seed"
        how += ", and images of a group are independent" if data.groups() else ""
    else:
        return ""
    least = noise.half_width(bonferroni_level(len(others)), POWER)
    seen = f"a difference in {plan.judged.words} of {least:.1f} points is seen 8 times of 10"
    return f"With {seeds} seeds and {noise.images:,} validation images, {seen} ({how})."


def write(plan: Plan, trained: Trained, out: Path, script: str = "scripts/compare.py") -> dict[str, Any]:
    """Write compare.json with all metrics so far, and return its contents. `script`: of the command."""
    names = list(plan.contenders)
    failed = trained.failed
    first, *others = (non_defaults(run.config) for run in plan.runs)
    rows = [
        {
            "mode": run.contender,
            "seed": run.seed,
            **({} if run.fold is None else {"fold": str(run.fold)}),
            "folder": run.folder.name,
            **metrics_of(run.folder),
        }
        for run in plan.runs
        if is_finished(run.folder)
    ]
    runs = by_name(rows)
    images = None if plan.these_images else images_of(runs, plan.judged, out)
    of_classes = dict[str, dict[str, list[float]]]()
    all_folds = dict[str, dict[str, float]]()
    for name, found in in_all_runs(runs, plan.judged, out).items():
        root = out / next(iter(runs[name].values()))["folder"] / CHECKPOINTS
        of_classes[name] = recall(found, unchecked_meta(root / (read_index(root)["last"] or "none")).get("classes"))
        if plan.folds is not None:
            right = int((found.values > 0).sum())
            validated = len(found.values)
            accuracy = 100 * right / validated
            independent = effective_images(found.values, found.groups)
            low, high = wilson(accuracy, independent)
            all_folds[name] = {"acc1": accuracy, "low": low, "high": high, "right": right, "images": validated}
    reasons = {
        name: [failed[run.folder.name] for run in plan.runs if run.contender == name and run.folder.name in failed]
        for name in names
    }
    about = {
        "compared": names,
        **({"varied": list(plan.varied)} if plan.varied else {}),
        "metric": plan.judged.metric.name,
        "weights": plan.judged.weights.name,
        "seeds": plan.seeds,
        **({} if plan.folds is None else {"folds": plan.folds}),
        "date": time.strftime("%Y-%m-%d"),
        "command": typed(script, sys.argv[1:]),
        "device": next((row["device"] for row in rows), plan.device),
        "versions": next((row["versions"] for row in rows), {}),
        "git": git_state(),
        "settings": {
            key: value
            for key, value in first.items()
            if key not in ("SEED", "OUTPUT") and all(one.get(key) == value for one in others)
        },
        "runs": [{key: value for key, value in row.items() if key not in ("device", "versions")} for row in rows],
        "failed": failed,
        **({"left_out": trained.left_out, "advice": trained.advice} if trained.left_out else {}),
        "verdicts": judge(runs, names, plan.judged, images=images),
        "recall": of_classes,
        **({"all_folds": all_folds} if all_folds else {}),
        "troubles": troubles(runs, reasons, names),
        "data": next((read_data(out / row["folder"]).get("warnings", []) for row in rows), []),
    }
    about = redacted_values(about)
    try:
        write_json(out / "compare.json", about)
    except OSError as error:  # not fatal: the runs' folders have everything, and it is written again after each run
        log.warning("%s: cannot be written (%s).", out / "compare.json", error.strerror)
        return {**about, "unwritten": True}
    return about


def in_all_runs(runs: ByName, judged: Judged, out: Path) -> dict[str, PerImage]:
    """Contender -> top-1 of its last validations, all together; without contenders of which one is unknown."""
    found = dict[str, PerImage]()
    hits = images_of(runs, replace(judged, metric=ONE_LABEL.best), out)
    for name, of_one in runs.items():
        every = [one for seed in of_one if (one := hits[name, seed]) is not None]
        if every and len(every) == len(of_one):
            found[name] = PerImage(*(np.concatenate(column) for column in zip(*every, strict=True)))
    return found


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
    classes = dict.fromkeys(label for counts in found.values() for label in counts)
    if not (by_class or about.get("folds")) or not 0 < len(classes) <= MOST_CLASSES:
        return []
    rows = [[f"recall, all {unit(about['runs'])}s (95 % interval)", *found]]
    # Folds have different images, seeds the same ones.
    times = {name: 1 if about.get("folds") else len(of_runs) for name, of_runs in by_name(about["runs"]).items()}

    def cell(name: str, hits: int, images: int, independent: float = math.inf) -> str:
        percent = 100 * hits / images
        low, high = wilson(percent, min(independent, images / times[name]))
        return f"{percent:.1f} % ({low:.0f} to {high:.0f}; {hits} of {images})"

    for label in classes:
        rows.append([label, *(cell(name, *of[label]) if label in of else "-" for name, of in found.items())])
    return rows


def report(about: dict[str, Any], out: Path) -> dict[Path, Any]:
    """Print the table and the verdict, and write report.html. Return what best checkpoints predicted, by their runs."""
    predicted: dict[Path, Any] = {}
    what = "settings" if "varied" in about or len(about["compared"]) == 1 else "mode"
    print("\n".join(["", *in_columns(table(by_name(about["runs"]), about["compared"], judged_of(about), what)), ""]))
    if rows := recall_table(about):
        print("\n".join([*in_columns(rows), ""]))
    for note in notes(about):
        print(f"  {note}")
    print("\n".join(["", *sentences(about), ""]))
    if left_out := about.get("left_out"):
        log.warning(
            "-budget_min: no time for %s: %s; %s", counted(len(left_out), "run"), "; ".join(left_out), about["advice"]
        )
    if "unwritten" not in about:
        log.info("all metrics: %s", out / "compare.json")
    if about["runs"]:
        from tools.common.report_page.page import write_report

        rows = sorted(about["runs"], key=lambda row: (about["compared"].index(row["mode"]), number_of(row)))
        of = {out / row["folder"]: row["mode"] for row in rows}
        verdict = "\n".join(sentences(about))
        try:
            contenders = Contenders(by_name(rows), about["compared"], judged_of(about), of)
            more: Any = {"contenders": contenders, "predicted": predicted, "recall": recall_table(about)}
            page = write_report([*of], out / "report.html", verdict, **more)
            log.info("report: %s", page)
        except UserError as error:  # not fatal
            log.warning("%s", error)
    return predicted


def table(runs: ByName, names: Sequence[str], judged: Judged, what: str = "mode") -> list[list[str]]:
    """One row per contender. `what`: the heading of their names."""
    from engine.measure.throughput import shown_rate

    last_best = [f"{which} {judged.metric.heading}" for which in ("last", "best")]
    every = {key for of_one in runs.values() for row in of_one.values() for key in row}
    # What the winner costs in the metric that a task is usually judged by
    usual = [kind.best for kind in TASKS if f"last_{kind.best.name}" in every and kind.best is not judged.metric]
    last_best += [f"last {metric.heading}" for metric in usual]
    rows = [[what, "runs", "images/s", "s/epoch", "speed", "peak memory", *last_best, "skipped"]]
    base = runs.get(names[0], {})
    digits = judged.digits + 1
    for name in names:
        ours = runs.get(name, {})
        if not ours:
            rows.append([name, "0", *["-"] * (len(rows[0]) - 2)])
            continue

        def shown(key: str, form: Callable[[float], str], ours: dict[int, Metrics] = ours) -> str:
            values = values_of(list(ours.values()), key)
            return form(statistics.median(values)) if values else "-"

        speed = times_as_fast(ours, base, max(len(names) - 1, 1))
        last = judged.values(list(ours.values()))
        best = values_of(list(ours.values()), f"best_{judged.metric.name}")
        beside = [Judged(metric, judged.weights).values([*ours.values()]) for metric in usual]
        rows.append(
            [
                name,
                str(len(ours)),
                shown("images_per_second", shown_rate),
                shown("seconds_per_epoch", lambda value: f"{value:.3g}"),
                "1" if name == names[0] else f"{speed.value:.2f}" if speed else "-",
                shown("peak_memory_gb", lambda value: f"{value:.2f} GB"),
                spread(last, digits) if last else "-",
                spread(best, digits) if best else "-",
                *(spread(values, 2) if values else "-" for values in beside),
                str(sum(row["skipped"] for row in ours.values())),
            ]
        )
    if len(names) == 1:
        at = rows[0].index("speed")
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    return rows


def sentences(about: dict[str, Any]) -> list[str]:
    """The verdicts, each with its details, or the sentence about a single contender; and the problems."""
    lines = in_words(about["verdicts"])
    rows = about["runs"]
    judged = judged_of(about)
    alone = len(about["compared"]) == 1
    if alone and rows:
        lines = of_all_folds(about)
    shares = values_of([row for row in rows if "largest_class_percent" in row], "largest_class_percent")
    means = [
        statistics.fmean(values) for of_one in by_name(rows).values() if (values := judged.values([*of_one.values()]))
    ]
    # Then the comparison tells nothing.
    if judged.metric is ONE_LABEL.best and shares and means and max(means) <= max(shares):
        lines.append(
            f"{'this is not' if alone else 'none is'} better than always guessing the largest class, which has "
            f"{max(shares):.1f} % of the validation images: train longer, or judge by another -metric"
        )
    return [*lines, *about["troubles"], *about["data"]]


def of_all_folds(about: dict[str, Any]) -> list[str]:
    """How good a single recipe is, by all of its folds together."""
    (name,), rows, folds, judged = about["compared"], about["runs"], about["folds"], judged_of(about)
    said = list[str]()
    values = judged.values(rows)
    if found := about.get("all_folds", {}).get(name):
        of = f"{found['right']:,} of the {counted(found['images'], 'image')}"
        of += "" if len(rows) == folds else f" of {len(rows)} of {folds} folds"
        interval = Interval(found["low"], found["high"]).words()
        said.append(f"accuracy {found['acc1']:.2f} %, right on {of} (95 % interval {interval})")
    if values:
        lowest, highest = map(judged.metric.number, (min(values), max(values)))
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
    by = unit(about["runs"])
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
    if noises := [variation(of_one.values()) for of_one in by_name(rows).values() if len(of_one) > 1]:
        lines.append(f"noise: the speed of runs of the same mode varied by up to {100 * (max(noises) - 1):.0f} %")
    if 1 < rounds < 5:
        lines.append(f"{rounds} {by}s are few: only large differences in {judged.words} show")
    if any(row["start_up_counted"] for row in rows):
        lines.append("some runs have only slow first updates: the verdict leaves their speed out")
    return lines
