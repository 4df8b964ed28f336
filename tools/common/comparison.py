"""Choose the metric that decides a comparison, and give the verdict on the runs of several contenders."""

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
"""Values of two contenders, for `crossed_interval`: those of the first (seeds x images), those of the second (seeds x
images), the means of all contenders that have these seeds (contenders x seeds), and the groups of the images"""

LEAST_MEMORY = 0.01
"""Smaller relative differences in memory are not reported."""


LEAST_PROCESS_MEMORY = 0.1
"""The same limit for the memory of a process, which varies by itself, often equally in several runs."""
WIDEST_SPEED = 10
"""An interval of speeds whose upper bound is more than this multiple of the lower bound is not shown."""
MANY_SKIPPED = 0.05
"""Fraction of skipped updates above which they are reported as a problem"""


@dataclass(frozen=True)
class Judged:
    """The metric and the weights by which runs are compared."""

    metric: Metric
    weights: WeightSet
    """Runs that do not have these weights are judged by their plain ones."""

    @property
    def words(self) -> str:
        """Name of the metric, as sentences call it."""
        return "accuracy" if self.metric is ONE_LABEL.best else self.metric.words

    @property
    def weights_phrase(self) -> str:
        """Phrase to put after the metric in a sentence: ', of the EMA in runs that have one'; '' for plain weights."""
        return f", of the {self.weights.label} in runs that have one" if self.weights is not PLAIN else ""

    @property
    def digits(self) -> int:
        """Number of decimals with which a mean is shown."""
        return 1 if self.metric.percent else 4

    def signed(self, value: float, sign: str = "+") -> str:
        """Format a difference without its unit. `sign`: '+' shows the sign of positive values, too; '' does not."""
        digits = 2 if self.metric.percent else 4
        return f"{value:{sign}.{digits}f}"

    def difference(self, value: float, sign: str = "") -> str:
        """Format a difference with its unit, such as '0.30 points'. `sign`: see `signed`."""
        return self.signed(value, sign) + (" points" if self.metric.percent else "")

    def difference_in_words(self, value: float) -> str:
        """Describe a difference: '0.30 points higher', or 'equal' for 0."""
        if not value:
            return "equal"
        how = "higher" if value > 0 else "lower"
        return f"{self.difference(abs(value))} {how}"

    def last_value(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric after the last epoch of a run; None if it was not measured.

        A run that does not have the judged weights is judged by its plain ones.
        """
        value = row.get(f"last_{self.weights.prefix}{self.metric.name}")
        return row.get(f"last_{self.metric.name}") if value is None else value

    def values(self, rows: Iterable[Mapping[str, Any]]) -> list[float]:
        """Return the metric of each run that has measured it."""
        return [value for value in map(self.last_value, rows) if value is not None]


def judged_of(about: Mapping[str, Any]) -> Judged:
    """Return the metric and the weights that compare.json, read as `about`, was judged by."""
    return Judged(metric_named(about["metric"]), set_named(about["weights"]))


def judged_by(name: str | None, weights: str | None, configs: Sequence[Config]) -> Judged:
    """Choose the metric and the weights by the values of -metric and -weights, which are None if not given.

    The default metric is the one that decides by default in the task. The default weights are the EMA if the runs
    differ in its settings (TRAIN.MODEL_EMA and those whose names begin so), which the plain weights do not depend on;
    otherwise they are the plain weights.
    """
    metric = _metric_of(name, configs)
    has_average = any(value_of(config, AVERAGE.setting) for config in configs)
    if weights == AVERAGE.name and not has_average:
        raise UserError(f"-weights {weights}: no run has an {AVERAGE.label}; it needs {AVERAGE.setting}=true.")
    if weights:
        return Judged(metric, set_named(weights))
    average_settings = [key for key in settings() if key.startswith(AVERAGE.setting)]
    varies = any(value_of(config, key) != value_of(configs[0], key) for key in average_settings for config in configs)
    return Judged(metric, AVERAGE if has_average and varies else PLAIN)


def _metric_of(name: str | None, configs: Sequence[Config]) -> Metric:
    """Return the metric called `name`; for None, the one that decides by default in the task of the runs.

    Raises UserError if the runs are of several tasks, or if not all of them can have the metric.
    """
    task, *other_tasks = dict.fromkeys(config.task for config in configs)
    if other_tasks:
        raise UserError(
            f"the metrics of runs {task.words} and {other_tasks[0].words} differ: compare runs of one task."
        )
    measured = list(task.metrics)
    for config in configs:
        measured += map(metric_named, config.VALIDATE_METRICS)
    has_knn = all(config.measures_knn for config in configs)
    classes = max(config.MODEL.NUM_CLASSES for config in configs)
    allowed = dict[str, Metric]()
    for metric in measured:
        always_100_percent = classes <= metric.trivial  # such as top-5 of five classes
        if not always_100_percent and (has_knn or metric is not KNN):
            allowed[metric.name] = metric
    name = name or task.best.name
    if name not in allowed:
        raise UserError(
            f"-metric {name}: not a metric of these runs.{nearest(name, allowed)} It takes {', '.join(allowed)}."
        )
    return allowed[name]


def by_name(rows: Iterable[Metrics]) -> ByName:
    """Group finished runs by contender, and by seed or fold."""
    runs: ByName = {}
    for row in rows:
        runs.setdefault(row["mode"], {})[run_number(row)] = row
    return runs


def run_number(row: Metrics) -> int:
    """Return the number that distinguishes a run from others of its contender: its fold (2 of '2/5'), or its seed."""
    return int(row["fold"].partition("/")[0]) if "fold" in row else row["seed"]


def seed_or_fold_of(rows: Iterable[Metrics]) -> str:
    """Return the word for what distinguishes the runs of a contender: 'fold' in a cross-validation, else 'seed'."""
    return "fold" if any("fold" in row for row in rows) else "seed"


def overlap_of(rows: Iterable[Metrics]) -> float:
    """Return the number of validation images per training image in a cross-validation; 0 if the runs are none.

    `student_interval` needs it, because the training images of folds overlap.
    """
    for row in rows:
        if "fold" in row:  # such as "2/5": one fifth validates, four fifths train
            folds = int(row["fold"].partition("/")[2])
            return 1 / (folds - 1)
    return 0.0


def variation(rows: Iterable[Metrics]) -> float:
    """Return how many times as fast the fastest run of a contender is as its slowest one; 1 without a speed."""
    values = values_of(rows, "images_per_second")
    return max(values) / min(values) if values else 1.0


def times_as_fast(ours: dict[int, Metrics], theirs: dict[int, Metrics], comparisons: int) -> Difference | None:
    """Compare the speeds of two contenders by their ratio, over pairs of runs with the same seed or fold.

    The ratio counts as larger than noise (`seen`) if its interval excludes 1 and it exceeds the ratio between the
    fastest and the slowest run of either contender. `comparisons`: number of comparisons that the interval allows for.
    Returns None if no pair has speeds. A run so short that its speed is that of the slow first updates has none.
    """
    pairs = _pairs(ours, theirs, lambda row: None if row["start_up_counted"] else row["images_per_second"])
    if not pairs:
        return None
    # In logarithms, a ratio is a difference.
    difference = student_interval([math.log(our_speed / their_speed) for our_speed, their_speed in pairs], comparisons)
    noise = max(variation(rows.values()) for rows in (ours, theirs))
    seen = difference.seen and math.exp(abs(difference.value)) > noise
    return replace(difference.as_ratio(), seen=seen)


def times_the_memory(runs: ByName, name: str, against: str, comparisons: int) -> Difference | None:
    """Compare the mean peak memories of the contenders `name` and `against` by their ratio; None if one is unknown.

    `runs`: those of all contenders. Each has few runs, so the noise is the scatter of the runs of all contenders around
    the mean of their own contender. `comparisons`: number of comparisons that the interval allows for. The ratio counts
    as larger than noise (`seen`) if its interval excludes 1 and it is not so close to 1 that nobody would care.
    """
    logs = dict[str, list[float]]()
    for contender, rows in runs.items():
        logs[contender] = [math.log(memory) for memory in values_of(rows.values(), "peak_memory_gb")]
    ours = logs.get(name)
    theirs = logs.get(against)
    if not ours or not theirs:
        return None
    difference = pooled_interval(ours, theirs, logs.values(), comparisons)
    ratio = difference.as_ratio()
    on_cpu = next(iter(runs[name].values()))["device"].startswith("cpu")
    smallest_reported = LEAST_PROCESS_MEMORY if on_cpu else LEAST_MEMORY
    return replace(ratio, seen=difference.seen and abs(ratio.value - 1) >= smallest_reported)


def difference_in_metric(
    ours: dict[int, Metrics],
    theirs: dict[int, Metrics],
    comparisons: int,
    judged: Judged,
    of_images: Paired | None = None,
) -> Difference | None:
    """Compare the metric of two contenders after the last epoch; in percentage points, if it is in percent.

    `comparisons`: number of comparisons that the interval allows for. `of_images`: from `paired_images`; with None, the
    interval of runs with different seeds holds for these validation images alone. Returns None without two runs of the
    same seed or fold.
    """
    values = [our_value - their_value for our_value, their_value in _pairs(ours, theirs, judged.last_value)]
    if not values:
        return None
    overlap = overlap_of(ours.values())  # of the training images of folds; 0 for seeds
    are_folds = overlap > 0
    if of_images is not None and len(values) > 1 and not are_folds:
        difference = crossed_interval(statistics.fmean(values), *of_images, comparisons=comparisons)
    else:
        images = next((row["validation_images"] for row in ours.values() if row.get("validation_images")), None)
        # The metric changes in steps of one image.
        grain = 100 / images if images and judged.metric.counts_images else 0.0
        difference = student_interval(values, comparisons, grain, overlap)
        # Each fold validates on images of its own, so the variation between folds includes that between images.
        difference = replace(difference, holds_for=LIKE_THESE if are_folds else THESE_ALONE)
    if judged.metric.percent and difference.low is not None and difference.high is not None:
        # With few seeds, Student's interval can be wider than any difference of two percentages.
        return replace(difference, low=max(difference.low, -100.0), high=min(difference.high, 100.0))
    return difference


def images_of(runs: ByName, judged: Judged, parent: Path = Path()) -> Images:
    """Read what each validation image adds to the metric, by contender and seed or fold; None for a run without it.

    `parent`: the folder to which the paths of the run folders in `runs` are relative.
    """
    images = dict[tuple[str, int], PerImage | None]()
    for name, rows in runs.items():
        for number, row in rows.items():
            images[name, number] = per_image(parent / row["folder"], judged.metric, judged.weights)
    return images


def paired_images(images: Images, name: str, against: str, seeds: Sequence[int]) -> Paired | None:
    """Collect the values per image of the contenders `name` and `against`, in the form that `crossed_interval` takes.

    Returns four arrays: the values of `name` and those of `against` (each seeds x images), the mean of each run of all
    contenders (contenders x seeds), and the groups of the images. Returns None unless all runs of the two contenders
    with these seeds or folds were validated on the same images.
    """
    ours = of_rounds(images, name, seeds)
    theirs = of_rounds(images, against, seeds)
    if not ours or not theirs:
        return None
    first_run = ours[0]
    if any(not np.array_equal(run.names, first_run.names) for run in ours + theirs):
        return None
    # Two contenders have few runs, so the noise of the seeds is estimated from the runs of all contenders.
    contenders = dict.fromkeys(contender for contender, _seed in images)
    means = list[list[float]]()
    for contender in contenders:
        runs = of_rounds(images, contender, seeds)
        if runs:
            means.append([float(run.values.mean()) for run in runs])
    our_values = np.stack([run.values for run in ours])
    their_values = np.stack([run.values for run in theirs])
    return our_values, their_values, np.array(means), first_run.groups


def of_rounds(images: Images, contender: str, rounds: Iterable[int]) -> list[PerImage]:
    """Return the values per image of each of a contender's runs with these seeds or folds; [] if one run has none."""
    runs = [images.get((contender, number)) for number in rounds]
    known = [run for run in runs if run is not None]
    return known if len(known) == len(runs) else []


def judge(
    runs: ByName, names: Sequence[str], judged: Judged, named: bool = False, images: Images | None = None
) -> list[dict[str, Any]]:
    """Compare each contender with the first of `names`; if the best two are others, also compare these two.

    Returns the verdicts as compare.json stores them. `named`: whether each sentence names the first contender, as in
    'a against b: ...'; the sentence on the best two always names both. `images`: from `images_of`; without them, the
    verdicts hold for these validation images alone.
    """
    base, *others = names
    compared = Compared(runs, judged, images or {})
    verdicts = [compared.verdict(name, base, comparisons=len(others), named=named) for name in others]
    best = best_two(runs, names, judged)
    if len(names) > 2 and len(best) == 2 and base not in best:
        # Any two contenders could have been the best two, so the interval allows for all pairs.
        pairs = math.comb(len(names), 2)
        verdicts.append(compared.verdict(best[0], best[1], comparisons=pairs, named=True))
    return verdicts


def known_values(runs: ByName, names: Sequence[str], judged: Judged) -> dict[str, dict[int, float]]:
    """Return the metric of each run after its last epoch: contender -> seed or fold -> value.

    Runs that have not measured it are left out, and so are contenders without such a run.
    """
    by_contender = dict[str, dict[int, float]]()
    for name in names:
        values = {number: judged.last_value(row) for number, row in runs.get(name, {}).items()}
        measured = {number: value for number, value in values.items() if value is not None}
        if measured:
            by_contender[name] = measured
    return by_contender


def best_two(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    """Return the two contenders with the best means of the metric, the best first; fewer if fewer have measured it.

    A mean is over the seeds or folds that all contenders have. If they have none in common, it is over all runs of the
    contender.
    """
    by_contender = known_values(runs, names, judged)
    first_seeds = set(next(iter(by_contender.values()), ()))
    common_seeds = first_seeds.intersection(*by_contender.values())
    means = dict[str, float]()
    for name, by_seed in by_contender.items():
        values = [by_seed[seed] for seed in common_seeds or by_seed]
        means[name] = statistics.fmean(values)
    return sorted(means, key=lambda name: means[name], reverse=judged.metric.higher)[:2]


class Compared(NamedTuple):
    """Hold the runs of a comparison, to give verdicts on pairs of contenders."""

    runs: ByName
    judged: Judged
    images: Images

    def verdict(self, name: str, against: str, comparisons: int, named: bool) -> dict[str, Any]:
        """Compare speed, memory and metric of the contender `name` with `against`, as compare.json stores it.

        `comparisons`: number of comparisons that the intervals allow for. `named`: whether the sentence begins with
        'NAME against AGAINST' instead of NAME alone.
        """
        judged = self.judged
        ours = self.runs.get(name, {})
        theirs = self.runs.get(against, {})

        # Speed and memory are compared only if all runs were on the same kind of machine.
        machines = {_machine_of(row) for row in list(ours.values()) + list(theirs.values())}
        speed = None
        memory = None
        why_not_compared = "speed and memory not compared, because the devices differ"
        if len(machines) < 2:
            speed = times_as_fast(ours, theirs, comparisons)
            memory = times_the_memory(self.runs, name, against, comparisons)
            why_not_compared = ""

        # The metric is compared on every machine, over the seeds or folds with which both contenders have measured it.
        our_seeds = [seed for seed, row in ours.items() if judged.last_value(row) is not None]
        their_seeds = [seed for seed, row in theirs.items() if judged.last_value(row) is not None]
        seeds = [seed for seed in our_seeds if seed in their_seeds]
        of_images = paired_images(self.images, name, against, seeds)
        metric = None
        metric_words = f"{judged.words} not compared, because the validation images differ"
        if not any(self._images_differ(name, against, seed) for seed in seeds):
            metric = difference_in_metric(ours, theirs, comparisons, judged, of_images)
            metric_words = _metric_words(metric, ours, theirs, judged)

        if metric or speed:
            phrases = (_speed_words(speed), _memory_words(memory, ours), metric_words, why_not_compared)
            sentence = ", ".join(filter(None, phrases))
        else:
            lack = "no finished run with the same seed or fold"
            if ours.keys() & theirs:
                lack = "neither a speed nor a metric"
            sentence = f"no verdict, because {name} and {against} have {lack}"
        subject = f"{name} against {against}" if named else name
        return {
            "mode": name,
            "against": against,
            "speed": _as_json(speed),
            "memory": _as_json(memory),
            "accuracy": _as_json(metric),
            "text": f"{subject}: {sentence}",
            "details": _details(speed, metric, seed_or_fold_of(ours.values()), judged),
        }

    def _images_differ(self, name: str, against: str, seed: int) -> bool:
        """Whether two runs with this seed or fold were validated on images of other names, or on another number."""
        our_row = self.runs[name][seed]
        their_row = self.runs[against][seed]
        ours = self.images.get((name, seed))
        theirs = self.images.get((against, seed))
        if ours is not None and theirs is not None:
            return not np.array_equal(ours.names, theirs.names)
        return our_row.get("validation_images") != their_row.get("validation_images")


def _machine_of(row: Metrics) -> str:
    """Return the kind of machine of a run, such as 'AMD EPYC' for the device 'cpu x 2: AMD EPYC, 8 threads'.

    The numbers of processes and threads are left out, because settings choose them. '' if the device is unknown.
    """
    _processes, _colon, machine_and_threads = row.get("device", "").partition(": ")
    machine, _comma, _threads = machine_and_threads.rpartition(", ")
    return machine


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    """Return the fields of a difference as compare.json stores them; None for None."""
    return None if difference is None else asdict(difference)


def in_words(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the sentence of each verdict, followed by a line with its details if it has any."""
    lines = list[str]()
    for verdict in verdicts:
        lines.append(verdict["text"])
        if verdict["details"]:
            lines.append(f"  ({verdict['details']})")
    return lines


def troubles(runs: ByName, failed: dict[str, list[str]], names: Sequence[str]) -> list[str]:
    """Describe problems of the contenders `names`: failed runs, diverged losses, many skipped updates.

    `runs`: the finished ones. `failed`: contender -> a reason for each of its failed runs.
    """
    problems = []
    for name in names:
        rows = runs.get(name, {})
        reasons = failed.get(name, [])
        if reasons:
            count = len(rows) + len(reasons)
            problems.append(f"{name}: {len(reasons)} of {count} runs failed: {reasons[0]}")

        seed_or_fold = seed_or_fold_of(rows.values())
        diverged = [str(number) for number, row in rows.items() if row["diverged"]]
        if diverged:
            noun = f"{seed_or_fold}s" if len(diverged) > 1 else seed_or_fold
            numbers = ", ".join(diverged)
            problems.append(f"{name}: diverged with {noun} {numbers}: the loss ended as NaN or well above its start")

        for number, row in rows.items():
            fraction = row["skipped"] / max(row["updates"], 1)
            if fraction > MANY_SKIPPED:
                problems.append(
                    f"{name}: with {seed_or_fold} {number}, {row['skipped']} of {row['updates']} updates were skipped "
                    f"({100 * fraction:.0f} %); docs/amp.md says what to do"
                )
    return problems


def _speed_words(speed: Difference | None) -> str:
    """Describe a ratio of speeds, such as '1.25x faster'; '' for None.

    A ratio without an interval is from one run of each contender: it may be noise, and the words say so.
    """
    if speed is None:
        return ""
    has_interval = speed.low is not None
    if has_interval and not speed.seen:  # the interval includes 1
        return f"speed within noise ({speed.value:.2f}x)"
    times = max(speed.value, 1 / speed.value)
    factor = f"{times:.2f}" if times < 1.5 else f"{times:.1f}"
    how = "faster" if speed.value >= 1 else "slower"
    words = f"{factor}x {how}"
    return words if speed.seen else f"{words} in one run each"


def _memory_words(memory: Difference | None, rows: dict[int, Metrics]) -> str:
    """Describe a ratio of memories, such as '12 % less memory'; '' for None. `rows`: runs of one of the two contenders.

    A ratio without an interval is from one run of each contender: it may be noise, and the words say so.
    """
    if memory is None:
        return ""
    noun = "process memory" if next(iter(rows.values()))["device"].startswith("cpu") else "memory"
    if abs(memory.value - 1) < LEAST_MEMORY:
        return f"the same {noun}"
    has_interval = memory.low is not None
    if has_interval and not memory.seen:  # the interval includes 1, or the difference is too small to care
        return f"{noun} within noise ({memory.value:.2f}x)"
    how = "less" if memory.value < 1 else "more"
    words = f"{100 * abs(1 - memory.value):.0f} % {how} {noun}"
    return words if memory.seen else f"{words} in one run each"


def _metric_words(
    difference: Difference | None, ours: dict[int, Metrics], theirs: dict[int, Metrics], judged: Judged
) -> str:
    """Write the metric of two contenders, and its difference if that is more than noise; '' if there is no difference.

    `difference`: from `difference_in_metric`.
    """
    if difference is None:
        return ""
    pairs = _pairs(ours, theirs, judged.last_value)  # the difference is the mean over these
    our_spread = spread([our_value for our_value, _ in pairs], judged.digits)
    their_spread = spread([their_value for _, their_value in pairs], judged.digits)
    values = f"{judged.words} {our_spread} against {their_spread}: "
    if difference.low is None:  # one pair of runs gives no interval
        return values + f"one {seed_or_fold_of(ours.values())} is too few to compare {judged.words}"
    if not difference.seen:  # the interval includes 0
        return values + "difference within noise"
    images = difference.holds_for  # "images like these" or "these images alone"
    return values + f"{judged.difference_in_words(difference.value)} on {images}"


def _details(speed: Difference | None, metric: Difference | None, seed_or_fold: str, judged: Judged) -> str:
    """Write the confidence intervals, and how large a loss in the metric could be hidden in the noise; '' without any.

    `speed`, `metric`: ratio of speeds and difference in the metric; None if they could not be compared.
    """
    details = []
    if metric is not None and metric.low is not None and metric.high is not None:
        low = judged.signed(metric.low)
        high = judged.difference(metric.high, "+")
        images = metric.holds_for  # "images like these" or "these images alone"
        basis = f"95 % interval for {images}, {metric.runs} {seed_or_fold}s"
        details.append(f"difference in {judged.words} {low} to {high} ({basis})")
        if not metric.seen:  # the interval includes 0
            # The worse end of the interval: the lower one of a metric that is better the higher it is.
            largest_loss = -metric.low if judged.metric.higher else metric.high
            change = "a drop" if judged.metric.higher else "a rise"
            hidden = judged.difference(max(0.0, largest_loss))
            details.append(f"{change} in {judged.words} of up to {hidden} could be hidden in the noise")
        if metric.runs_needed is not None:
            missing = metric.runs_needed - metric.runs
            more = f"{missing} more would probably show a difference as large as this one"
            details.append(f"too few {seed_or_fold}s to tell: {more}")
        if metric.images_needed is not None:
            more = f"about {metric.images_needed} times as many would probably show a difference as large as this one"
            details.append(f"too few images to tell: {more}")
    if speed and speed.low is not None and speed.high is not None and speed.high < WIDEST_SPEED * speed.low:
        details.append(f"speed {speed.low:.2f}x to {speed.high:.2f}x")
    return "; ".join(details)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format mean and standard deviation of values, `97.8 ± 0.3`; of a single value, only the value."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _pairs(
    ours: dict[int, Metrics], theirs: dict[int, Metrics], value_of: Callable[[Metrics], float | None]
) -> list[tuple[float, float]]:
    """Return (our value, their value) for each seed or fold that both contenders have.

    Values are paired because a seed or fold affects both runs alike. `value_of` returns the value of a run, such as its
    speed; pairs in which it returns None for one of the runs are left out.
    """
    values = [(value_of(ours[number]), value_of(theirs[number])) for number in ours if number in theirs]
    return [
        (our_value, their_value)
        for our_value, their_value in values
        if our_value is not None and their_value is not None
    ]


def values_of(rows: Iterable[Metrics], key: str) -> list[float]:
    """Return the value of `key` of each run that has it."""
    return [row[key] for row in rows if row.get(key) is not None]
