"""What the figures of a comparison say, and what they do not: differences with intervals, and a sentence a mode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Figures = dict[str, Any]
ByMode = dict[str, dict[int, Figures]]
"""Mode -> seed -> the figures of a run that has ended."""

SURE = 0.95
LEAST_MEMORY = 0.01
"""A smaller difference in memory is not worth a word."""
MANY_SKIPPED = 0.05


@dataclass(frozen=True)
class Difference:
    """Of one mode to another, run by run with the same seed."""

    value: float
    low: float | None
    high: float | None
    """What it lies between with 95 %, for all comparisons of a page together; None with a single seed."""
    runs: int
    """Pairs of runs that it is made of."""
    seen: bool = False
    """Whether it is more than chance would bring."""


def by_mode(rows: Iterable[Figures]) -> ByMode:
    found: ByMode = {}
    for row in rows:
        found.setdefault(row["mode"], {})[row["seed"]] = row
    return found


def between(values: Sequence[float], comparisons: int, grain: float = 0.0) -> Difference:
    """Student's interval of their mean; `grain`: the step in which they are measured, which no luck makes vanish."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, None, None, len(values))
    from scipy import stats  # a second to import

    # The difference of two figures that are rounded to the grain is off by that much.
    spread = math.hypot(statistics.stdev(values), grain / math.sqrt(6))
    reach = float(stats.t.ppf(1 - (1 - SURE) / comparisons / 2, len(values) - 1)) * spread / math.sqrt(len(values))
    low, high = mean - reach, mean + reach
    return Difference(mean, low, high, len(values), seen=not low <= 0 <= high)


def wander(rows: Sequence[Figures], key: str) -> float:
    """How much a figure differed between runs of the same mode: the greatest over the least."""
    values = values_of(rows, key)
    return max(values) / min(values) if values else 1.0


def times_as_fast(mode: dict[int, Figures], base: dict[int, Figures], comparisons: int) -> Difference | None:
    """Seen where the interval leaves out 1, and it is more than runs of the same mode differ by."""
    pairs = _pairs(mode, base, "images_per_second")
    if not pairs:
        return None
    found = between([math.log(one / other) for one, other in pairs], comparisons)
    noise = max(wander(list(rows.values()), "images_per_second") for rows in (mode, base))
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    seen = found.seen and math.exp(abs(found.value)) > noise
    return Difference(math.exp(found.value), low, high, found.runs, seen)


def times_the_memory(mode: dict[int, Figures], base: dict[int, Figures]) -> Difference | None:
    """By the middle runs; seen where no run of the one mode took as much as any of the other."""
    ours, theirs = (values_of(list(rows.values()), "peak_memory_gb") for rows in (mode, base))
    if not ours or not theirs:
        return None
    ratio = statistics.median(ours) / statistics.median(theirs)
    apart = max(ours) < min(theirs) or min(ours) > max(theirs)
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    return Difference(ratio, low, high, min(len(ours), len(theirs)), apart and abs(ratio - 1) >= LEAST_MEMORY)


def points_of_accuracy(mode: dict[int, Figures], base: dict[int, Figures], comparisons: int) -> Difference | None:
    pairs = _pairs(mode, base, "last_acc1")
    if not pairs:
        return None
    images = next((row["validation_images"] for row in mode.values() if row.get("validation_images")), None)
    return between([one - other for one, other in pairs], comparisons, 100 / images if images else 0.0)


def judge(found: ByMode, modes: Sequence[str]) -> list[dict[str, Any]]:
    """Each mode against the first: the differences, and the sentence."""
    base, *others = modes
    judged = []
    for mode in others:
        ours, theirs = found.get(mode, {}), found.get(base, {})
        speed = times_as_fast(ours, theirs, len(others))
        memory = times_the_memory(ours, theirs)
        accuracy = points_of_accuracy(ours, theirs, len(others))
        parts = [_speed_words(speed), _memory_words(memory, ours), _accuracy_words(accuracy, ours, theirs)]
        text = (
            f"{mode}: {', '.join(part for part in parts if part)}"
            if accuracy or speed
            else f"{mode}: no verdict, for want of runs"
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
                "details": _details(speed, accuracy),
            }
        )
    return judged


def troubles(found: ByMode, failed: dict[str, list[str]], modes: Sequence[str]) -> list[str]:
    """What went wrong with a mode, or may have: it failed, its loss rose, it skipped many updates."""
    told = []
    for mode in modes:
        rows = found.get(mode, {})
        count = len(rows) + len(failed.get(mode, ()))
        if failed.get(mode):
            told.append(f"{mode}: {len(failed[mode])} of {count} runs failed: {failed[mode][0]}")
        if diverged := [seed for seed, row in rows.items() if row["diverged"]]:
            told.append(f"{mode}: diverged with {_seeds(diverged)}: the loss ended above where it began")
        for seed, row in rows.items():
            share = row["skipped"] / max(row["updates"], 1)
            if share > MANY_SKIPPED:
                told.append(
                    f"{mode}: with seed {seed} {row['skipped']} of {row['updates']} updates were skipped "
                    f"({100 * share:.0f} %); docs/amp.md says what to do"
                )
    return told


def _speed_words(speed: Difference | None) -> str:
    if speed is None:
        return ""
    if speed.low is None:
        return f"{_times(speed.value)} in one run each"
    return _times(speed.value) if speed.seen else f"no difference in speed seen ({speed.value:.2f}x)"


def _times(ratio: float) -> str:
    shown = ratio if ratio >= 1 else 1 / ratio
    return f"{shown:.{2 if shown < 1.5 else 1}f}x {'faster' if ratio >= 1 else 'slower'}"


def _memory_words(memory: Difference | None, rows: dict[int, Figures]) -> str:
    if memory is None:
        return ""
    if not memory.seen:
        return "as much memory"
    share = 100 * abs(1 - memory.value)
    what = "memory of the process" if any(row["device"].startswith("cpu") for row in rows.values()) else "memory"
    return f"{share:.0f} % {'less' if memory.value < 1 else 'more'} {what}"


def _accuracy_words(accuracy: Difference | None, mode: dict[int, Figures], base: dict[int, Figures]) -> str:
    if accuracy is None:
        return ""
    ours, theirs = (spread(values_of(list(rows.values()), "last_acc1")) for rows in (mode, base))
    text = f"accuracy {ours} against {theirs}: "
    if accuracy.low is None:
        return text + "one seed is no ground for a claim"
    if not accuracy.seen:
        return text + "no difference seen"
    return text + f"{abs(accuracy.value):.2f} points {'higher' if accuracy.value > 0 else 'lower'}"


def _details(speed: Difference | None, accuracy: Difference | None) -> str:
    """The small print: how sure the sentence is, and what it could have missed."""
    told = []
    if accuracy is not None and accuracy.low is not None and accuracy.high is not None:
        told.append(
            f"the difference in accuracy lies between {accuracy.low:+.2f} and {accuracy.high:+.2f} points "
            f"(95 %, {accuracy.runs} seeds)"
        )
        if not accuracy.seen:
            told.append(f"a loss of up to {max(0.0, -accuracy.low):.2f} points could have gone unseen")
    if speed is not None and speed.low is not None and speed.high is not None:
        told.append(f"the speed between {speed.low:.2f}x and {speed.high:.2f}x")
    return "; ".join(told)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`97.8 ± 0.3`: mean and standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _pairs(mode: dict[int, Figures], base: dict[int, Figures], key: str) -> list[tuple[float, float]]:
    """The figure of both, seed by seed: what a seed does to a run, it does to both."""
    seeds = [seed for seed in mode if seed in base and mode[seed][key] is not None and base[seed][key] is not None]
    return [(mode[seed][key], base[seed][key]) for seed in seeds]


def values_of(rows: Sequence[Figures], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
