"""Write the report of one or several runs as one HTML file, which needs no network and runs no script."""

import base64
import hashlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from datasets.examine.trust import Doubt
from tools.common.comparison import Judged, best_two, known_values, overlap_of, seed_or_fold_of
from tools.common.contenders import Contenders, contenders_of
from tools.common.output_file import check_output_file, writing
from tools.common.report_page.charts import SIZES, Style, charts, labelled, round_numbers, short, styles_of
from tools.common.report_page.runs import (
    NOTHING,
    Run,
    data_notes,
    doubts_about,
    opening_of,
    read_runs,
    searched_in_vain,
    summary,
    validated,
    varied_settings,
)
from utils.errors import UserError
from utils.log import log
from utils.program import started_as
from utils.statistics.differences import student_interval
from utils.statistics.proportions import Interval, wilson
from utils.text import some_of
from vitamp.checkpoints import CHECKPOINTS, checkpoints_in
from vitamp.files import write_atomically
from vitamp.metrics import Metric

LEAST_RUNS = 3
"""Least number of runs of each contender whose spread gives the interval, and of runs for a figure"""


def figure_of(contenders: Contenders | str, styles: dict[Path, Style]) -> dict[str, Any] | None:
    """Prepare the figure that templates/contenders.html draws: one row per contender, with its runs, mean and interval.

    Positions are percent of the figure's width. `contenders`: from `contenders_of`; a string says why the runs cannot
    be compared. `styles`: folder of a run -> its colour. Returns None if the runs cannot be compared, if they are too
    few, or if fewer than two contenders have measured the metric.
    """
    if isinstance(contenders, str):
        return None
    rows: list[dict[str, Any]] = []
    for runs in contenders.runs.values():
        rows += runs.values()
    judged = contenders.judged
    values = known_values(contenders.runs, contenders.names, judged)  # contender -> seed or fold -> metric
    if len(rows) < LEAST_RUNS or len(values) < 2:
        return None
    seed_or_fold = seed_or_fold_of(rows)
    about_lines, intervals = _intervals_of(values, rows, judged)

    # The range of the figure: all values and the ends of all intervals, with a margin of 4 %.
    ends: list[float] = []
    for name, value_of_seed in values.items():
        ends += value_of_seed.values()
        ends += intervals.get(name, ())  # an interval is (low, high)
    margin = (max(ends) - min(ends)) * 0.04 or 0.5
    low = min(ends) - margin
    high = max(ends) + margin

    def position(value: float) -> float:
        """Convert a value of the metric to percent of the figure's width."""
        return round(100 * (value - low) / (high - low), 2)

    # The rows: the mean as text and as a line, the band of its interval, and a dot per run.
    best, _second = best_two(contenders.runs, contenders.names, judged)
    hue_of_contender = {name: styles[folder].hue for folder, name in contenders.contender_of.items()}
    drawn_rows = []
    for name, value_of_seed in values.items():
        mean = statistics.fmean(value_of_seed.values())
        text = judged.metric.number_in_table(mean)
        if len(value_of_seed) > 1:
            text += f" ± {judged.metric.number_in_table(statistics.stdev(value_of_seed.values()))}"
        band = None
        if name in intervals:
            left = position(intervals[name].low)
            width = round(position(intervals[name].high) - left, 2)
            band = (left, width)
        drawn_rows.append(
            {
                "name": name,
                "text": text,
                "mean": position(mean),
                "band": band,
                "dots": [
                    {"x": position(value), "title": f"{seed_or_fold} {number}: {judged.metric.number(value)}"}
                    for number, value in value_of_seed.items()
                ],
                "best": name == best,
                "hue": Style(hue_of_contender[name]).css,
            }
        )

    percent = " (%)" if judged.metric.percent else ""
    return {
        # Only the first letter is made a capital: the rest may be a name such as mAP.
        "heading": f"{judged.words[0].upper()}{judged.words[1:]} of each setting{percent}",
        "caption": f"Dots: {seed_or_fold}s, after the last epoch{judged.weights_phrase}. {about_lines}",
        "rows": drawn_rows,
        "ticks": [(position(tick), text) for tick, text in labelled(round_numbers(low, high, 5))],
    }


def _intervals_of(
    values: dict[str, dict[int, float]], rows: list[dict[str, Any]], judged: Judged
) -> tuple[str, dict[str, Interval]]:
    """Compute the interval of each contender's mean, and write a sentence on what the lines in the figure are.

    Returns the sentence, and contender -> interval: from the runs if each contender has enough of them, else from the
    number of images; none if neither can give one. `values`: contender -> seed or fold -> metric. `rows`: the metrics
    of all runs.
    """
    intervals = dict[str, Interval]()
    if all(len(value_of_seed) >= LEAST_RUNS for value_of_seed in values.values()):
        comparisons = 1  # each interval is shown for itself
        overlap = overlap_of(rows)  # of the training images of folds; 0 for seeds
        for name, value_of_seed in values.items():
            mean = student_interval(list(value_of_seed.values()), comparisons, overlap=overlap)
            low = mean.low or 0.0
            high = mean.high or 0.0
            if judged.metric.percent:
                low = max(low, 0.0)
                high = min(high, 100.0)
            intervals[name] = Interval(low, high)
        # Each fold has validation images of its own, so that their variation is in the interval. Seeds share theirs.
        where = "" if overlap else ", on these images"
        return f"Lines: mean and its 95 % interval over the {seed_or_fold_of(rows)}s{where}.", intervals
    images = next((row["validation_images"] for row in rows if row.get("validation_images")), None)
    if judged.metric.counts_images and images and not any(row.get("grouped") for row in rows):
        for name, value_of_seed in values.items():
            intervals[name] = wilson(statistics.fmean(value_of_seed.values()), images)
        return f"Lines: mean, and 95 % interval of one run on {images:,} images.", intervals
    return "Lines: mean.", intervals


ADVICE = (
    "-data_path names moved images; for others, use evaluate.py. -no_predictions writes a page without predictions."
)
MOST_LINKS = 3
"""Most links to images that show a doubt"""
MOST_SKIPS = 20
"""Most skipped updates that the page lists for a run"""


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    verdict: str | None = None,
    predictions: bool = True,
    part: str = "val",
    contenders: Contenders | None = None,
    data_path: str | None = None,
    predicted: dict[Path, Any] | None = None,
    recall: Sequence[Sequence[str]] = (),
) -> Path:
    """Write the HTML page about the runs in the folders `runs`, and return its path. An existing page is replaced.

    If a checkpoint cannot be evaluated, UserError is raised: an existing page then stays as it is, and a missing one is
    written without these predictions.

    out: the file; None: report.html in the folder that holds all runs
    verdict: a sentence at the top; None: without one
    predictions: whether to evaluate the best checkpoint of each run on the split `part`
    contenders: the runs as the verdict compares them; None: grouped by their settings, judged by the task's main metric
    data_path: where the images are now, if they were moved
    predicted: filled with the predictions of the best checkpoints, by the runs' folders
    recall: rows of a table, the recall of each class by contender
    """
    all_runs = read_runs(runs)
    page = check_output_file(out or _folder_of_all(all_runs) / "report.html", "-out")
    metric = contenders.judged.metric if contenders else None
    evaluations: list[dict[str, Any] | str] = []
    failures: list[str] = []
    if predictions:
        evaluations, failures = _evaluate_runs(all_runs, part, metric, data_path, predicted)
    # A good page must not be replaced by one that lacks predictions.
    if failures and page.exists():
        raise UserError("\n  ".join([*failures, f"{page} stays as it is. {ADVICE}"]))

    opening = None
    searched = ""
    if len(all_runs) == 1:
        run = all_runs[0]
        evaluated = [evaluation for evaluation in evaluations if not isinstance(evaluation, str)]
        measured = evaluated[0]["headline"] if evaluated else None
        if measured is not None:
            found = {run.name: evaluated[0]["doubts"]}
        else:
            measured = validated(run)
            found = {run.name: doubts_about(run, measured)}
        opening = opening_of(run, measured)
        searched = searched_in_vain(run) if part == "val" else ""
    else:
        found = {run.name: doubts_about(run, None) for run in all_runs}  # of the data alone, which all metrics share
    rows_of_doubts = _rows_of_doubts(found)
    shown = {"verdict": verdict, "opening": opening, "recall": recall, "evaluations": evaluations}
    shown |= {"doubts": rows_of_doubts, "searched": searched, "data": _other_notes(all_runs, rows_of_doubts)}
    write_template("page.html", page, "-out", **shown, **_about_runs(all_runs, contenders), **SIZES)  # sizes of charts
    if failures:
        raise UserError("\n  ".join([*failures, f"{page} lacks its predictions. {ADVICE}"]))
    return page


def _rows_of_doubts(found: dict[str, list[Doubt]]) -> list[dict[str, Any]]:
    """Return what page.html shows of the doubts about each run, by the run's name.

    Of several runs, such as those of folds, it shows one doubt of each kind, the largest, and which runs have it.
    """
    shown = list[tuple[Doubt, str]]()  # a doubt, and words on the runs that have it
    if len(found) == 1:
        (doubts,) = found.values()
        shown = [(doubt, "") for doubt in doubts]
    else:
        by_kind = defaultdict[str, dict[str, Doubt]](dict)
        for run, doubts in found.items():
            for doubt in doubts:
                by_kind[doubt.kind][run] = doubt
        for of_kind in by_kind.values():
            largest = max(of_kind, key=lambda run: of_kind[run].points or 0.0)
            sentences = {doubt.sentence for doubt in of_kind.values()}
            where = ", ".join(of_kind) if len(of_kind) < len(found) else ""
            if len(sentences) > 1:
                where = f"in {largest}; {len(of_kind)} of {len(found)} runs have such images"
            shown.append((of_kind[largest], where))

    rows = list[dict[str, Any]]()
    for doubt, where in shown:
        images = list[dict[str, Any]]()
        for name in doubt.images[:MOST_LINKS]:
            file = Path(name)
            link = file.resolve().as_uri() if file.is_file() else None
            images.append({"link": link, "short": "/".join(file.parts[-2:])})
        rows.append({"doubt": doubt, "where": where, "images": images})
    return rows


def _other_notes(runs: Sequence[Run], rows_of_doubts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return what the runs reported of their data before training, as `data_notes` does, without what doubts say."""
    # A doubt goes on after a colon with what was measured.
    said = tuple(row["doubt"].sentence.partition(":")[0].lower() for row in rows_of_doubts)
    return {line: names for line, names in data_notes(runs).items() if not line.lower().startswith(said)}


def _about_runs(runs: Sequence[Run], contenders: Contenders | None) -> dict[str, Any]:
    """Return the values that page.html shows about the runs, by their name in the template, except its opening.

    `contenders`: see `write_report`.
    """
    folders = [run.folder for run in runs]
    title = runs[0].name
    if len(runs) > 1:
        names = contenders.names if contenders else [run.name for run in runs]
        title = f"{len(runs)} runs: {some_of(names)}"
    # The contenders of the figure; a text if the runs cannot be compared.
    compared: Contenders | str = "too few"
    if contenders:
        compared = contenders
    elif len(folders) >= LEAST_RUNS:
        compared = contenders_of(folders)
    rows, short_rows = summary(runs, contenders.judged.metric if contenders else None)
    styles = styles_of(runs, contenders.contender_of if contenders else None)
    return {
        "title": title,
        "figure": figure_of(compared, dict(zip(folders, styles, strict=True))),
        "runs": runs,
        "styles": styles,
        "nothing": NOTHING,
        "short_rows": short_rows,
        "rows": rows,
        "settings": varied_settings(runs),
        "updated": any(run.history.of("train") for run in runs),
        "charts": charts(runs, styles),
        "amp": [_amp(run) for run in runs],
    }


def _folder_of_all(runs: Sequence[Run]) -> Path:
    """Return the deepest folder that holds all runs; the current one if they have only the root in common."""
    common = Path(os.path.commonpath([run.folder.resolve() for run in runs]))
    is_root = common.parent == common
    return Path.cwd() if is_root else common


def _evaluate_runs(
    runs: Sequence[Run], part: str, metric: Metric | None, data_path: str | None, predicted: dict[Path, Any] | None
) -> tuple[list[dict[str, Any] | str], list[str]]:
    """Evaluate the best checkpoint of each run on the split `part`; return the evaluations, and sentences on failures.

    An evaluation is what the template shows, or the reason as text if there is none. It is a failure if the run has a
    checkpoint. `metric`: that of the headline; None: the metric that decides in each run. `data_path`: where the images
    are now; None: where the run read them. `predicted`: if given, filled with the predictions by the runs' folders.
    """
    # Imports torch and timm, which the rest does not need.
    from tools.common.report_page.evaluations import evaluate
    from tools.common.trust import IMAGE_OF

    evaluations = list[dict[str, Any] | str]()
    failures = list[str]()
    images = f"{IMAGE_OF[part]}s"  # such as "validation images"
    for run in runs:
        log.info("%s: evaluating the best checkpoint on its %s ...", run.name, images)
        evaluation = evaluate(run.folder, part, metric or run.deciding, data_path)
        evaluations.append(evaluation)
        if isinstance(evaluation, str):
            has_saved = bool(checkpoints_in(run.folder / CHECKPOINTS))
            if has_saved:
                failures.append(f"{run.name} could not be evaluated: {evaluation}")
        elif predicted is not None and "predicted" in evaluation:  # missing without labels
            predicted[run.folder] = evaluation["predicted"]
    return evaluations, failures


def write_template(template: str, out: Path, flag: str, **values: Any) -> None:
    """Fill the template file `template` with `values`, and write the page to `out`, the value of `flag`."""
    folder = Path(__file__).parent / "templates"
    pages = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    # Functions that templates call: the command that starts a script, and the hash of the page's own script, by which
    # the page's content security policy allows that script and no other.
    pages.filters["started_as"] = started_as
    pages.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    text = pages.get_template(template).render(**values, made=time.strftime("%Y-%m-%d %H:%M"))
    with writing(out, flag):
        # File names may have bytes that are not UTF-8: each is shown as a replacement character.
        write_atomically(out, text.encode(errors="surrogateescape").decode(errors="replace"))


def _amp(run: Run) -> dict[str, Any]:
    """Describe the precision of a run, its loss scale and its skipped updates, for the page.

    Returns a text ("summary"), rows about the first skipped updates ("skips"), and the number of further ones ("more").
    """
    reason = run.about.get("choices", {}).get("why")  # why this precision was chosen, if the program chose it
    text = f"{run.precision} ({reason})." if reason else f"{run.precision}."
    scales = [line["scale"] for line in run.history.of("train") if line.get("scale")]
    if any(scale != 1 for scale in scales):
        text += f" The loss scale went from {short(scales[0])} to {short(scales[-1])}."
        text += f" {run.history.skipped} updates were skipped." if run.history.skipped else " No update was skipped."
    elif scales:  # always 1: no loss scaling
        text += " The loss needed no scaling, and no update was skipped."
    skips = run.history.of("skip")
    rows = []
    for skip in skips[:MOST_SKIPS]:
        where = [str(skip[key]) for key in ("operation", "module", "direction") if skip.get(key)]
        rows.append(
            {
                "at": skip.get("update", NOTHING),
                "overflowed": ", ".join(where) or "not found",
                "scale": short(skip["scale"]) if skip.get("scale") else NOTHING,
            }
        )
    return {"summary": text, "skips": rows, "more": max(0, len(skips) - MOST_SKIPS)}
