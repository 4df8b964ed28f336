"""A comparison as a table, in sentences, and as a part of a page of the docs; all made from compare.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tools.common.tables import in_markdown
from tools.compare.verdict import ByMode, Figures, by_mode, spread, times_as_fast, values_of, wander


def table(found: ByMode, modes: Sequence[str]) -> list[list[str]]:
    """One line a mode."""
    head = [
        "mode",
        "runs",
        "images/s",
        "s an epoch",
        "speed",
        "peak memory",
        "last top-1 (%)",
        "best top-1 (%)",
        "skipped",
    ]
    base = found.get(modes[0], {})
    rows = [head]
    for mode in modes:
        ours = found.get(mode, {})
        if not ours:
            rows.append([mode, "0", *["-"] * (len(head) - 2)])
            continue

        def shown(key: str, form: Callable[[float], str], ours: dict[int, Figures] = ours) -> str:
            values = values_of(list(ours.values()), key)
            return form(statistics.median(values)) if values else "-"

        speed = times_as_fast(ours, base, len(modes) - 1)
        last, best = (values_of(list(ours.values()), key) for key in ("last_acc1", "best_acc1"))
        rows.append(
            [
                mode,
                str(len(ours)),
                shown("images_per_second", lambda value: f"{value:,.0f}"),
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
    """The verdict, as a person would say it, with its small print below; and what went wrong."""
    told: list[str] = []
    for verdict in about["verdicts"]:
        told.append(verdict["text"])
        if verdict["details"]:
            told.append(f"  ({verdict['details']})")
    return [*told, *about["troubles"]]


def notes(about: dict[str, Any]) -> list[str]:
    """How the figures were come by."""
    found, rows = by_mode(about["runs"]), about["runs"]
    told = [
        "speed: the middle of a run's reports but its first, then of the seeds; "
        "accuracy: after the last epoch, mean ± standard deviation of the seeds"
    ]
    if about["device"].startswith("cpu"):
        told.append("memory: the most that the whole process took, libraries and data included, as there is no GPU")
    most = max((wander(list(each.values()), "images_per_second") for each in found.values()), default=1.0)
    if len(about["seeds"]) > 1:
        told.append(f"runs of the same mode differed by up to {100 * (most - 1):.0f} % in speed, by chance")
    if 1 < len(about["seeds"]) < 5:
        told.append(f"{len(about['seeds'])} seeds are few: only large differences in accuracy show")
    if any(row["start_up_counted"] for row in rows):
        told.append("some runs were so short that their start is counted in their speed")
    return told


def markdown(about: dict[str, Any], link: str) -> str:
    """For a page of the docs."""
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "timm"))
    told = [*in_markdown(table(by_mode(about["runs"]), about["compared"])), ""]
    told += [f"> {line.strip()}" for line in sentences(about)]
    told += ["", f"{'. '.join(note[0].upper() + note[1:] for note in notes(about))}.", ""]
    told.append(
        f"Measured on {about['device']}, {versions}, {about['date']}: `{about['command']}`. "
        f"All figures: [{link.rpartition('/')[2]}]({link})."
    )
    return "\n".join(told) + "\n"
