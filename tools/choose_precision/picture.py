"""choose_precision.png: loss curves, speed, memory and gradients per layer, of all precisions side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tools.choose_precision.layers import Layer
from tools.choose_precision.verdict import Baseline, Finding, smooth_together
from tools.common.output_file import writing

SHOWN_NAMES = 16
SMALLEST_DRAWN, MOST_DRAWN = 1e-7, 1e9
"""Limits of the log axes: smallest fraction of underflow, and largest headroom, as bf16's would hide all others'."""

Colours = dict[str, str]
Value = Callable[[Layer], float]


def draw(path: Path, title: str, findings: list[Finding], base: Baseline | None) -> None:
    shown = [finding for finding in findings if not finding.measured.failed]
    figure, axes = plt.subplots(2, 3, figsize=(17, 9), constrained_layout=True)
    figure.suptitle(title)
    colours = {finding.name: f"C{n % 10}" for n, finding in enumerate(shown)} | {"fp32": "black"}
    _draw_losses(axes[0][0], shown, base, colours)
    _draw_differences(axes[0][1], shown, base, colours)
    rows = [("fp32", base.images_per_second, base.peak_memory_gb)] if base else []
    rows += [(f.name, f.measured.images_per_second, f.measured.peak_memory_gb) for f in shown]
    _draw_bars(axes[0][2], {name: speed for name, speed, _ in rows}, "images/s", colours)
    _draw_bars(axes[1][0], {name: memory for name, _, memory in rows}, "peak memory (GB)", colours)
    with_layers = [f for f in shown if f.measured.layers]
    _draw_layers(axes[1][1], with_layers, "fraction of gradient values that underflow", _drawn_underflow, colours)
    near = [f for f in with_layers if min(layer.headroom for layer in f.measured.layers) < MOST_DRAWN]
    _draw_layers(axes[1][2], near, "headroom to overflow (factor)", lambda layer: layer.headroom, colours)
    with writing(path, "-output"):
        figure.savefig(path, dpi=110)
    plt.close(figure)


def _drawn_underflow(layer: Layer) -> float:
    return max(layer.underflow_share, SMALLEST_DRAWN)


def _draw_losses(axes: Axes, findings: list[Finding], base: Baseline | None, colours: Colours) -> None:
    for nth, run in enumerate(base.runs if base else ()):
        (line,) = smooth_together([run.losses])
        _curve(axes, line, len(run.losses), "" if nth else "fp32, three seeds", "black")
    for finding in findings:
        (line,) = smooth_together([finding.measured.losses])
        _curve(axes, line, len(finding.measured.losses), finding.name, colours[finding.name])
    _finish(axes, "update", "training loss (smoothed)")


def _draw_differences(axes: Axes, findings: list[Finding], base: Baseline | None, colours: Colours) -> None:
    if base is None:
        axes.set_axis_off()
        return
    drawn = [("" if nth else "two fp32 seeds", run, "black") for nth, run in enumerate(base.runs[1:])]
    drawn += [(f.name, f.measured, colours[f.name]) for f in findings]
    for name, run, colour in drawn:
        ours, theirs = smooth_together([base.losses, run.losses])
        line = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        _curve(axes, line, min(len(base.losses), len(run.losses)), name, colour)
    axes.set_yscale("log")
    _finish(axes, "update", "difference to fp32's loss (smoothed)")


def _curve(axes: Axes, line: list[float], updates: int, name: str, colour: str) -> None:
    first = updates - len(line) + 1  # the update that ends the first window
    axes.plot(range(first, updates + 1), line, label=name or None, color=colour, linewidth=1.0)


def _draw_bars(axes: Axes, values: dict[str, float], name: str, colours: Colours) -> None:
    axes.bar(list(values), list(values.values()), color=[colours[label] for label in values])
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel(name)
    axes.grid(axis="y", alpha=0.3)


def _draw_layers(axes: Axes, findings: list[Finding], name: str, value: Value, colours: Colours) -> None:
    fullest_first = sorted((f.measured.layers for f in findings), key=len, reverse=True)
    order = list(dict.fromkeys(layer.name for layers in fullest_first for layer in layers))
    if not order:
        axes.set_axis_off()
        axes.set_title(f"{name}: nothing to show", fontsize="medium")
        return
    for finding in findings:
        known = {order.index(layer.name): value(layer) for layer in finding.measured.layers}
        line = sorted((place, number) for place, number in known.items() if math.isfinite(number))
        axes.plot(*zip(*line, strict=True), ".-", label=finding.name, color=colours[finding.name], linewidth=0.8)
    every = max(1, len(order) // SHOWN_NAMES)
    axes.set_xticks(range(0, len(order), every), order[::every], rotation=60, ha="right", fontsize="x-small")
    axes.set_yscale("log")
    _finish(axes, "", name)


def _finish(axes: Axes, below: str, beside: str) -> None:
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
