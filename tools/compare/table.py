"""Report of compare.json: as a table, as sentences, and as Markdown for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from engine.measure.bottleneck import shown_rate
from tools.common.comparison.judged import Judged, judged_of
from tools.common.comparison.verdict import (
    ByName,
    Metrics,
    by_name,
    judge,
    spread,
    times_as_fast,
    unit,
    values_of,
    variation,
)
from tools.common.tables import at_commit, in_markdown, source
from utils.record.tasks import ONE_LABEL


def table(runs: ByName, names: Sequence[str], judged: Judged, what: str = "mode") -> list[list[str]]:
    """One row per contender. `what`: the heading of their names."""
    heading = judged.metric.heading
    head = [
        what,
        "runs",
        "images/s",
        "s/epoch",
        "speed",
        "peak memory",
        f"last {heading}",
        f"best {heading}",
        "skipped",
    ]
    base, digits = runs.get(names[0], {}), judged.digits + 1
    rows = [head]
    for name in names:
        ours = runs.get(name, {})
        if not ours:
            rows.append([name, "0", *["-"] * (len(head) - 2)])
            continue

        def shown(key: str, form: Callable[[float], str], ours: dict[int, Metrics] = ours) -> str:
            values = values_of(list(ours.values()), key)
            return form(statistics.median(values)) if values else "-"

        speed = times_as_fast(ours, base, len(names) - 1)
        last = judged.values(list(ours.values()))
        best = values_of(list(ours.values()), f"best_{judged.metric.name}")
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
                str(sum(row["skipped"] for row in ours.values())),
            ]
        )
    return rows


def sentences(about: dict[str, Any]) -> list[str]:
    """The verdicts, each with its details, and the problems."""
    lines: list[str] = []
    for verdict in about["verdicts"]:
        lines.append(verdict["text"])
        if verdict["details"]:
            lines.append(f"  ({verdict['details']})")
    if about["runs"] and (words := no_better_than_guessing(about["runs"], judged_of(about))):
        lines.append(words)
    return [*lines, *about.get("dropped", {}).values(), *about["troubles"], *about.get("data", ())]


def no_better_than_guessing(rows: Sequence[Metrics], judged: Judged) -> str:
    """Says so, if no contender's mean is above the share of the largest class; then the comparison tells nothing."""
    shares = values_of([row for row in rows if "largest_class_percent" in row], "largest_class_percent")
    means = [
        statistics.fmean(values) for of_one in by_name(rows).values() if (values := judged.values([*of_one.values()]))
    ]
    if judged.metric is not ONE_LABEL.best or not shares or not means or max(means) > max(shares):
        return ""
    return (
        f"none is better than always guessing the largest class, which has {max(shares):.1f} % of the validation "
        "images: train longer, or judge by another -metric"
    )


def notes(about: dict[str, Any]) -> list[str]:
    """How the metrics were measured, and their noise."""
    rows, by, rounds = about["runs"], unit(about["runs"]), about.get("folds") or len(about["seeds"])
    judged = judged_of(about)
    lines = [
        f"images/s: median over a run's log lines except the first, then over the {by}s",
        f"speed: geometric mean, over the {by}s, of the ratio to the baseline's images/s",
        f"{judged.words}: after the last epoch{judged.whose}, mean ± standard deviation over the {by}s",
        f"best {judged.metric.words}: over all validations of any of the weights that a run keeps",
    ]
    if about["device"].startswith("cpu"):
        lines.append("memory: peak of the whole process, libraries and data included, because there is no GPU")
    runs = [list(of_one.values()) for of_one in by_name(rows).values()]
    noise = max((variation(of_one, "images_per_second") for of_one in runs), default=1.0)
    if rounds > 1:
        lines.append(f"noise: the speed of runs of the same mode varied by up to {100 * (noise - 1):.0f} %")
    if 1 < rounds < 5:
        lines.append(f"{rounds} {by}s are few: only large differences in {judged.words} show")
    if any(row["start_up_counted"] for row in rows):
        lines.append("some runs have only slow first updates: the verdict leaves their speed out")
    return lines


def markdown(about: dict[str, Any], link: str) -> str:
    """The report for a page of the docs. `link`: the file with all metrics."""
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "timm"))
    runs = by_name({**row, "device": about["device"]} for row in about["runs"])
    # Worded anew from the metrics, so that the page of an old comparison has the present wording.
    judged = judged_of(about)
    verdicts = judge(runs, about["compared"], judged, len(about["compared"]) + len(about.get("dropped", ())))
    lines = [*in_markdown(table(runs, about["compared"], judged)), ""]
    lines += [f"> {line.strip()}" for line in sentences({**about, "verdicts": verdicts})]
    lines += ["", *(f"- {note}" for note in notes(about)), ""]
    measured = f"Measured on {about['device']}, {versions}, {about['date']}{at_commit(about)}"
    lines.append(f"{measured}: `{about['command']}`. {source(link)}")
    return "\n".join(lines) + "\n"
