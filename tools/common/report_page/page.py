"""Report of one or several runs as one HTML file, which needs no network and runs no script."""

import base64
import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tools.common.comparison import Judged, best_two, known_values, overlap_of, unit
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
"""Runs of each contender, from which on their spread gives the interval"""


def figure_of(found: Contenders | str, styles: dict[Path, Style]) -> dict[str, Any] | None:
    """What templates/contenders.html draws. Positions are percent of its width.

    `styles`: of the folder of each run. None where the runs cannot be compared, or only two can.
    """
    if isinstance(found, str):
        return None
    every: list[dict[str, Any]] = []
    for runs in found.runs.values():
        every += runs.values()
    values = known_values(found.runs, found.names, found.judged)
    if len(every) < LEAST_RUNS or len(values) < 2:
        return None
    judged = found.judged
    by = unit(every)
    kind, intervals = _intervals_of(values, every, judged)
    ends: list[float] = []
    for name, of_runs in values.items():
        ends += of_runs.values()
        ends += intervals.get(name, ())
    margin = (max(ends) - min(ends)) * 0.04 or 0.5
    low = min(ends) - margin
    high = max(ends) + margin

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    best = best_two(found.runs, found.names, judged)[0]
    hues = {name: styles[folder].hue for folder, name in found.of.items()}
    rows = []
    for name, of_runs in values.items():
        mean = statistics.fmean(of_runs.values())
        text = judged.metric.number_in_table(mean)
        if len(of_runs) > 1:
            text += f" ± {judged.metric.number_in_table(statistics.stdev(of_runs.values()))}"
        band = None
        if name in intervals:
            left = place(intervals[name].low)
            band = (left, round(place(intervals[name].high) - left, 2))
        rows.append(
            {
                "name": name,
                "text": text,
                "mean": place(mean),
                "band": band,
                "dots": [
                    {"x": place(value), "title": f"{by} {which}: {judged.metric.number(value)}"}
                    for which, value in of_runs.items()
                ],
                "best": name == best,
                "hue": Style(hues[name]).css,
            }
        )
    percent = " (%)" if judged.metric.percent else ""
    return {
        "heading": f"{judged.words[0].upper()}{judged.words[1:]} of each setting{percent}",
        "caption": f"Dots: {by}s, after the last epoch{judged.whose}. {kind}",
        "rows": rows,
        "ticks": [(place(tick), text) for tick, text in labelled(round_numbers(low, high, 5))],
    }


def _intervals_of(
    values: dict[str, dict[int, float]], every: list[dict[str, Any]], judged: Judged
) -> tuple[str, dict[str, Interval]]:
    """What the lines of the figure show, in words; and the interval of each contender, if runs or images give one."""
    intervals = dict[str, Interval]()
    if all(len(of_runs) >= LEAST_RUNS for of_runs in values.values()):
        overlap = overlap_of(every)
        for name, of_runs in values.items():
            at = student_interval(list(of_runs.values()), 1, overlap=overlap)
            low = at.low or 0.0
            high = at.high or 0.0
            if judged.metric.percent:
                low = max(low, 0.0)
                high = min(high, 100.0)
            intervals[name] = Interval(low, high)
        where = "" if overlap else ", on these images"
        return f"Lines: mean and its 95 % interval over the {unit(every)}s{where}.", intervals
    images = next((row["validation_images"] for row in every if row.get("validation_images")), None)
    if judged.metric.counts_images and images and not any(row.get("grouped") for row in every):
        for name, of_runs in values.items():
            intervals[name] = wilson(statistics.fmean(of_runs.values()), images)
        return f"Lines: mean, and 95 % interval of one run on {images:,} images.", intervals
    return "Lines: mean.", intervals


ADVICE = "-data_path names moved images; -no_predictions writes a page without predictions."
MOST_SKIPS = 20


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
    """Write the page and return its path. `out` None: report.html in the folder of the runs, which is always replaced.

    `predictions`: evaluate the best checkpoints, on the split `part`; of data that was moved, at `data_path`. Raises
    UserError if one cannot be: a page without predictions is written, but replaces none.
    `contenders`: as the verdict compares them; None for those of the runs' settings, judged by the task's metric.
    `predicted`: takes what the best checkpoints predicted, by the runs' folders.
    `recall`: a table of the classes, by contender.
    """
    read = read_runs(runs)
    out = check_output_file(out or _folder_of_all(read) / "report.html", "-out")
    metric = contenders.judged.metric if contenders else None
    evaluations: list[dict[str, Any] | str] = []
    failures: list[str] = []
    if predictions:
        evaluations, failures = _evaluated(read, part, metric, data_path, predicted)
    if failures and out.exists():
        raise UserError("\n  ".join([*failures, f"{out} stays as it is. {ADVICE}"]))
    opening = None
    if len(read) == 1:
        known = [one["headline"] for one in evaluations if not isinstance(one, str)]
        opening = opening_of(read[0], known[0] if known else None)
    shown = {"verdict": verdict, "opening": opening, "recall": recall, "evaluations": evaluations}
    write_template("page.html", out, "-out", **shown, **_about_runs(read, contenders), **SIZES)
    if failures:
        raise UserError("\n  ".join([*failures, f"{out} lacks its predictions. {ADVICE}"]))
    return out


def _about_runs(runs: Sequence[Run], contenders: Contenders | None) -> dict[str, Any]:
    """What the page shows of the runs, beside its opening and the predictions."""
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
    styles = styles_of(runs, contenders.of if contenders else None)
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
    common = Path(os.path.commonpath([run.folder.resolve() for run in runs]))
    return Path.cwd() if common.parent == common else common


def _evaluated(
    runs: Sequence[Run], part: str, metric: Metric | None, data_path: str | None, predicted: dict[Path, Any] | None
) -> tuple[list[dict[str, Any] | str], list[str]]:
    """What `evaluate` finds of each run, and failures; it imports torch and timm, which the rest does not need."""
    from tools.common.report_page.evaluations import IMAGE_OF, evaluate

    evaluations = list[dict[str, Any] | str]()
    failures = list[str]()
    for run in runs:
        log.info("%s: evaluating the best checkpoint on its %ss ...", run.name, IMAGE_OF[part])
        found = evaluate(run.folder, part, metric or run.deciding, data_path)
        evaluations.append(found)
        if isinstance(found, str):
            if checkpoints_in(run.folder / CHECKPOINTS):  # else it has not saved yet
                failures.append(f"{run.name} could not be evaluated: {found}")
        elif predicted is not None and "predicted" in found:  # not without labels
            predicted[run.folder] = found["predicted"]
    return evaluations, failures


def write_template(template: str, out: Path, flag: str, **values: Any) -> None:
    """Write the page of a template to `out`, the value of `flag`."""
    here = Path(__file__).parent / "templates"
    pages = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["started_as"] = started_as
    pages.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    text = pages.get_template(template).render(**values, made=time.strftime("%Y-%m-%d %H:%M"))
    with writing(out, flag):
        # File names may have bytes that are not UTF-8: each is shown as a replacement character.
        write_atomically(out, text.encode(errors="surrogateescape").decode(errors="replace"))


def _amp(run: Run) -> dict[str, Any]:
    """Precision of a run, its loss scale and its skipped updates."""
    why = run.about.get("choices", {}).get("why")
    text = f"{run.precision} ({why})." if why else f"{run.precision}."
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
