#!/usr/bin/env python3
"""Draw accuracy over minutes, of runs that a results file lists with their seeds.

    python bench/accuracy_over_minutes.py docs/results/cifar10_scratch.json docs/results/cifar10_scratch.png

Lines are means over the seeds of a program, areas reach from the lowest to the highest. Minutes of one machine are
not those of another: each has axes of its own.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"vitamp": "tab:blue", "timm": "tab:orange"}
STYLES = {30: "-", 60: "--", 120: ":"}
MARKERS = {"nmuon": "^", "no CutMix": ".", "CutMix": "s", "growing": "."}
"""By the first of these words in a run's setting"""


def draw(results: Path, picture: Path) -> None:
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    devices = list(dict.fromkeys(run["device"] for run in runs))
    figure, places = plt.subplots(1, len(devices), figsize=(13, 4.5), sharey=True, constrained_layout=True)
    groups = [(run["device"], run["program"], run["budget_minutes"], run["setting"]) for run in runs]
    for group in sorted({*groups}):
        device, program, budget, setting = group
        axes = places[devices.index(device)]
        # seeds x validations x (CPU minutes, top-1)
        points = np.array([run["acc1"] for run, of in zip(runs, groups, strict=True) if of == group])
        minutes = points[..., 0].mean(0)
        accuracy = points[..., 1]
        colour = COLOURS[program]
        mean = accuracy.mean(0)
        seeds = f"{len(points)} seed{'s' * (len(points) > 1)}"
        label = f"{program}, {budget} minutes, {setting}, {seeds}: {mean[-1]:.1f} %"
        marker = next(mark for word, mark in MARKERS.items() if word in setting)
        axes.plot(minutes, mean, marker + STYLES[budget], color=colour, label=label, markersize=4)
        axes.fill_between(minutes, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.2, linewidth=0)
    for device, axes in zip(devices, places, strict=True):
        axes.set(title=device, xlabel="minutes of one CPU thread", ylabel="top-1 on test images (%)", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
