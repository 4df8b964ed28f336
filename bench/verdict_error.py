"""Error rates of compare.py's verdict: false claims, coverage and power, by simulation and on images.

    python bench/verdict_error.py -tries 400
    python bench/verdict_error.py -mnist DIR -photographs FILE.npz -out docs/results/verdict_error.json

Contenders with equal accuracy in the population, each better at other images. Compared: Student's t over seeds, whose
intervals hold for these images alone; the verdict; Satterthwaite's degrees of freedom alone; a mixed model (variance
components, normal quantiles); and the pigeonhole bootstrap of seeds and images (Owen 2007). -mnist DIR (idx files)
and -photographs FILE.npz (`features`, `labels`): networks trained on 600 images, 40 of each kind; validation images and
seeds are drawn anew, all give the truth.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.statistics.crossed import noise_of
from utils.statistics.differences import bonferroni_level, half_width, student_interval
from utils.statistics.paired import agresti_min

POINTS, BOOTSTRAPS, MODELS, OTHERS = 3.0, 200, 40, 16
"""Power is that for this true difference. The literature's methods get one try of 16."""
KINDS = {
    "weak": (0.5, 1.0, 0.0),
    "moderate": (1.0, 1.0, 0.0),
    "quiet seeds": (1.0, 0.3, 0.0),
    "frozen features": (1.0, 0.05, 0.0),
    "runs that shift": (0.5, 0.5, 0.3),
    "runs that shift a little": (0.5, 1.0, 0.2),
}
"""Spread of a contender's logits by image, by image and seed, and by seed."""
NOISE = 3.0
"""Spread of the images' own difficulty"""
TODAY, OURS = "seeds alone", "verdict"


class Pair(NamedTuple):
    ours: np.ndarray
    """Seeds x images: 100 where right, else 0"""
    theirs: np.ndarray
    truth: float = 0.0


def intervals(pair: Pair, every: np.ndarray, others: bool, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Of each method. `every`: contenders x seeds, their metric. `others`: those of the literature, too."""
    apart = pair.ours - pair.theirs
    seeds, images = apart.shape
    value = float(apart.mean())
    level = bonferroni_level(len(every) - 1)
    noise = noise_of(pair.ours, pair.theirs, every)
    reach = noise.half_width(level)
    today = student_interval(apart.mean(1).tolist(), len(every) - 1, 100 / images)
    found = {TODAY: (today.low or 0.0, today.high or 0.0), OURS: (value - reach, value + reach)}
    if not others:
        return found
    variance = max(noise.by_seed + noise.by_image - noise.by_both, noise.by_seed, noise.by_image)
    doubt = noise.by_seed**2 / (seeds - 1) + noise.by_image**2 / (images - 1)
    for name, freedom in (("Satterthwaite", max(variance**2 / doubt, 1.0) if doubt else 1.0), ("mixed model", 1e6)):
        reach = half_width(math.sqrt(variance), freedom, level)
        found[name] = value - reach, value + reach
    rows, columns = (rng.integers(0, each, (BOOTSTRAPS, each)) for each in (seeds, images))
    drawn = np.take_along_axis(apart[rows].mean(1), columns, 1).mean(1)
    found["pigeonhole bootstrap"] = float(np.quantile(drawn, 1 - level)), float(np.quantile(drawn, level))
    return found


def percents(draws: Iterator[list[Pair]]) -> dict[str, dict[str, float]]:
    """Of each method: how often the interval of any pair missed the truth, and how often the first pair's missed 0."""
    rng, missed, claimed = np.random.default_rng(0), dict[str, list[bool]](), dict[str, list[bool]]()
    for number, pairs in enumerate(draws):
        every = np.stack([pairs[0].theirs, *(pair.ours for pair in pairs)]).mean(2)
        found = [intervals(pair, every, number % OTHERS == 0, rng) for pair in pairs]
        for name, (low, high) in found[0].items():
            ends = [each[name] for each in found]
            wrong = [not one[0] <= pair.truth <= one[1] for one, pair in zip(ends, pairs, strict=True)]
            missed.setdefault(name, []).append(any(wrong))
            claimed.setdefault(name, []).append(not low <= 0 <= high)
    of = {"missed": missed, "claimed": claimed}
    return {
        name: {**{what: 100 * float(np.mean(of[what][name])) for what in of}, "tries": len(missed[name])}
        for name in missed
    }


def simulated(
    kind: str, images: int, seeds: int, contenders: int, better: float, rng: np.random.Generator
) -> list[Pair]:
    """Pairs with the first contender. `better`: added to the logits of the others."""
    own, noise, shift = KINDS[kind]
    base, hits = rng.normal(2.2, NOISE, images), list[np.ndarray]()
    for number in range(contenders):
        logits = base + rng.normal(0, own, images) + rng.normal(0, shift, (seeds, 1)) + better * (number > 0)
        hits.append(100.0 * (rng.logistic(size=(seeds, images)) * noise < logits))
    return [Pair(each, hits[0]) for each in hits[1:]]


def simulations(tries: int, done: Collection[str]) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    grid = [*itertools.product(KINDS, (200, 1000), (2, 3, 5, 10), (2,))]
    grid += [*itertools.product(KINDS, (10_000,), (3,), (2,)), *itertools.product(KINDS, (1000,), (2, 3), (4, 10))]
    for number, (kind, images, seeds, contenders) in enumerate(grid):
        title = f"{kind}; {images:,} images, {seeds} seeds, {contenders} contenders"
        if title in done:
            continue
        own, noise, shift = KINDS[kind]
        rng, count = np.random.default_rng(number), max(2 * tries // contenders // (1 + images // 4000), 50 * OTHERS)
        logits = rng.normal(2.2, math.hypot(NOISE, own, shift), 400_000) - rng.logistic(size=400_000) * noise
        better = -float(np.quantile(logits, (logits < 0).mean() - POINTS / 100))
        sizes = kind, images, seeds, contenders
        equal = percents(simulated(*sizes, 0.0, rng) for _ in range(count))
        apart = percents(simulated(*sizes, better, rng) for _ in range(count // 4))
        yield (
            title,
            {
                name: {"false claims": each["missed"], "power": apart[name]["claimed"], "tries": each["tries"]}
                for name, each in equal.items()
            },
        )


def folds(images: int, count: int, tries: int) -> dict[str, dict[str, float]]:
    """Least squares on one half of the features against the other: by symmetry, equal."""
    rng, claims = np.random.default_rng(0), 0
    for _ in range(tries):
        labels = rng.integers(0, 2, images) * 2.0 - 1
        features = rng.normal(size=(2, images, 10)) + 0.25 * labels[:, None]
        values = []
        for fold in range(count):
            held = np.arange(images) % count == fold
            fits = [np.linalg.lstsq(each[~held], labels[~held], rcond=None)[0] for each in features]
            ours, theirs = (
                ((each[held] @ fit > 0) == (labels[held] > 0)).mean() for each, fit in zip(features, fits, strict=True)
            )
            values.append(float(100 * (ours - theirs)))
        claims += student_interval(values, 1, 100 * count / images, 1 / (count - 1)).seen
    return {OURS: {"false claims": 100 * claims / tries, "tries": tries}}


def of_files(tries: int) -> dict[str, dict[str, float]]:
    """Percent of wrong intervals of export.py, where a file changes answers: some become wrong, and 0.4 become right.

    The rest are wrong before and after. `claims`: intervals without 0.
    """
    rng, found = np.random.default_rng(0), {}
    for images, changed, lost in itertools.product((200, 1000, 10_000), (0.005, 0.02, 0.1), (0.4, 0.6)):
        ends = []
        for _ in range(tries):
            drawn = rng.random(images) / changed
            ends.append(agresti_min((drawn < lost) | (drawn >= lost + 0.4), drawn >= lost)[1:])
        low, high = np.array(ends).T
        missed, claims = ((low > truth) | (high < truth) for truth in (changed * (lost - 0.4), 0.0))
        title = f"{images:,} images, {100 * changed:g} % of answers changed, {lost:.0%} of these from right to wrong"
        percent = (round(100 * float(wrong.mean()), 1) for wrong in (missed, claims))
        found[title] = {**dict(zip(("missed", "claims"), percent, strict=True)), "tries": tries}
    return found


def train(images: torch.Tensor, labels: torch.Tensor, hidden: int) -> np.ndarray:
    """MODELS x images of which the first 600 are trained on: 100 where right, on the others. `hidden` 0: linear."""
    torch.manual_seed(hidden)
    sizes = [images.shape[1], *([hidden] if hidden else []), 10]
    weights = [torch.randn(MODELS, a, b) / math.sqrt(a) for a, b in itertools.pairwise(sizes)]
    optimiser = torch.optim.Adam([each.requires_grad_() for each in weights], lr=3e-3)

    def logits(batch: torch.Tensor) -> torch.Tensor:
        for each in weights[:-1]:
            batch = (batch @ each).relu()
        return batch @ weights[-1]

    for _ in range(20):
        for rows in torch.stack([torch.randperm(600) for _ in range(MODELS)]).split(60, dim=1):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                logits(images[rows]).flatten(0, 1), labels[rows].flatten(), reduction="sum"
            )
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return 100.0 * (logits(images[600:]).argmax(-1) == labels[600:]).numpy()


def on_images(folder: Path, photographs: Path, tries: int) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    pixels = np.fromfile(folder / "t10k-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 784)[:5000]
    images = torch.from_numpy(pixels.astype(np.float32) / 255)
    labels = torch.from_numpy(np.fromfile(folder / "t10k-labels-idx1-ubyte", np.uint8)[8:5008].astype(np.int64))
    table = np.load(photographs)
    order = torch.randperm(len(table["labels"]), generator=torch.Generator().manual_seed(0))
    features, classes = (torch.from_numpy(table[name])[order] for name in ("features", "labels"))
    contenders = {
        "MNIST, an MLP of 64 against one of 24": [train(images, labels, hidden) for hidden in (64, 24)],
        "MNIST, a linear model of even pixels against odd ones": [
            train(images * (torch.arange(784) % 2 == half), labels, 0) for half in (0, 1)
        ],
        "photographs, a linear model of even features against odd ones": [
            train(features[:, half::2] / features.std(), classes.long(), 0) for half in (0, 1)
        ],
    }
    rng = np.random.default_rng(0)
    for (name, (ours, theirs)), number, seeds in itertools.product(contenders.items(), (200, 1000), (2, 3, 5, 10)):

        def draw(
            ours: np.ndarray = ours, theirs: np.ndarray = theirs, number: int = number, seeds: int = seeds
        ) -> list[Pair]:
            rows, columns = rng.permutation(MODELS)[:seeds], rng.integers(0, ours.shape[1], number)
            drawn = [each[rows][:, columns] for each in (ours, theirs)]
            return [Pair(drawn[0], drawn[1], float(ours.mean() - theirs.mean()))]

        found = percents(draw() for _ in range(tries // 2))
        truth = f"true difference {ours.mean() - theirs.mean():+.2f} points"
        yield f"{name} ({truth}); {number:,} images, {seeds} seeds", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-tries", type=int, default=1000)
    for flag in ("-mnist", "-photographs", "-out"):
        parser.add_argument(flag, type=Path)
    asked = parser.parse_args()
    # The rows of an interrupted command stay.
    about = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {"rows": {}}
    rows: dict[str, Any] = about["rows"]
    about["files"] = of_files(10 * asked.tries)
    of_folds = (
        (f"folds; {n:,} images, {f} folds", folds(n, f, asked.tries)) for n, f in ((200, 5), (1000, 5), (1000, 10))
    )
    of_images = on_images(asked.mnist, asked.photographs, asked.tries) if asked.mnist else ()
    for name, found in itertools.chain(simulations(asked.tries, rows.keys()), of_folds, of_images):
        rows[name] = {
            method: {what: round(float(value), 1) for what, value in one.items()} for method, one in found.items()
        }
        print(
            f"{name}: " + "; ".join(f"{method} {list(one.values())}" for method, one in rows[name].items()), flush=True
        )
        if asked.out:
            about |= {"date": time.strftime("%Y-%m-%d"), "script": "bench/verdict_error.py", "points": POINTS}
            asked.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
