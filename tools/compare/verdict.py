"""Verdict of a comparison: differences with confidence intervals, and one sentence per mode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.compare.metrics import LAST, Metrics

ByMode = dict[str, dict[int, Metrics]]
"""Mode -> seed, or fold of a cross-validation -> metrics of a finished run."""

CONFIDENCE = 0.95
LEAST_MEMORY = 0.01
"""Smaller differences in memory are not reported."""
MANY_SKIPPED = 0.05


@dataclass(frozen=True)
class Difference:
    """Difference of a mode from the baseline, over pairs of runs with the same seed or fold."""

    value: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval, corrected for the number of modes compared; None with a single pair."""
    runs: int
    """Number of pairs."""
    seen: bool = False
    """Whether it is larger than the noise."""


def by_mode(rows: Iterable[Metrics]) -> ByMode:
    runs: ByMode = {}
    for row in rows:
        runs.setdefault(row["mode"], {})[number_of(row)] = row
    return runs


def number_of(row: Metrics) -> int:
    """Fold of a run of a cross-validation, else its seed."""
    return int(row["fold"].partition("/")[0]) if "fold" in row else row["seed"]


def unit(rows: Iterable[Metrics]) -> str:
    """By what runs are paired, as a word."""
    return "fold" if any("fold" in row for row in rows) else "seed"


def _overlap(rows: Iterable[Metrics]) -> float:
    """Validation images per training image in a cross-validation; 0 without."""
    return next((1 / (int(row["fold"].partition("/")[2]) - 1) for row in rows if "fold" in row), 0.0)


def interval(values: Sequence[float], comparisons: int, grain: float = 0.0, overlap: float = 0.0) -> Difference:
    """Student's interval of the mean of `values`. `grain`: the resolution of the metric, a lower bound of the noise.

    `overlap`: validation images per training image of folds. Folds share most of their training images, so their
    values vary too little; Nadeau and Bengio (2003) correct for that by adding this ratio to the variance of the mean.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, None, None, len(values))
    from scipy import stats  # a second to import

    # Standard deviation of the difference of two values rounded to the grain.
    spread = math.hypot(statistics.stdev(values), grain / math.sqrt(6))
    quantile = float(stats.t.ppf(1 - (1 - CONFIDENCE) / comparisons / 2, len(values) - 1))
    reach = quantile * spread * math.sqrt(1 / len(values) + overlap)
    low, high = mean - reach, mean + reach
    return Difference(mean, low, high, len(values), seen=not low <= 0 <= high)


def variation(rows: Sequence[Metrics], key: str) -> float:
    """Largest over smallest value of a metric among runs of the same mode."""
    values = values_of(rows, key)
    return max(values) / min(values) if values else 1.0


def times_as_fast(mode: dict[int, Metrics], base: dict[int, Metrics], comparisons: int) -> Difference | None:
    """Ratio of speeds. It is seen if the interval excludes 1 and it exceeds the variation between equal runs."""
    pairs = _pairs(mode, base, "images_per_second")
    if not pairs:
        return None
    difference = interval([math.log(one / other) for one, other in pairs], comparisons)
    noise = max(variation(list(rows.values()), "images_per_second") for rows in (mode, base))
    low, high = (None if end is None else math.exp(end) for end in (difference.low, difference.high))
    seen = difference.seen and math.exp(abs(difference.value)) > noise
    return Difference(math.exp(difference.value), low, high, difference.runs, seen)


def times_the_memory(mode: dict[int, Metrics], base: dict[int, Metrics]) -> Difference | None:
    """Ratio of the median peak memories. It is seen if the ranges of the two modes do not overlap."""
    ours, theirs = (values_of(list(rows.values()), "peak_memory_gb") for rows in (mode, base))
    if not ours or not theirs:
        return None
    ratio = statistics.median(ours) / statistics.median(theirs)
    apart = max(ours) < min(theirs) or min(ours) > max(theirs)
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    return Difference(ratio, low, high, min(len(ours), len(theirs)), apart and abs(ratio - 1) >= LEAST_MEMORY)


def points_of_accuracy(mode: dict[int, Metrics], base: dict[int, Metrics], comparisons: int) -> Difference | None:
    """Difference in accuracy after the last epoch, in percentage points."""
    pairs = _pairs(mode, base, LAST)
    if not pairs:
        return None
    images = next((row["validation_images"] for row in mode.values() if row.get("validation_images")), None)
    grain = 100 / images if images else 0.0
    return interval([one - other for one, other in pairs], comparisons, grain, _overlap(mode.values()))


def judge(runs: ByMode, modes: Sequence[str]) -> list[dict[str, Any]]:
    """Compare each mode with the first one."""
    base, *others = modes
    judged = []
    for mode in others:
        ours, theirs = runs.get(mode, {}), runs.get(base, {})
        speed = times_as_fast(ours, theirs, len(others))
        memory = times_the_memory(ours, theirs)
        accuracy = points_of_accuracy(ours, theirs, len(others))
        parts = [_speed_words(speed), _memory_words(memory, ours), _accuracy_words(accuracy, ours, theirs)]
        text = (
            f"{mode}: {', '.join(part for part in parts if part)}"
            if accuracy or speed
            else f"{mode}: no verdict, because {mode} and {base} have no finished run with the same seed or fold"
        )
        judged.append(
            {
                "mode": mode,
                "against": base,
                **{
                    key: None if each is None else asdict(each)
                    for key, each in (("speed", speed), ("memory", memory), ("accuracy", accuracy))
                },
                "text": text,
                "details": _details(speed, accuracy, unit(ours.values())),
            }
        )
    return judged


def troubles(runs: ByMode, failed: dict[str, list[str]], modes: Sequence[str]) -> list[str]:
    """Problems of the modes: failed runs, diverged losses, many skipped updates."""
    problems = []
    for mode in modes:
        rows = runs.get(mode, {})
        count = len(rows) + len(failed.get(mode, ()))
        if failed.get(mode):
            problems.append(f"{mode}: {len(failed[mode])} of {count} runs failed: {failed[mode][0]}")
        by = unit(rows.values())
        if diverged := [number for number, row in rows.items() if row["diverged"]]:
            which = f"{by}{'s' * (len(diverged) > 1)} {', '.join(map(str, diverged))}"
            problems.append(f"{mode}: diverged with {which}: the loss ended as NaN or well above its start")
        for number, row in rows.items():
            fraction = row["skipped"] / max(row["updates"], 1)
            if fraction > MANY_SKIPPED:
                problems.append(
                    f"{mode}: with {by} {number}, {row['skipped']} of {row['updates']} updates were skipped "
                    f"({100 * fraction:.0f} %); docs/amp.md says what to do"
                )
    return problems


def _speed_words(speed: Difference | None) -> str:
    if speed is None:
        return ""
    if speed.low is None:
        return f"{_times(speed.value)} in one run each"
    return _times(speed.value) if speed.seen else f"speed within noise ({speed.value:.2f}x)"


def _times(ratio: float) -> str:
    shown = ratio if ratio >= 1 else 1 / ratio
    return f"{shown:.{2 if shown < 1.5 else 1}f}x {'faster' if ratio >= 1 else 'slower'}"


def _memory_words(memory: Difference | None, rows: dict[int, Metrics]) -> str:
    if memory is None:
        return ""
    if not memory.seen:
        return "the same memory"
    percent = 100 * abs(1 - memory.value)
    of = "process memory" if any(row["device"].startswith("cpu") for row in rows.values()) else "memory"
    return f"{percent:.0f} % {'less' if memory.value < 1 else 'more'} {of}"


def _accuracy_words(accuracy: Difference | None, mode: dict[int, Metrics], base: dict[int, Metrics]) -> str:
    if accuracy is None:
        return ""
    ours, theirs = (spread(values_of(list(rows.values()), LAST)) for rows in (mode, base))
    text = f"accuracy {ours} against {theirs}: "
    if accuracy.low is None:
        return text + f"one {unit(mode.values())} is too few to compare accuracy"
    if not accuracy.seen:
        return text + "difference within noise"
    return text + f"{abs(accuracy.value):.2f} points {'higher' if accuracy.value > 0 else 'lower'}"


def _details(speed: Difference | None, accuracy: Difference | None, by: str) -> str:
    """Confidence intervals, and the loss of accuracy that these seeds or folds could not have shown."""
    details = []
    if accuracy is not None and accuracy.low is not None and accuracy.high is not None:
        details.append(
            f"difference in accuracy {accuracy.low:+.2f} to {accuracy.high:+.2f} points "
            f"(95 % interval, {accuracy.runs} {by}s)"
        )
        if not accuracy.seen:
            details.append(
                f"a drop in accuracy of up to {max(0.0, -accuracy.low):.2f} points could be hidden in the noise"
            )
    if speed is not None and speed.low is not None and speed.high is not None:
        details.append(f"speed {speed.low:.2f}x to {speed.high:.2f}x")
    return "; ".join(details)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`97.8 ± 0.3`: mean and standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _pairs(mode: dict[int, Metrics], base: dict[int, Metrics], key: str) -> list[tuple[float, float]]:
    """A metric of both modes, paired by seed or fold: the effect of it is the same in both."""
    common = [each for each in mode if each in base and mode[each][key] is not None and base[each][key] is not None]
    return [(mode[each][key], base[each][key]) for each in common]


def values_of(rows: Sequence[Metrics], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]
