"""Picture of a measurement: its charts side by side, with device and command below."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tools.common.output_file import writing
from tools.common.results.section import Chart

CHARTS_PER_ROW = 3


def draw(path: Path, charts: list[Chart], below: str) -> None:
    columns = min(CHARTS_PER_ROW, max(1, len(charts)))
    rows = -(-max(1, len(charts)) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.6 * columns, 4 * rows + 0.7), squeeze=False)
    for axis, chart in zip(axes.flat, charts, strict=False):
        _draw_lines(axis, chart) if chart.lines else _draw_bars(axis, chart)
        axis.set_title(chart.title, fontsize="medium")
    for axis in axes.flat[len(charts) :]:
        axis.set_axis_off()
    figure.supxlabel("\n".join(textwrap.wrap(below, 100 * columns)), fontsize="x-small")
    figure.tight_layout()
    with writing(path, "-plot"):
        figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_bars(axes: Axes, chart: Chart) -> None:
    names = list(chart.bars)[::-1]
    bars = axes.barh(names, [chart.bars[name] for name in names], color="C0")
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
    axes.margins(x=0.15)
    axes.set_xlabel(chart.unit)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for name, points in chart.lines.items():
        style = "--" if name in chart.dashed else "o-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.below)
    axes.set_ylabel(chart.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
