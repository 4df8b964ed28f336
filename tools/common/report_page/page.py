"""Report of one or several runs as one HTML file, which needs no network and runs no script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tools.common.output_file import check_output_file, writing
from tools.common.report_page.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    charts,
    short,
    side_by_side,
    styles_of,
)
from tools.common.report_page.contenders import figure_of
from tools.common.report_page.opening import opening_of
from tools.common.report_page.runs import NOTHING, Run, differing_settings, read_runs, summary
from utils.log import log
from utils.program import started_as
from vitamp.files import write_atomically
from vitamp.metrics import TASKS

TEMPLATE = "page.html"
MAIN_FIGURES = (
    *(f"best {kind.best.words}" for kind in TASKS),
    *("precision", "images/s", "peak memory", "training time", "updates skipped"),
)
MOST_SKIPS = 20


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    verdict: str | None = None,
    predictions: bool = True,
    overwrite: bool = True,
    part: str = "val",
) -> Path:
    """Write the page and return its path. `out` None: report.html in the folder of the runs, which is always replaced.

    `predictions`: evaluate the best checkpoints, on the split `part`. `overwrite`: replace an existing `out`.
    """
    read = read_runs(runs)
    out = check_output_file(
        out or _common_folder(read) / "report.html", "-out", fresh=out is not None and not overwrite
    )
    evaluations: list[dict[str, Any] | str] = []
    if predictions:
        # Imports torch and timm, which the rest does not need.
        from tools.common.report_page.evaluations import IMAGE_OF, evaluate

        for run in read:
            log.info("%s: evaluating the best checkpoint on its %ss ...", run.name, IMAGE_OF[part])
            evaluations.append(evaluate(run.folder, part, run.deciding))
    # File names may have bytes that are not UTF-8: each is shown as a replacement character.
    text = _page(read, verdict, evaluations).encode(errors="surrogateescape").decode(errors="replace")
    with writing(out, "-out"):
        write_atomically(out, text)
    return out


def _common_folder(runs: Sequence[Run]) -> Path:
    """Folder of the run, or nearest folder that contains all runs; the current folder where that is only /."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) == 1:
        return folders[0]
    above = next(above for above in folders[0].parents if all(folder.is_relative_to(above) for folder in folders))
    return Path.cwd() if above.parent == above else above


def _page(runs: Sequence[Run], verdict: str | None, evaluations: Sequence[dict[str, Any] | str]) -> str:
    here = Path(__file__).parent / "templates"
    pages = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["started_as"] = started_as
    headlines = [None if isinstance(found, str) else found["headline"] for found in evaluations]
    rows = summary(runs)
    by_name = dict(rows)
    tiles = []
    for name in MAIN_FIGURES:
        if (text := by_name.get(name, [NOTHING])[0]) != NOTHING:
            value, _, more = text.partition(" (")  # '98.61 % (epoch 29)'
            tiles.append((name, value, more.removesuffix(")")))
    known = [run.config for run in runs if run.config is not None]
    what = dict.fromkeys(f"{config.MODEL.NAME} on {config.DATA.DATASET}" for config in known)
    devices = dict.fromkeys(str(run.about["device"]) for run in runs if run.about.get("device"))
    readable = len(known) == len(runs)
    styles = styles_of(runs)
    return pages.get_template(TEMPLATE).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        subtitle="; ".join([*what, *devices]),
        verdict=verdict,
        opening=opening_of(runs[0], headlines[0] if headlines else None) if len(runs) == 1 else None,
        headlines=headlines,
        figure=figure_of([run.folder for run in runs], styles) if len(runs) > 2 else None,
        runs=runs,
        styles=styles,
        tiles=tiles,
        short_rows=[(name, by_name[name]) for name in MAIN_FIGURES if name in by_name],
        rows=rows,
        settings=differing_settings(runs),
        no_settings="None." if readable else "Unknown: the config.yaml of at least one run is missing or unreadable.",
        charts=charts(runs),
        side_by_side=side_by_side(runs),
        amp=[_amp(run) for run in runs],
        evaluations=evaluations,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
        top=TOP,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _amp(run: Run) -> dict[str, Any]:
    """Precision of a run, its loss scale and its skipped updates."""
    why = run.about.get("choices", {}).get("why")
    text = f"{run.precision}{f' ({why})' if why else ''}."
    scales = [line["scale"] for line in run.history.of("train") if line.get("scale")]
    if any(scale != 1 for scale in scales):
        text += f" The loss scale went from {short(scales[0])} to {short(scales[-1])}."
        text += f" {run.history.skipped} updates were skipped." if run.history.skipped else " No update was skipped."
    elif scales:
        text += " The loss needed no scaling, and no update was skipped."
    skips = run.history.of("skip")
    rows = [
        {
            "at": skip.get("update", NOTHING),
            "overflowed": ", ".join(str(skip[key]) for key in ("operation", "module", "direction") if skip.get(key))
            or "not found",
            "scale": short(skip["scale"]) if skip.get("scale") else NOTHING,
        }
        for skip in skips[:MOST_SKIPS]
    ]
    return {"summary": text, "skips": rows, "more": max(0, len(skips) - MOST_SKIPS)}
