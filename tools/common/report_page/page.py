"""Write the report of one or several runs as one HTML file, which needs no network and runs no script."""

import base64
import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tools.common.comparison import Judged, best_two, known_values, overlap_of, seed_or_fold_of
from tools.common.contenders import Contenders, contenders_of
from tools.common.output_file import check_output_file, writing
from tools.common.report_page.charts import SIZES, Style, charts, labelled, round_numbers, short, styles_of
from tools.common.report_page.runs import NOTHING, Run, data_notes, opening_of, read_runs, summary, varied_settings
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


def figure_of(found: Contenders | str, styles: dict[Path, Style]) -> dict[str, Any] | None:
    """Prepare the figure of all contenders that templates/contenders.html draws. Positions are percent of its width.

    `found`: from `contenders_of`; a string says why the runs cannot be compared. `styles`: by the folder of each run.
    Returns None if the runs cannot be compared, if they are too few, or if fewer than two contenders have a metric.
    """
    if isinstance(found, str):
        return None
    rows: list[dict[str, Any]] = []
    for runs in found.runs.values():
        rows += runs.values()
    values = known_values(found.runs, found.names, found.judged)
    if len(rows) < LEAST_RUNS or len(values) < 2:
        return None
    judged = found.judged
    seed_or_fold = seed_or_fold_of(rows)
    about_lines, intervals = _intervals_of(values, rows, judged)

    # The range of the figure: all values and intervals, with a margin.
    ends: list[float] = []
    for name, by_run in values.items():
        ends += by_run.values()
        ends += intervals.get(name, ())
    margin = (max(ends) - min(ends)) * 0.04 or 0.5
    low = min(ends) - margin
    high = max(ends) + margin

    def position(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    best = best_two(found.runs, found.names, judged)[0]
    hues = {name: styles[folder].hue for folder, name in found.contender_of.items()}
    drawn = []
    for name, by_run in values.items():
        mean = statistics.fmean(by_run.values())
        text = judged.metric.number_in_table(mean)
        if len(by_run) > 1:
            text += f" ± {judged.metric.number_in_table(statistics.stdev(by_run.values()))}"
        band = None
        if name in intervals:
            left = position(intervals[name].low)
            width = round(position(intervals[name].high) - left, 2)
            band = (left, width)
        drawn.append(
            {
                "name": name,
                "text": text,
                "mean": position(mean),
                "band": band,
                "dots": [
                    {"x": position(value), "title": f"{seed_or_fold} {number}: {judged.metric.number(value)}"}
                    for number, value in by_run.items()
                ],
                "best": name == best,
                "hue": Style(hues[name]).css,
            }
        )
    percent = " (%)" if judged.metric.percent else ""
    return {
        "heading": f"{judged.words[0].upper()}{judged.words[1:]} of each setting{percent}",
        "caption": f"Dots: {seed_or_fold}s, after the last epoch{judged.weights_phrase}. {about_lines}",
        "rows": drawn,
        "ticks": [(position(tick), text) for tick, text in labelled(round_numbers(low, high, 5))],
    }


def _intervals_of(
    values: dict[str, dict[int, float]], rows: list[dict[str, Any]], judged: Judged
) -> tuple[str, dict[str, Interval]]:
    """Compute the interval of each contender's mean, and say in words what it is; no intervals if nothing gives one.

    `values`: contender -> seed or fold -> metric. `rows`: the metrics of all runs.
    """
    intervals = dict[str, Interval]()
    if all(len(by_run) >= LEAST_RUNS for by_run in values.values()):
        overlap = overlap_of(rows)
        for name, by_run in values.items():
            mean = student_interval(list(by_run.values()), 1, overlap=overlap)
            low = mean.low or 0.0
            high = mean.high or 0.0
            if judged.metric.percent:
                low = max(low, 0.0)
                high = min(high, 100.0)
            intervals[name] = Interval(low, high)
        where = "" if overlap else ", on these images"
        return f"Lines: mean and its 95 % interval over the {seed_or_fold_of(rows)}s{where}.", intervals
    images = next((row["validation_images"] for row in rows if row.get("validation_images")), None)
    if judged.metric.counts_images and images and not any(row.get("grouped") for row in rows):
        for name, by_run in values.items():
            intervals[name] = wilson(statistics.fmean(by_run.values()), images)
        return f"Lines: mean, and 95 % interval of one run on {images:,} images.", intervals
    return "Lines: mean.", intervals


ADVICE = "-data_path names moved images; -no_predictions writes a page without predictions."
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
    """Write the page of the runs and return its path.

    `out`: the file; None: report.html in the folder of the runs, which is replaced. `verdict`: a sentence at the top.
    `predictions`: evaluate the best checkpoints on the split `part`, whose data was moved to `data_path` if given.
    If one cannot be evaluated, UserError is raised; before that, a page without it is written, unless a page exists.
    `contenders`: as the verdict compares them; None: take them from the runs' settings, judged by the task's metric.
    `predicted`: is filled with the predictions of the best checkpoints, by the runs' folders.
    `recall`: a table of the recall of each class by contender.
    """
    all_runs = read_runs(runs)
    page = check_output_file(out or _folder_of_all(all_runs) / "report.html", "-out")
    metric = contenders.judged.metric if contenders else None
    evaluations: list[dict[str, Any] | str] = []
    failures: list[str] = []
    if predictions:
        evaluations, failures = _evaluated(all_runs, part, metric, data_path, predicted)
    if failures and page.exists():
        raise UserError("\n  ".join([*failures, f"{page} stays as it is. {ADVICE}"]))
    opening = None
    if len(all_runs) == 1:
        headlines = [evaluation["headline"] for evaluation in evaluations if not isinstance(evaluation, str)]
        opening = opening_of(all_runs[0], headlines[0] if headlines else None)
    shown = {"verdict": verdict, "opening": opening, "recall": recall, "evaluations": evaluations}
    write_template("page.html", page, "-out", **shown, **_about_runs(all_runs, contenders), **SIZES)
    if failures:
        raise UserError("\n  ".join([*failures, f"{page} lacks its predictions. {ADVICE}"]))
    return page


def _about_runs(runs: Sequence[Run], contenders: Contenders | None) -> dict[str, Any]:
    """Return what page.html shows of the runs, beside its opening and the predictions."""
    folders = [run.folder for run in runs]
    title = runs[0].name
    if len(runs) > 1:
        names = contenders.names if contenders else [run.name for run in runs]
        title = f"{len(runs)} runs: {some_of(names)}"
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
        "data": data_notes(runs),
        "updated": any(run.history.of("train") for run in runs),
        "charts": charts(runs, styles),
        "amp": [_amp(run) for run in runs],
    }


def _folder_of_all(runs: Sequence[Run]) -> Path:
    """Return the deepest folder that holds all runs; the current one if they have only the root in common."""
    common = Path(os.path.commonpath([run.folder.resolve() for run in runs]))
    is_root = common.parent == common
    return Path.cwd() if is_root else common


def _evaluated(
    runs: Sequence[Run], part: str, metric: Metric | None, data_path: str | None, predicted: dict[Path, Any] | None
) -> tuple[list[dict[str, Any] | str], list[str]]:
    """Evaluate the best checkpoint of each run, see `evaluate`; also return a sentence on each failure.

    A run without a checkpoint is no failure. `metric`: of the headline; None: the metric that decides in each run.
    `predicted`: see `write_report`.
    """
    # Imports torch and timm, which the rest does not need.
    from tools.common.report_page.evaluations import IMAGE_OF, evaluate

    evaluations = list[dict[str, Any] | str]()
    failures = list[str]()
    for run in runs:
        log.info("%s: evaluating the best checkpoint on its %ss ...", run.name, IMAGE_OF[part])
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
    """Fill a template with `values` and write the page to `out`, the value of `flag`."""
    here = Path(__file__).parent / "templates"
    pages = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["started_as"] = started_as
    pages.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    text = pages.get_template(template).render(**values, made=time.strftime("%Y-%m-%d %H:%M"))
    with writing(out, flag):
        # File names may have bytes that are not UTF-8: each is shown as a replacement character.
        write_atomically(out, text.encode(errors="surrogateescape").decode(errors="replace"))


def _amp(run: Run) -> dict[str, Any]:
    """Describe the precision of a run, its loss scale and its skipped updates, for the page."""
    reason = run.about.get("choices", {}).get("why")
    text = f"{run.precision} ({reason})." if reason else f"{run.precision}."
    scales = [line["scale"] for line in run.history.of("train") if line.get("scale")]
    if any(scale != 1 for scale in scales):
        text += f" The loss scale went from {short(scales[0])} to {short(scales[-1])}."
        text += f" {run.history.skipped} updates were skipped." if run.history.skipped else " No update was skipped."
    elif scales:
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
