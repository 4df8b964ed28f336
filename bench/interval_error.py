"""Coverage of 95 % intervals by simulation: of images in unequal groups, and of drops that few images show.

    python bench/interval_error.py -tries 2000 -out docs/results/interval_error.json

Groups: top-1 of one model; a comparison of two equal models, one run each; and the same two as agresti_min() sees
them (int8, the gain over the probe), beside a cluster bootstrap (percentiles, whole groups drawn anew). Drops: a
contender that is wrong where the baseline is right, on other images in each draw; its seeds lose the same images, or
each of its own.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.statistics.crossed import noise_of
from utils.statistics.differences import bonferroni_level
from utils.statistics.groups import effective_images
from utils.statistics.paired import agresti_min
from utils.statistics.proportions import wilson

BOOTSTRAPS = 200
ACCURACY = 0.8
ALIKE = (0.05, 0.3, 0.7)
"""How alike images of a group are: intraclass correlation of top-1, or of what a contender finds harder"""
OWN, DIFFICULTY = 2.0, 3.0
"""Spread of a contender's logits by image or group, and of the images' own difficulty"""
DROPS = (0.005, 0.01, 0.02, 0.05)
IMAGES = (20, 100, 300, 1000)
SEEDS = (1, 3, 10)

Ends = tuple[float, float]


class Row(NamedTuple):
    missed: float
    """Percent of intervals without the truth"""
    error: float
    """Standard error of that"""
    width: float
    """Mean, in percentage points"""
    tries: int


def row_of(ends: list[Ends], truth: float) -> Row:
    low, high = np.array(ends).T
    missed = float(((truth < low) | (truth > high)).mean())
    error = np.sqrt(missed * (1 - missed) / len(ends))
    return Row(round(100 * missed, 1), round(100 * float(error), 1), round(float((high - low).mean()), 1), len(ends))


def designs() -> dict[str, np.ndarray]:
    """Sizes of groups, of which draws differ in the images alone."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(0, 1, 40)
    return {
        "500 single images, 1 group of 100": np.repeat([1, 100], [500, 1]),
        "300 single images, 1 group of 60": np.repeat([1, 60], [300, 1]),
        "90 single images, 3 groups of 30": np.repeat([1, 30], [90, 3]),
        "5 groups of 40": np.full(5, 40),
        "50 groups of 8": np.full(50, 8),
        "20 groups of 1 to 300": np.geomspace(1, 300, 20).round().astype(int),
        "40 groups, log-normal sizes, 400 images": np.maximum(1, 400 * shares / shares.sum()).astype(int),
    }


def bootstrap(values: np.ndarray, sizes: np.ndarray, drawn: np.ndarray) -> Ends:
    """Percentiles of the mean, in percent. `values`: of images, group by group. `drawn`: bootstraps x groups."""
    sums = np.add.reduceat(values, np.cumsum(sizes) - sizes, dtype=np.float64)
    low, high = np.quantile(100 * sums[drawn].sum(1) / sizes[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def comparison(ours: np.ndarray, theirs: np.ndarray, groups: np.ndarray | tuple[()] = ()) -> Ends:
    """Of compare.py. Both: seeds x images, whether they are right."""
    ours, theirs = 100.0 * ours, 100.0 * theirs
    every = np.stack([ours.mean(1), theirs.mean(1)])
    value, reach = float((ours - theirs).mean()), noise_of(ours, theirs, every, groups).half_width(bonferroni_level(1))
    return value - reach, value + reach


def of_groups(sizes: np.ndarray, alike: float, tries: int) -> dict[str, Row]:
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(len(sizes)), sizes)
    ends: dict[str, list[Ends]] = {}

    def keep(name: str, *found: Ends) -> None:
        for kind, one in zip((name, f"{name}, bootstrap"), found, strict=True):
            ends.setdefault(kind, []).append(one)

    strength = 1 / alike - 1
    for _ in range(tries):
        again = rng.integers(0, len(sizes), (BOOTSTRAPS, len(sizes)))
        right = rng.random(len(of)) < rng.beta(ACCURACY * strength, (1 - ACCURACY) * strength, len(sizes))[of]
        found = wilson(100 * float(right.mean()), effective_images(right, of))
        keep("top-1", (found.low, found.high), bootstrap(right, sizes, again))

        base = rng.normal(2.2, DIFFICULTY, len(of))
        by_group = np.sqrt(alike) * rng.normal(size=(2, len(sizes)))[:, of]
        by_image = np.sqrt(1 - alike) * rng.normal(size=(2, len(of)))
        ours, theirs = base + OWN * (by_group + by_image) > 0
        drawn = bootstrap(ours.astype(float) - theirs, sizes, again)
        keep("comparison", comparison(ours[None], theirs[None], of), drawn)
        _, low, high = agresti_min(theirs, ours, of)
        keep("paired", (100 * low, 100 * high), drawn)
    truth = {"top-1": 100 * ACCURACY, "comparison": 0.0, "paired": 0.0}
    return {kind: row_of(each, truth[kind.partition(",")[0]]) for kind, each in ends.items()}


def of_drops(images: int, drop: float, seeds: int, tries: int) -> dict[str, Row]:
    rng = np.random.default_rng(0)
    theirs = np.ones((seeds, images), bool)
    kinds: dict[str, Callable[[], np.ndarray]] = {"the same images": lambda: rng.random((1, images))}
    if seeds > 1:
        kinds["other images by seed"] = lambda: rng.random((seeds, images))
    found = {}
    for kind, draw in kinds.items():
        ends = [comparison(theirs & (draw() >= drop), theirs) for _ in range(tries)]
        found[kind] = row_of(ends, -100 * drop)
    return found


def rows(tries: int) -> Iterator[tuple[str, str, dict[str, Row]]]:
    for name, sizes in designs().items():
        for alike in ALIKE:
            yield "groups", f"{name}; alike {alike}", of_groups(sizes, alike, tries)
    for images in IMAGES:
        for drop in DROPS:
            for seeds in SEEDS:
                title = f"{images:,} images, a drop of {100 * drop:g} points, {seeds} seed(s)"
                yield "drops", title, of_drops(images, drop, seeds, tries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-tries", type=int, default=2000)
    parser.add_argument("-out", type=Path)
    asked = parser.parse_args()
    about = {"date": time.strftime("%Y-%m-%d"), "script": "bench/interval_error.py", "groups": {}, "drops": {}}
    for what, title, found in rows(asked.tries):
        about[what][title] = {kind: one._asdict() for kind, one in found.items()}
        print(title, {kind: tuple(one) for kind, one in found.items()}, flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
