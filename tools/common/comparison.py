"""Metrics of runs, read from their folders; the metric that decides; and the verdict on runs of several contenders."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.common.per_image import PerImage, per_image
from utils.config import Config, config_of_run
from utils.config.keys import OF_ONE_START, settings, value_of
from utils.config.kinds import one_line
from utils.errors import UserError, nearest
from utils.record.history import History, is_end, is_start, last_line
from utils.record.run_folder import read_about
from utils.statistics.crossed import crossed_interval
from utils.statistics.differences import (
    LIKE_THESE,
    THESE_ALONE,
    Difference,
    bonferroni_level,
    half_width,
    student_interval,
)
from utils.statistics.proportions import newcombe
from vitamp.checkpoints import CHECKPOINTS, read_index
from vitamp.meta import unchecked_meta
from vitamp.metrics import (
    AVERAGE,
    BALANCED,
    KNN,
    NO_LABELS,
    ONE_LABEL,
    PLAIN,
    Metric,
    WeightSet,
    metric_named,
    set_named,
)

Metrics = dict[str, Any]
"""Metrics of a finished run, as compare.json holds them."""
ByName = dict[str, dict[int, Metrics]]
"""Contender -> seed, or fold of a cross-validation -> metrics of a finished run."""
Images = Mapping[tuple[str, int], PerImage | None]
"""(contender, seed) -> what each validation image adds to the metric of that run."""
Paired = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of two contenders, for `over_images`: seeds x images of each, contenders x seeds of all that have these seeds, and
the groups of the images"""

LEAST_MEMORY, LEAST_PROCESS_MEMORY = 0.01, 0.1
"""Smaller differences are not reported. A process's memory jumps by itself, often equally in several runs."""
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
        return f"{value:{sign}.{2 if self.metric.percent else 4}f}"

    def difference(self, value: float, sign: str = "") -> str:
        return self.signed(value, sign) + (" points" if self.metric.percent else "")

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Its value after the last epoch of a run."""
        of_set = row.get(f"last_{self.weights.prefix}{self.metric.name}")
        return row.get(f"last_{self.metric.name}") if of_set is None else of_set

    def values(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [value for row in rows if (value := self.of(row)) is not None]


def judged_of(about: Mapping[str, Any]) -> Judged:
    """Of what compare.json holds."""
    return Judged(metric_named(about["metric"]), set_named(about["weights"]))


def judged_by(name: str | None, weights: str | None, configs: Sequence[Config]) -> Judged:
    """-metric and -weights. By default the task's best metric; of the EMA if settings vary that change it alone."""
    metric = _metric_of(name, configs)
    averaging = any(value_of(config, AVERAGE.setting) for config in configs)
    if weights == AVERAGE.name and not averaging:
        raise UserError(f"-weights {weights}: no run has an {AVERAGE.label}; it needs {AVERAGE.setting}=true.")
    kept = {tuple(value_of(config, key) for key in settings() if key.startswith(AVERAGE.setting)) for config in configs}
    default = AVERAGE if averaging and len(kept) > 1 else PLAIN
    return Judged(metric, set_named(weights) if weights else default)


def _metric_of(name: str | None, configs: Sequence[Config]) -> Metric:
    kind, *others = dict.fromkeys(config.task for config in configs)
    if others:
        raise UserError(f"the metrics of runs {kind.words} and {others[0].words} differ: compare runs of one task.")
    own = [metric_named(name) for config in configs for name in config.VALIDATE_METRICS]
    has_knn = all(config.measures_knn for config in configs)
    classes = max(config.MODEL.NUM_CLASSES for config in configs)
    every = [metric for metric in (*kind.metrics, *own) if metric.trivial < classes]
    known = {metric.name: metric for metric in every if has_knn or metric is not KNN}
    if (name := name or kind.best.name) not in known:
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
    """Validation images per training image in a cross-validation, else 0: see `interval`."""
    return next((1 / (int(row["fold"].partition("/")[2]) - 1) for row in rows if "fold" in row), 0.0)


def variation(rows: Iterable[Metrics]) -> float:
    """Largest over smallest speed of runs of the same contender."""
    values = values_of([*rows], "images_per_second")
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
    low, high = (None if end is None else math.exp(end) for end in (difference.low, difference.high))
    seen = difference.seen and math.exp(abs(difference.value)) > noise
    return Difference(math.exp(difference.value), low, high, difference.runs, seen)


def times_the_memory(runs: ByName, name: str, against: str, comparisons: int) -> Difference | None:
    """Ratio of the mean peak memories. Runs are few, so the noise is that of all contenders around their means."""
    logs = {each: [*map(math.log, values_of([*rows.values()], "peak_memory_gb"))] for each, rows in runs.items()}
    ours, theirs = logs.get(name), logs.get(against)
    if not ours or not theirs:
        return None
    value, number = statistics.fmean(ours) - statistics.fmean(theirs), min(len(ours), len(theirs))
    freedom = sum(len(of_one) - 1 for of_one in logs.values() if of_one)
    if not freedom:
        return Difference(math.exp(value), None, None, number)
    squares = sum((one - statistics.fmean(of_one)) ** 2 for of_one in logs.values() for one in of_one)
    error = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    reach = half_width(error, freedom, bonferroni_level(comparisons))
    low, high = (math.exp(end) for end in (value - reach, value + reach))
    on_cpu = next(iter(runs[name].values()))["device"].startswith("cpu")
    least = LEAST_PROCESS_MEMORY if on_cpu else LEAST_MEMORY
    return Difference(math.exp(value), low, high, number, abs(value) > reach and abs(math.exp(value) - 1) >= least)


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
    pairs = _pairs(ours, theirs, judged.of)
    if not pairs:
        return None
    images = next((row["validation_images"] for row in ours.values() if row.get("validation_images")), None)
    grain = 100 / images if images and judged.metric.counts_images else 0.0
    values, overlap = [one - other for one, other in pairs], overlap_of(ours.values())
    if of_images is not None and len(values) > 1 and not overlap:
        found = crossed_interval(statistics.fmean(values), *of_images, comparisons=comparisons)
    else:
        found = replace(
            student_interval(values, comparisons, grain, overlap), holds_for=LIKE_THESE if overlap else THESE_ALONE
        )
    if judged.metric.percent and found.low is not None and found.high is not None:
        # Of few seeds, Student's interval can be wider than any difference of two percentages.
        return replace(found, low=max(found.low, -100.0), high=min(found.high, 100.0))
    return found


def images_of(runs: ByName, judged: Judged, parent: Path = Path()) -> Images:
    """`parent`: of the runs' folders."""
    every = {(name, seed): row for name, of_one in runs.items() for seed, row in of_one.items()}
    return {key: per_image(parent / row["folder"], judged.metric, judged.weights) for key, row in every.items()}


def paired_images(images: Images, name: str, against: str, seeds: Sequence[int]) -> Paired | None:
    """None unless all runs of the two were validated on the same images."""
    found = [images.get((who, seed)) for who in (name, against) for seed in seeds]
    every = [one for one in found if one is not None]
    if not every or len(every) < len(found) or any(not np.array_equal(one.names, every[0].names) for one in every):
        return None
    values, means = np.stack([one.values for one in every]), list[list[float]]()
    for contender in dict.fromkeys(who for who, _ in images):
        of_one = [images.get((contender, seed)) for seed in seeds]
        known = [float(one.values.mean()) for one in of_one if one is not None]
        if len(known) == len(seeds):
            means.append(known)
    return values[: len(seeds)], values[len(seeds) :], np.array(means), every[0].groups


def judge(
    runs: ByName, names: Sequence[str], judged: Judged, named: bool = False, images: Images | None = None
) -> list[dict[str, Any]]:
    """Compare each contender with the first one; of three or more, also the two with the best means.

    `named`: say in every sentence what it is compared with.
    `images`: see `images_of`; without them, the verdicts hold for these images alone.
    """
    base, *others = names
    images = images or {}
    verdicts = [_verdict(runs, name, base, len(others), judged, named, images) for name in others]
    best = best_two(runs, names, judged)
    if len(names) > 2 and len(best) == 2 and base not in best:
        # Any two of them could have been the best: the interval allows for all pairs.
        verdicts.append(_verdict(runs, best[0], best[1], math.comb(len(names), 2), judged, True, images))
    return verdicts


def best_two(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    """By the means over the seeds or folds that all have; over all, if they have none in common."""
    rows = {name: {each: row for each, row in runs[name].items() if judged.of(row) is not None} for name in runs}
    known = {name: rows[name] for name in names if rows.get(name)}
    common = set[int]().union(*known.values()).intersection(*known.values())
    values = {name: judged.values([ours[each] for each in common or ours]) for name, ours in known.items()}
    means = {name: statistics.fmean(each) for name, each in values.items()}
    return sorted(means, key=lambda name: means[name], reverse=judged.metric.higher)[:2]


def in_words(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """The sentences, each with its details."""
    lines = list[str]()
    for each in verdicts:
        lines.append(each["text"])
        if each["details"]:
            lines.append(f"  ({each['details']})")
    return lines


def _verdict(
    runs: ByName, name: str, against: str, comparisons: int, judged: Judged, named: bool, images: Images
) -> dict[str, Any]:
    ours, theirs = runs.get(name, {}), runs.get(against, {})
    # Without the numbers of processes and threads, which settings choose.
    rows = (*ours.values(), *theirs.values())
    machines = {row.get("device", "").partition(": ")[2].rpartition(", ")[0] for row in rows}
    speed = times_as_fast(ours, theirs, comparisons) if len(machines) < 2 else None
    memory = times_the_memory(runs, name, against, comparisons) if len(machines) < 2 else None
    other = "speed and memory not compared, because the devices differ" if len(machines) > 1 else ""
    seeds = [seed for seed in ours if seed in theirs and None not in (judged.of(ours[seed]), judged.of(theirs[seed]))]
    metric = difference_in_metric(ours, theirs, comparisons, judged, paired_images(images, name, against, seeds))
    parts = [_speed_words(speed), _memory_words(memory, ours), _metric_words(metric, ours, theirs, judged), other]
    who = f"{name} against {against}" if named else name
    text = (
        f"{who}: {', '.join(part for part in parts if part)}"
        if metric or speed
        else f"{who}: no verdict, because {name} and {against} have "
        + ("neither a speed nor a metric" if ours.keys() & theirs else "no finished run with the same seed or fold")
    )
    found = {"speed": speed, "memory": memory, "accuracy": metric}
    return {
        "mode": name,
        "against": against,
        **{key: each and asdict(each) for key, each in found.items()},
        "text": text,
        "details": _details(speed, metric, unit(ours.values()), judged),
    }


def troubles(runs: ByName, failed: dict[str, list[str]], names: Sequence[str]) -> list[str]:
    """Problems of the contenders: failed runs, diverged losses, many skipped updates."""
    problems = []
    for name in names:
        rows = runs.get(name, {})
        count = len(rows) + len(failed.get(name, ()))
        if failed.get(name):
            problems.append(f"{name}: {len(failed[name])} of {count} runs failed: {failed[name][0]}")
        by = unit(rows.values())
        if diverged := [number for number, row in rows.items() if row["diverged"]]:
            which = f"{by}{'s' if len(diverged) > 1 else ''} {', '.join(map(str, diverged))}"
            problems.append(f"{name}: diverged with {which}: the loss ended as NaN or well above its start")
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
    words = f"{times:.{2 if times < 1.5 else 1}f}x {'faster' if speed.value >= 1 else 'slower'}"
    return words if speed.seen else f"{words} in one run each"


def _memory_words(memory: Difference | None, rows: dict[int, Metrics]) -> str:
    if memory is None:
        return ""
    of = "process memory" if next(iter(rows.values()))["device"].startswith("cpu") else "memory"
    if abs(memory.value - 1) < LEAST_MEMORY:
        return f"the same {of}"
    if memory.low is not None and not memory.seen:
        return f"{of} within noise ({memory.value:.2f}x)"
    percent = f"{100 * abs(1 - memory.value):.0f} % {'less' if memory.value < 1 else 'more'} {of}"
    return percent if memory.seen else f"{percent} in one run each"


def _metric_words(
    difference: Difference | None, ours: dict[int, Metrics], theirs: dict[int, Metrics], judged: Judged
) -> str:
    if difference is None:
        return ""
    pairs = _pairs(ours, theirs, judged.of)  # of which the difference is the mean
    mine, other = (spread(values, judged.digits) for values in zip(*pairs, strict=True))
    text = f"{judged.words} {mine} against {other}: "
    if difference.low is None:
        return text + f"one {unit(ours.values())} is too few to compare {judged.words}"
    if not difference.seen:
        return text + "difference within noise"
    how = "higher" if difference.value > 0 else "lower"
    return text + f"{judged.difference(abs(difference.value))} {how} on {difference.holds_for}"


def _details(speed: Difference | None, metric: Difference | None, by: str, judged: Judged) -> str:
    """Confidence intervals, and the loss that these seeds or folds could not have shown."""
    details = []
    if metric is not None and metric.low is not None and metric.high is not None:
        low, high = judged.signed(metric.low), judged.difference(metric.high, "+")
        details.append(
            f"difference in {judged.words} {low} to {high} (95 % interval for {metric.holds_for}, {metric.runs} {by}s)"
        )
        if not metric.seen:
            worse, change = (-metric.low, "a drop") if judged.metric.higher else (metric.high, "a rise")
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
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _pairs(
    ours: dict[int, Metrics], theirs: dict[int, Metrics], value_of: Callable[[Metrics], float | None]
) -> list[tuple[float, float]]:
    """A value of both, paired by seed or fold: the effect of it is the same in both."""
    values = [(value_of(ours[each]), value_of(theirs[each])) for each in ours if each in theirs]
    return [(one, other) for one, other in values if one is not None and other is not None]


def values_of(rows: Sequence[Metrics], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


DIVERGED, FEWEST_BATCHES = 1.2, 3
"""A run diverged if the mean of its last losses exceeds this multiple of that of the first, and their noise; of so many
batches at least, and of a quarter of those that were reported."""
PAIRED_BY = ("SEED", "DATA.FOLD")
PLACES = ("SAVE", "TAG", "DATA.CACHE")
"""Settings that do not make another contender of a run, beside those of one start."""
VALIDATION = (
    *("DATA.DATASET", "DATA.DATA_PATH", "DATA.VAL_FRACTION", "DATA.SPLIT_SEED"),
    *("DATA.GROUP", "DATA.COLUMNS", "DATA.EXCLUDE", "DATA.KEEP_TEST"),
)
HIDDEN = ("MODEL.MASK_RATIO", "MODEL.PATCH_SIZE", "DATA.IMAGE_SIZE")
"""They choose the patches that a run without labels hides, and is validated on."""
MOST_NAMED = 3
"""Contenders that differ in more settings are called by a run's folder."""


def validation_keys(config: Config) -> tuple[str, ...]:
    """Settings that may choose what a run is validated on."""
    return VALIDATION + HIDDEN if config.task == NO_LABELS else VALIDATION


def is_finished(folder: Path) -> bool:
    return is_end(last_line(folder))


def metrics_of(folder: Path) -> Metrics:
    """Metrics of a finished run, as compare.json holds them."""
    about, config, history = read_about(folder), config_of_run(folder), History.of_run(folder)
    speed, speeds = history.images_per_second, history.speeds
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    root = folder / CHECKPOINTS
    # A run that went on with another number of processes accumulates otherwise than its config.yaml says.
    if saved := unchecked_meta(root / (read_index(root)["last"] or "none")).get("batch"):
        batch = saved["per_process"] * saved["accumulated"] * saved["processes"]
    return {
        "precision": about["choices"]["precision"],
        "global_batch": batch,
        "images_per_second": speed,
        "images_per_second_quartiles": statistics.quantiles(speeds, n=4)[::2] if len(speeds) > 3 else None,
        "seconds_per_update": batch / speed if speed else None,
        "seconds_per_epoch": history.seconds_per_epoch,
        "start_up_counted": history.speed_includes_start,
        "peak_memory_gb": history.peak_memory_gb,
        "updates": max((line["update"] for line in history.lines), default=0),
        "skipped": history.skipped,
        "diverged": _diverged(history, config, about.get("largest_class_percent")),
        **{
            f"last_{which.prefix}{metric.name}": value
            for metric in history.metrics
            for which, value in {PLAIN: None, **history.last(metric)}.items()
        },
        **{f"best_{metric.name}": best.value for metric in history.metrics if (best := history.best(metric))},
        "seconds": history.seconds,
        "starts": sum(map(is_start, history.lines)),
        "validation_images": about.get("samples", {}).get("val"),
        **({"grouped": True} if config.DATA.GROUP is not None else {}),
        "largest_class_percent": about.get("largest_class_percent"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(history: History, config: Config, largest_class: float | None) -> bool:
    """Whether the loss ended as NaN, or its mean over several batches rose by more than their noise.

    Not of a run whose metric did not fall and is above guessing: from a probe, augmentation alone raises the loss.
    """
    losses = [line["loss"] for line in history.of("train")]
    if losses and losses[-1] is None:
        return True
    by = metric_named(config.SAVE_BEST_BY)
    guess = 100 / max(config.MODEL.NUM_CLASSES or 1, 1) if by is BALANCED else largest_class or 0.0
    values = [value for line in history.of("val") if (value := line.get(by.name)) is not None]
    if len(values) > 1 and by.percent and values[-1] >= values[0] and values[-1] > guess:
        return False
    logs = [math.log(loss) for loss in losses if loss is not None and loss > 0] or [0.0]
    few = max(FEWEST_BATCHES, len(logs) // 4)
    # How far each is from the middle of its neighbours: a trend is no noise, nor is a jump at the end.
    steady = logs[:-few] if len(logs) > 2 * few - 1 else logs
    apart = [abs(one - (left + right) / 2) for left, one, right in zip(steady, steady[1:], steady[2:], strict=False)]
    # Of the difference of two means.
    noise = min(3 * statistics.fmean(apart or [0.0]) * math.sqrt(2 / few), math.log(3))
    return statistics.fmean(logs[-few:]) - statistics.fmean(logs[:few]) > max(math.log(DIVERGED), noise)


class Finished(NamedTuple):
    folder: Path
    config: Config
    metrics: Metrics


def verdict_of(folders: Sequence[Path]) -> list[str]:
    """Sentences about these runs, the first of which is the baseline; none about a single run.

    By the task's metric, and by those of SAVE_BEST_BY. Of three or more contenders, the first compares the best two.
    """
    if len(folders) < 2:
        return []
    found = contenders_of(folders)
    if isinstance(found, str):
        return [f"No verdict: {found}"]
    runs, names, judged, of = found
    lines = _verdict_by(runs, names, judged)
    said = {"images_per_second": None, "peak_memory_gb": None, "device": ""}
    runs = {name: {at: row | said for at, row in rows.items()} for name, rows in runs.items()}
    for metric in dict.fromkeys(metric_named(config_of_run(folder).SAVE_BEST_BY) for folder in of):
        own = replace(judged, metric=metric)
        if metric != judged.metric and all(own.of(row) is not None for rows in runs.values() for row in rows.values()):
            lines += _verdict_by(runs, names, own)
    return lines


def _verdict_by(runs: ByName, names: Sequence[str], judged: Judged) -> list[str]:
    images = images_of(runs, judged)
    base, *others = names
    best = best_two(runs, names, judged) if len(others) > 1 else []
    if all(len(of_one) == 1 for of_one in runs.values()):
        pairs = [(name, base) for name in others]
        first = [] if len(best) < 2 or base in best else [(best[0], best[1])]
        pairs = sorted([*first, *pairs], key=lambda pair: set(pair) != set(best))
        return [_one_run_each(name, against, runs, judged, math.comb(len(names), 2), images) for name, against in pairs]
    verdicts = judge(runs, names, judged, True, images)
    return in_words(sorted(verdicts, key=lambda each: {each["mode"], each["against"]} != set(best)))


class Contenders(NamedTuple):
    runs: ByName
    names: list[str]
    """The baseline first"""
    judged: Judged
    of: dict[Path, str]
    """Folder of a run -> its contender"""

    def values(self) -> dict[str, dict[int, float]]:
        """Of the metric that decides: of each contender by seed or fold, where they are known."""
        found = dict[str, dict[int, float]]()
        for name in self.names:
            values = {number: self.judged.of(row) for number, row in self.runs.get(name, {}).items()}
            if known := {number: value for number, value in values.items() if value is not None}:
                found[name] = known
        return found


def contenders_of(folders: Sequence[Path]) -> Contenders | str:
    """Finished runs by their settings, seeds and folds aside; or why they cannot be compared."""
    try:
        runs = [Finished(each, config_of_run(each), metrics_of(each)) for each in folders if is_finished(each)]
        if len(runs) < 2:
            return "fewer than two of these runs are finished."
        judged = judged_by(None, None, [run.config for run in runs])
    except UserError as error:
        return str(error)
    names = _names(runs)
    if len(set(names)) == 1:
        return "these runs have the same settings but for the seed or fold."
    if problem := _not_comparable(runs):
        return problem
    rows, of = list[Metrics](), dict[tuple[str, int], Path]()
    for name, run in zip(names, runs, strict=True):
        fold = {} if run.config.DATA.FOLD is None else {"fold": str(run.config.DATA.FOLD)}
        rows.append({"mode": name, "seed": run.config.SEED, **fold, "folder": f"{run.folder}", **run.metrics})
        other = of.setdefault((name, number_of(rows[-1])), run.folder)
        if other is not run.folder:
            return f"{other} and {run.folder} have the same settings, and the same {unit(rows[-1:])}."
    return Contenders(by_name(rows), list(dict.fromkeys(names)), judged, {of[key]: key[0] for key in of})


def _names(runs: Sequence[Finished]) -> list[str]:
    """The settings in which each run differs from others, without seed and fold; runs with equal names are paired."""
    varied = _varied(runs)
    contenders = list(zip(*varied.values(), strict=True)) or [()] * len(runs)
    if varied and all(key.startswith("AMP.") for key in varied):
        precisions = [run.metrics["precision"] for run in runs]
        if len(set(precisions)) == len(set(contenders)):
            return precisions
    if len(varied) <= MOST_NAMED:
        tails = [key.rpartition(".")[2] for key in varied]
        return [", ".join(f"{tail}={text}" for tail, text in zip(tails, each, strict=True)) for each in contenders]
    first = {each: run.folder for each, run in zip(reversed(contenders), reversed(runs), strict=True)}
    unique = len({folder.name for folder in first.values()}) == len(first)
    return [first[each].name if unique else str(first[each]) for each in contenders]


def _varied(runs: Sequence[Finished]) -> dict[str, list[str]]:
    """Settings that differ, with the text of each run."""
    keys = [key for key in settings() if key not in (*OF_ONE_START, *PAIRED_BY, *PLACES)]
    texts = {key: [one_line(value_of(run.config, key)) for run in runs] for key in keys}
    # The batch is per process, so the same settings on more processes train otherwise.
    own = [run.config.DATA.BATCH_SIZE * run.config.TRAIN.ACCUM_ITER for run in runs]
    texts["processes"] = [str(run.metrics["global_batch"] // size) for run, size in zip(runs, own, strict=True)]
    return {key: of_runs for key, of_runs in texts.items() if len(set(of_runs)) > 1}


def _not_comparable(runs: Sequence[Finished]) -> str:
    if len({run.config.DATA.fold and run.config.DATA.fold.folds for run in runs}) > 1:
        return "they are on different numbers of folds (DATA.FOLD), and so on different images."
    keys = validation_keys(runs[0].config)
    different = [key for key in keys if len({one_line(value_of(run.config, key)) for run in runs}) > 1]
    if len(validated_on := {_names_and_labels(run.folder) for run in runs}) == 1 and None not in validated_on:
        different = [key for key in different if key in ("DATA.DATASET", "DATA.DATA_PATH", *HIDDEN)]
    by_fold: dict[object, set[object]] = {}
    for run in runs:
        by_fold.setdefault(run.config.DATA.FOLD, set()).add(run.metrics["validation_images"])
    if different or any(len(images) > 1 for images in by_fold.values()):
        what = "patches" if {*different} & {*HIDDEN} else "images"
        return f"the runs may validate on different {what} ({', '.join(different) or 'their number differs'})."
    return ""


def _names_and_labels(folder: Path) -> str | None:
    """A hash of those of the validation images, of its last checkpoint."""
    root = folder / CHECKPOINTS
    return unchecked_meta(root / (read_index(root)["last"] or "none")).get("val_data")


def _one_run_each(
    name: str, against: str, runs: ByName, judged: Judged, comparisons: int, images_of_runs: Images
) -> str:
    """What one run each can tell: whether the images alone could explain the difference, the largest of many pairs."""
    rows = [next(iter(runs[which].values())) for which in (name, against)]
    # Runs of two seeds are paired by image, too.
    of_first = {(who, 0): images_of_runs.get((who, next(iter(runs[who])))) for who in (name, against)}
    paired = paired_images(of_first, name, against, [0])
    ours, theirs = map(judged.of, rows)
    images = rows[0]["validation_images"]
    if ours is None or theirs is None:
        return f"{name} against {against}: no verdict, because a run was never validated."
    difference = ours - theirs
    word = "higher" if difference > 0 else "lower"
    how = f"{judged.difference(abs(difference))} {word}" if difference else "equal"
    said = f"{name} against {against}: {judged.words} after the last epoch{judged.whose} {how}, with "
    said += "one seed each" if number_of(rows[0]) == number_of(rows[1]) else "one run each, of different seeds"
    if paired is not None and judged.metric.percent and not overlap_of(rows):
        found, images = crossed_interval(difference, *paired, comparisons=comparisons), len(paired[0][0])
        low, high = found.low or 0.0, found.high or 0.0
    elif judged.metric.counts_images and images and not rows[0].get("grouped"):
        low, high = chance((ours, theirs), images, comparisons)
    else:
        return f"{said}. That is too few to tell: repeat both with more seeds."
    within = "within chance" if low <= 0 <= high else "more than the choice of images explains"
    return (
        f"{said}. On {images:,} images{'' if paired is None else ', paired,'} this is {within}: 95 % interval"
        f"{f' for all {comparisons} pairs' if comparisons > 1 else ''} {low:+.1f} to {high:+.1f} points. "
        "Whether another seed would give the same, only more seeds can tell."
    )


def chance(percents: tuple[float, float], images: int, comparisons: int = 1) -> tuple[float, float]:
    """As if the images of the two were different ones, which makes the interval wider than that of the same images."""
    z = statistics.NormalDist().inv_cdf(bonferroni_level(comparisons))
    return newcombe(percents, (images, images), z)
