"""Picture of benchmark_data.py: speed per core, speed through the loaders, time by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tools.benchmark_data.rates import OURS, TIMM
from tools.benchmark_data.report import TITLES
from tools.common.output_file import writing

COLOURS = {OURS: "C0", TIMM: "C1"}


def draw(path: Path, results: dict[str, Any], appetite: float | None) -> None:
    parts = [part for part in ("train", "val", "loader", "stages") if results.get(part)]
    figure, axes = plt.subplots(1, max(1, len(parts)), figsize=(6 * max(1, len(parts)), 4.5), squeeze=False)
    for axis, part in zip(axes[0], parts, strict=False):
        if part == "loader":
            _draw_loaders(axis, results[part], appetite)
        elif part == "stages":
            _draw_stages(axis, results[part])
        else:
            _draw_per_core(axis, results[part], TITLES[part])
    figure.suptitle(f"{results['machine']}, {results['date']}", fontsize="small")
    figure.tight_layout()
    with writing(path, "-plot"):
        figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_per_core(axes: Axes, rows: dict[str, Any], title: str) -> None:
    names = list(rows)[::-1]
    colours = ["C0" if name.startswith(OURS) else "C1" if name == TIMM else "C7" for name in names]
    bars = axes.barh(names, [rows[name]["images_per_second"] for name in names], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
    axes.margins(x=0.15)
    axes.set_title(title, fontsize="medium")


def _draw_loaders(axes: Axes, rows: dict[str, Any], appetite: float | None) -> None:
    for name, colour in COLOURS.items():
        axes.plot(list(rows), [row[name] for row in rows.values()], "o-", label=name, color=colour)
    if appetite is not None:
        axes.axhline(appetite, color="black", linestyle="--", label="needed by the model (-appetite)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("loading processes")
    axes.set_title("Through the loaders: images/s", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_stages(axes: Axes, stages: dict[str, float]) -> None:
    names = list(stages)[::-1]
    bars = axes.barh(names, [stages[name] for name in names], color="C0")
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")
    axes.margins(x=0.15)
    axes.set_title("CPU time by stage: ms per image (training)", fontsize="medium")
