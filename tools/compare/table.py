"""Report of compare.json: as a table, as sentences, and as Markdown for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from engine.measure.bottleneck import shown_rate
from tools.common.tables import at_commit, in_markdown, source
from tools.compare.metrics import BEST, COMPARED, LAST
from tools.compare.verdict import ByMode, Metrics, by_mode, judge, spread, times_as_fast, unit, values_of, variation


def table(runs: ByMode, modes: Sequence[str]) -> list[list[str]]:
    """One row per mode."""
    head = [
        "mode",
        "runs",
        "images/s",
        "s/epoch",
        "speed",
        "peak memory",
        f"last {COMPARED.heading}",
        f"best {COMPARED.heading}",
        "skipped",
    ]
    base = runs.get(modes[0], {})
    rows = [head]
    for mode in modes:
        ours = runs.get(mode, {})
        if not ours:
            rows.append([mode, "0", *["-"] * (len(head) - 2)])
            continue

        def shown(key: str, form: Callable[[float], str], ours: dict[int, Metrics] = ours) -> str:
            values = values_of(list(ours.values()), key)
            return form(statistics.median(values)) if values else "-"

        speed = times_as_fast(ours, base, len(modes) - 1)
        last, best = (values_of(list(ours.values()), key) for key in (LAST, BEST))
        rows.append(
            [
                mode,
                str(len(ours)),
                shown("images_per_second", shown_rate),
                shown("seconds_per_epoch", lambda value: f"{value:.3g}"),
                "1" if mode == modes[0] else f"{speed.value:.2f}" if speed else "-",
                shown("peak_memory_gb", lambda value: f"{value:.2f} GB"),
                spread(last, 2) if last else "-",
                spread(best, 2) if best else "-",
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
    return [*lines, *about["troubles"]]


def notes(about: dict[str, Any]) -> list[str]:
    """How the metrics were measured, and their noise."""
    rows, by, rounds = about["runs"], unit(about["runs"]), about.get("folds") or len(about["seeds"])
    lines = [
        f"images/s: median over a run's log lines except the first, then over the {by}s",
        f"speed: geometric mean, over the {by}s, of the ratio to the baseline's images/s",
        f"accuracy: after the last epoch, mean ± standard deviation over the {by}s",
    ]
    if about["device"].startswith("cpu"):
        lines.append("memory: peak of the whole process, libraries and data included, because there is no GPU")
    runs = [list(of_mode.values()) for of_mode in by_mode(rows).values()]
    noise = max((variation(of_mode, "images_per_second") for of_mode in runs), default=1.0)
    if rounds > 1:
        lines.append(f"noise: the speed of runs of the same mode varied by up to {100 * (noise - 1):.0f} %")
    if 1 < rounds < 5:
        lines.append(f"{rounds} {by}s are few: only large differences in accuracy show")
    if any(row["start_up_counted"] for row in rows):
        lines.append("some runs are so short that their speed includes the slow first updates")
    return lines


def markdown(about: dict[str, Any], link: str) -> str:
    """The report for a page of the docs. `link`: the file with all metrics."""
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "timm"))
    runs = by_mode({**row, "device": about["device"]} for row in about["runs"])
    # Worded anew from the metrics, so that the page of an old comparison has the present wording.
    verdicts = judge(runs, about["compared"])
    lines = [*in_markdown(table(runs, about["compared"])), ""]
    lines += [f"> {line.strip()}" for line in sentences({**about, "verdicts": verdicts})]
    lines += ["", *(f"- {note}" for note in notes(about)), ""]
    measured = f"Measured on {about['device']}, {versions}, {about['date']}{at_commit(about)}"
    lines.append(f"{measured}: `{about['command']}`. {source(link)}")
    return "\n".join(lines) + "\n"
