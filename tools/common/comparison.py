"""The metric that decides, and the verdict on runs of several contenders."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.common.per_image import PerImage, per_image
from tools.common.run_metrics import Metrics
from utils.config import Config
from utils.config.keys import settings, value_of
from utils.errors import UserError, nearest
from utils.statistics.crossed import crossed_interval
from utils.statistics.differences import (
    LIKE_THESE,
    THESE_ALONE,
    Difference,
    pooled_interval,
    student_interval,
)
from vitamp.metrics import (
    AVERAGE,
    KNN,
    ONE_LABEL,
    PLAIN,
    Metric,
    WeightSet,
    metric_named,
    set_named,
)

ByName = dict[str, dict[int, Metrics]]
"""Contender -> seed, or fold of a cross-validation -> metrics of a finished run."""
Images = Mapping[tuple[str, int], PerImage | None]
"""(contender, seed) -> what each validation image adds to the metric of that run."""
Paired = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of two contenders, for `over_images`: seeds x images of each, contenders x seeds of all that have these seeds, and
the groups of the images"""

LEAST_MEMORY = 0.01
"""Smaller differences are not reported."""


LEAST_PROCESS_MEMORY = 0.1
"""The same of a process: its memory jumps by itself, often equally in several runs."""
WIDEST_SPEED = 10
"""Bounds of a speed that are further apart, as factors, say nothing."""
MANY_SKIPPED = 0.05


@dataclass(frozen=True)
class Judged:
    metric: Metric
    weights: WeightSet
    """Runs without them are judged by their plain weights."""

    @property
    def words(self) -> str:
        """In sentences."""
        return "accuracy" if self.metric is ONE_LABEL.best else self.metric.words

    @property
    def whose(self) -> str:
        """Of which weights, where that is not plain."""
        return f", of the {self.weights.label} in runs that have one" if self.weights is not PLAIN else ""

    @property
    def digits(self) -> int:
        """After the point, in a mean."""
        return 1 if self.metric.percent else 4

    def signed(self, value: float, sign: str = "+") -> str:
        """A difference without its unit."""
        digits = 2 if self.metric.percent else 4
        return f"{value:{sign}.{digits}f}"

    def difference(self, value: float, sign: str = "") -> str:
        return self.signed(value, sign) + (" points" if self.metric.percent else "")

    def compared(self, value: float) -> str:
        """A difference in words: '0.30 points higher'."""
        if not value:
            return "equal"
        how = "higher" if value > 0 else "lower"
        return f"{self.difference(abs(value))} {how}"

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Its value after the last epoch of a run."""
        of_set = row.get(f"last_{self.weights.prefix}{self.metric.name}")
        return row.get(f"last_{self.metric.name}") if of_set is None else of_set

    def values(self, rows: Iterable[Mapping[str, Any]]) -> list[float]:
        return [value for value in map(self.of, rows) if value is not None]


def judged_of(about: Mapping[str, Any]) -> Judged:
    """Of what compare.json holds."""
    return Judged(metric_named(about["metric"]), set_named(about["weights"]))


def judged_by(name: str | None, weights: str | None, configs: Sequence[Config]) -> Judged:
    """-metric and -weights. By default the task's best metric; of the EMA if settings vary that change it alone."""
    metric = _metric_of(name, configs)
    averaging = any(value_of(config, AVERAGE.setting) for config in configs)
    if weights == AVERAGE.name and not averaging:
        raise UserError(f"-weights {weights}: no run has an {AVERAGE.label}; it needs {AVERAGE.setting}=true.")
    if weights:
        return Judged(metric, set_named(weights))
    of_average = [key for key in settings() if key.startswith(AVERAGE.setting)]
    varies = any(value_of(config, key) != value_of(configs[0], key) for key in of_average for config in configs)
    return Judged(metric, AVERAGE if averaging and varies else PLAIN)


def _metric_of(name: str | None, configs: Sequence[Config]) -> Metric:
    kind, *others = dict.fromkeys(config.task for config in configs)
    if others:
        raise UserError(f"the metrics of runs {kind.words} and {others[0].words} differ: compare runs of one task.")
    every = list(kind.metrics)
    for config in configs:
        every += map(metric_named, config.VALIDATE_METRICS)
    has_knn = all(config.measures_knn for config in configs)
    classes = max(config.MODEL.NUM_CLASSES for config in configs)
    known = dict[str, Metric]()
    for metric in every:
        if metric.trivial < classes and (has_knn or metric is not KNN):
            known[metric.name] = metric
    name = name or kind.best.name
    if name not in known:
        raise UserError(
            f"-metric {name}: not a metric of these runs.{nearest(name, known)} It takes {', '.join(known)}."
        )
    return known[name]


def by_name(rows: Iterable[Metrics]) -> ByName:
    runs: ByName = {}
    for row in rows:
        runs.setdefault(row["mode"], {})[number_of(row)] = row
    return runs


def number_of(row: Metrics) -> int:
    """Fold of a run of a cross-validation, else its seed."""
    return int(row["fold"].partition("/")[0]) if "fold" in row else row["seed"]


def unit(rows: Iterable[Metrics]) -> str:
    """By what runs are paired, as a word."""
    return "fold" if any("fold" in row for row in rows) else "seed"


def overlap_of(rows: Iterable[Metrics]) -> float:
    """Validation images per training image in a cross-validation, else 0: see `student_interval`."""
    for row in rows:
        if "fold" in row:
            folds = int(row["fold"].partition("/")[2])
            return 1 / (folds - 1)
    return 0.0


def variation(rows: Iterable[Metrics]) -> float:
    """Largest over smallest speed of runs of the same contender."""
    values = values_of(rows, "images_per_second")
    return max(values) / min(values) if values else 1.0


def times_as_fast(ours: dict[int, Metrics], theirs: dict[int, Metrics], comparisons: int) -> Difference | None:
    """Ratio of speeds. It is seen if the interval excludes 1 and it exceeds the variation between equal runs.

    None if runs are so short that their speed is that of the slow first updates.
    """
    pairs = _pairs(ours, theirs, lambda row: None if row["start_up_counted"] else row["images_per_second"])
    if not pairs:
        return None
    difference = student_interval([math.log(one / other) for one, other in pairs], comparisons)
    noise = max(variation(rows.values()) for rows in (ours, theirs))
    seen = difference.seen and math.exp(abs(difference.value)) > noise
    return replace(difference.as_ratio(), seen=seen)


def times_the_memory(runs: ByName, name: str, against: str, comparisons: int) -> Difference | None:
    """Ratio of the mean peak memories. Runs are few, so the noise is that of all contenders around their means."""
    logs = dict[str, list[float]]()
    for each, rows in runs.items():
        logs[each] = [math.log(memory) for memory in values_of(rows.values(), "peak_memory_gb")]
    ours = logs.get(name)
    theirs = logs.get(against)
    if not ours or not theirs:
        return None
    difference = pooled_interval(ours, theirs, logs.values(), comparisons)
    ratio = difference.as_ratio()
    on_cpu = next(iter(runs[name].values()))["device"].startswith("cpu")
    least = LEAST_PROCESS_MEMORY if on_cpu else LEAST_MEMORY
    return replace(ratio, seen=difference.seen and abs(ratio.value - 1) >= least)


def difference_in_metric(
    ours: dict[int, Metrics],
    theirs: dict[int, Metrics],
    comparisons: int,
    judged: Judged,
    of_images: Paired | None = None,
) -> Difference | None:
    """Difference in the metric after the last epoch; in percentage points, if it is in percent.

    `of_images`: of `paired_images`; None: it holds for these images alone.
    Images of folds are counted already: each validates once, so the folds vary by their images, too.
    """
    values = [one - other for one, other in _pairs(ours, theirs, judged.of)]
    if not values:
        return None
    overlap = overlap_of(ours.values())
    if of_images is not None and len(values) > 1 and not overlap:
        found = crossed_interval(statistics.fmean(values), *of_images, comparisons=comparisons)
    else:
        images = next((row["validation_images"] for row in ours.values() if row.get("validation_images")), None)
        grain = 100 / images if images and judged.metric.counts_images else 0.0
        found = student_interval(values, comparisons, grain, overlap)
        found = replace(found, holds_for=LIKE_THESE if overlap else THESE_ALONE)
    if judged.metric.percent and found.low is not None and found.high is not None:
        # Of few seeds, Student's interval can be wider than any difference of two percentages.
        return replace(found, low=max(found.low, -100.0), high=min(found.high, 100.0))
    return found


def images_of(runs: ByName, judged: Judged, parent: Path = Path()) -> Images:
    """`parent`: of the runs' folders."""
    found = dict[tuple[str, int], PerImage | None]()
    for name, of_one in runs.items():
        for seed, row in of_one.items():
            found[name, seed] = per_image(parent / row["folder"], judged.metric, judged.weights)
    return found


def paired_images(images: Images, name: str, against: str, seeds: Sequence[int]) -> Paired | None:
    """None unless all runs of the two were validated on the same images."""
    ours = of_rounds(images, name, seeds)
    theirs = of_rounds(images, against, seeds)
    if not ours or not theirs:
        return None
    first = ours[0]
    if any(not np.array_equal(one.names, first.names) for one in ours + theirs):
        return None
    means = list[list[float]]()
    for contender in dict.fromkeys(who for who, _ in images):
        known = of_rounds(images, contender, seeds)
        if known:
            means.append([float(one.values.mean()) for one in known])
    our_values = np.stack([one.values for one in ours])
    their_values = np.stack([one.values for one in theirs])
    return our_values, their_values, np.array(means), first.groups


def of_rounds(images: Images, contender: str, rounds: Iterable[int]) -> list[PerImage]:
    """Those of a contender by these seeds or folds; empty if one of them is unknown."""
    found = [images.get((contender, each)) for each in rounds]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def judge(
    runs: ByName, names: Sequence[str], judged: Judged, named: bool = False, images: Images | None = None
) -> list[dict[str, Any]]:
    """Compare each contender with the first one; of three or more, also the two with the best means.

    `named`: say in every sentence what it is compared with.
    `images`: see `images_of`; without them, the verdicts hold for these images alone.
    """
    base, *others = names
    found = Compared(runs, judged, images or {})
    verdicts = [found.verdict(name, base, len(others), named) for name in others]
    best = best_two(runs, names, judged)
    if len(names) > 2 and len(best) == 2 and base not in best:
        # Any two of them could have been the best: the interval allows for all pairs.
        verdicts.append(found.verdict(best[0], best[1], math.comb(len(names), 2), named=True))
    return verdicts


def known_values(runs: ByName, names: Sequence[str], judged: Judged) -> dict[str, dict[int, float]]:
    """Of each contender by seed or fold, where they are known."""
    found = dict[str, dict[int, float]]()
    for name in names:
        values = {each: judged.of(row) for each, row in runs.get(name, {}).items()}
        known = {each: value for each, value in values.items() if value is not None}
        if known:
            found[name] = known
    return found


def best_two(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    """By the means over the seeds or folds that all have; over all, if they have none in common."""
    known = known_values(runs, names, judged)
    common = set(next(iter(known.values()), ())).intersection(*known.values())
    means = dict[str, float]()
    for name, ours in known.items():
        values = [ours[each] for each in common or ours]
        means[name] = statistics.fmean(values)
    return sorted(means, key=lambda name: means[name], reverse=judged.metric.higher)[:2]


class Compared(NamedTuple):
    runs: ByName
    judged: Judged
    images: Images

    def verdict(self, name: str, against: str, comparisons: int, named: bool) -> dict[str, Any]:
        judged = self.judged
        ours = self.runs.get(name, {})
        theirs = self.runs.get(against, {})
        # Without the numbers of processes and threads, which settings choose.
        rows = list(ours.values()) + list(theirs.values())
        machines = {row.get("device", "").partition(": ")[2].rpartition(", ")[0] for row in rows}
        speed = memory = None
        other = "speed and memory not compared, because the devices differ"
        if len(machines) < 2:
            speed = times_as_fast(ours, theirs, comparisons)
            memory = times_the_memory(self.runs, name, against, comparisons)
            other = ""
        seeds = [
            seed for seed in ours if seed in theirs and None not in (judged.of(ours[seed]), judged.of(theirs[seed]))
        ]
        paired = paired_images(self.images, name, against, seeds)
        metric = difference_in_metric(ours, theirs, comparisons, judged, paired)
        if metric or speed:
            of_metric = _metric_words(metric, ours, theirs, judged)
            said = ", ".join(filter(None, (_speed_words(speed), _memory_words(memory, ours), of_metric, other)))
        else:
            lack = "no finished run with the same seed or fold"
            if ours.keys() & theirs:
                lack = "neither a speed nor a metric"
            said = f"no verdict, because {name} and {against} have {lack}"
        who = f"{name} against {against}" if named else name
        return {
            "mode": name,
            "against": against,
            "speed": speed and asdict(speed),
            "memory": memory and asdict(memory),
            "accuracy": metric and asdict(metric),
            "text": f"{who}: {said}",
            "details": _details(speed, metric, unit(ours.values()), judged),
        }


def in_words(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """The sentences, each with its details."""
    lines = list[str]()
    for each in verdicts:
        lines.append(each["text"])
        if each["details"]:
            lines.append(f"  ({each['details']})")
    return lines


def troubles(runs: ByName, failed: dict[str, list[str]], names: Sequence[str]) -> list[str]:
    """Problems of the contenders: failed runs, diverged losses, many skipped updates."""
    problems = []
    for name in names:
        rows = runs.get(name, {})
        reasons = failed.get(name, [])
        if reasons:
            count = len(rows) + len(reasons)
            problems.append(f"{name}: {len(reasons)} of {count} runs failed: {reasons[0]}")
        by = unit(rows.values())
        diverged = [str(number) for number, row in rows.items() if row["diverged"]]
        if diverged:
            noun = f"{by}s" if len(diverged) > 1 else by
            which = ", ".join(diverged)
            problems.append(f"{name}: diverged with {noun} {which}: the loss ended as NaN or well above its start")
        for number, row in rows.items():
            fraction = row["skipped"] / max(row["updates"], 1)
            if fraction > MANY_SKIPPED:
                problems.append(
                    f"{name}: with {by} {number}, {row['skipped']} of {row['updates']} updates were skipped "
                    f"({100 * fraction:.0f} %); docs/amp.md says what to do"
                )
    return problems


def _speed_words(speed: Difference | None) -> str:
    if speed is None:
        return ""
    if speed.low is not None and not speed.seen:
        return f"speed within noise ({speed.value:.2f}x)"
    times = max(speed.value, 1 / speed.value)
    shown = f"{times:.2f}" if times < 1.5 else f"{times:.1f}"
    how = "faster" if speed.value >= 1 else "slower"
    words = f"{shown}x {how}"
    return words if speed.seen else f"{words} in one run each"


def _memory_words(memory: Difference | None, rows: dict[int, Metrics]) -> str:
    if memory is None:
        return ""
    of = "process memory" if next(iter(rows.values()))["device"].startswith("cpu") else "memory"
    if abs(memory.value - 1) < LEAST_MEMORY:
        return f"the same {of}"
    if memory.low is not None and not memory.seen:
        return f"{of} within noise ({memory.value:.2f}x)"
    how = "less" if memory.value < 1 else "more"
    words = f"{100 * abs(1 - memory.value):.0f} % {how} {of}"
    return words if memory.seen else f"{words} in one run each"


def _metric_words(
    difference: Difference | None, ours: dict[int, Metrics], theirs: dict[int, Metrics], judged: Judged
) -> str:
    if difference is None:
        return ""
    pairs = _pairs(ours, theirs, judged.of)  # of which the difference is the mean
    mine = spread([one for one, _ in pairs], judged.digits)
    other = spread([one for _, one in pairs], judged.digits)
    text = f"{judged.words} {mine} against {other}: "
    if difference.low is None:
        return text + f"one {unit(ours.values())} is too few to compare {judged.words}"
    if not difference.seen:
        return text + "difference within noise"
    return text + f"{judged.compared(difference.value)} on {difference.holds_for}"


def _details(speed: Difference | None, metric: Difference | None, by: str, judged: Judged) -> str:
    """Confidence intervals, and the loss that these seeds or folds could not have shown."""
    details = []
    if metric is not None and metric.low is not None and metric.high is not None:
        low = judged.signed(metric.low)
        high = judged.difference(metric.high, "+")
        details.append(
            f"difference in {judged.words} {low} to {high} (95 % interval for {metric.holds_for}, {metric.runs} {by}s)"
        )
        if not metric.seen:
            worse = -metric.low if judged.metric.higher else metric.high
            change = "a drop" if judged.metric.higher else "a rise"
            hidden = judged.difference(max(0.0, worse))
            details.append(f"{change} in {judged.words} of up to {hidden} could be hidden in the noise")
        if metric.runs_needed is not None:
            more = metric.runs_needed - metric.runs
            details.append(f"too few {by}s to tell: {more} more would probably show a difference as large as this one")
        if metric.images_needed is not None:
            more = f"about {metric.images_needed} times as many would probably show a difference as large as this one"
            details.append(f"too few images to tell: {more}")
    if speed and speed.low is not None and speed.high is not None and speed.high < WIDEST_SPEED * speed.low:
        details.append(f"speed {speed.low:.2f}x to {speed.high:.2f}x")
    return "; ".join(details)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`97.8 ± 0.3`: mean and standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _pairs(
    ours: dict[int, Metrics], theirs: dict[int, Metrics], value_of: Callable[[Metrics], float | None]
) -> list[tuple[float, float]]:
    """A value of both, paired by seed or fold: the effect of it is the same in both."""
    values = [(value_of(ours[each]), value_of(theirs[each])) for each in ours if each in theirs]
    return [(one, other) for one, other in values if one is not None and other is not None]


def values_of(rows: Iterable[Metrics], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]
