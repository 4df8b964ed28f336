"""What the measurements say: differences to fp32, whether they matter, and what to use."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.choose_precision.measure import Measured

SMOOTHED_OVER = 20
"""Loss curves are compared after a moving mean over a twentieth of them: single batches say little."""
MOST_SKIPPED = 0.05
SKIPS_TO_FIND_THE_SCALE = 10
"""The first updates of fp16 are often skipped until the loss scale fits."""
ALIKE = 0.97
"""As fast as the fastest, for all that can be measured."""
FASTER, SMALLER = 1.05, 0.90
"""What a precision must gain in speed, or take of the memory, to be worth its flag."""


def smooth(values: list[float], window: int) -> list[float]:
    """Moving mean; as many values fewer as the window is longer than one."""
    return [math.fsum(values[at : at + window]) / window for at in range(len(values) - window + 1)]


def smooth_alike(curves: list[list[float]]) -> list[list[float]]:
    """Loss curves over the updates that all of them have, smoothed."""
    length = min(map(len, curves))
    window = max(1, length // SMOOTHED_OVER)
    return [smooth(curve[:length], window) for curve in curves]


def largest_difference(first: list[float], second: list[float]) -> float:
    """Of two smoothed loss curves; infinite where one is not a number."""
    return _greatest(abs(a - b) for a, b in zip(*smooth_alike([first, second]), strict=True))


def _greatest(values: Iterable[float]) -> float:
    return max((value if math.isfinite(value) else math.inf for value in values), default=math.inf)


@dataclass(frozen=True)
class Baseline:
    """fp32 from three seeds: how fast it is, how far that varies, and what in a loss curve is chance."""

    runs: tuple[Measured, Measured, Measured]

    @property
    def losses(self) -> list[float]:
        """Of the user's own seed, which the other precisions are measured with."""
        return self.runs[0].losses

    @property
    def images_per_second(self) -> float:
        return statistics.median(self._speeds())

    @property
    def speed_noise(self) -> float:
        """By how much equal work differed in speed: 0.1 is 10 %."""
        return max(self._speeds()) / min(self._speeds()) - 1

    @property
    def peak_memory_gb(self) -> float:
        return self.runs[0].peak_memory_gb

    def seed_noise(self, updates: int) -> float:
        """The largest difference of two seeds' loss curves over this many updates."""
        curves = [run.losses[:updates] for run in self.runs]
        return max(largest_difference(*pair) for pair in itertools.combinations(curves, 2))

    def excess(self, losses: list[float]) -> float:
        """How far a loss curve rises above all three seeds' at most; below 0 where it never does.

        A single seed's curve is no yardstick of harm: small differences grow until two curves are as far apart as two
        seeds', in either direction.
        """
        curve, *seeds = smooth_alike([losses, *(run.losses for run in self.runs)])
        return _greatest(value - max(others) for value, *others in zip(curve, *seeds, strict=True))

    def _speeds(self) -> list[float]:
        return [run.images_per_second for run in self.runs]


@dataclass(frozen=True)
class Finding:
    """One mode against fp32."""

    name: str
    flags: str
    measured: Measured
    speed: float | None
    """Times fp32's; None where it would mislead, or where there is no fp32 to compare with."""
    memory: float | None
    """The share of fp32's peak."""
    difference: float | None
    noise: float | None
    """What two fp32 seeds differ by over the same updates."""
    excess: float | None
    """By how much it is worse than all of them."""
    against: list[str] = field(default_factory=list)
    """Why it is not recommended, whatever its speed."""


def judge(name: str, flags: str, measured: Measured, base: Baseline | None, updates: int, slow: str = "") -> Finding:
    """`slow`: why its speed must not count in its favour."""
    against = [slow] if slow else []
    if measured.failed:
        return Finding(name, flags, measured, None, None, None, None, None, [measured.failed])
    done = len(measured.losses)
    if measured.bad_update is not None:
        against.append(f"the gradients stopped being numbers at update {measured.bad_update}")
    if measured.skipped > max(SKIPS_TO_FIND_THE_SCALE, MOST_SKIPPED * done):
        against.append(f"{measured.skipped} of {done} updates were skipped")
    if base is None:
        return Finding(name, flags, measured, None, None, None, None, None, against)
    difference, noise = largest_difference(base.losses, measured.losses), base.seed_noise(done)
    excess = base.excess(measured.losses)
    if excess > noise:
        against.append(f"its loss is up to {excess:.2g} above all fp32 seeds', which differ by {noise:.2g} themselves")
    if 2 * done < min(updates, len(base.losses)):
        against.append(f"only {done} updates were made")
    speed = None if slow else measured.images_per_second / base.images_per_second
    memory = measured.peak_memory_gb / base.peak_memory_gb
    return Finding(name, flags, measured, speed, memory, difference, noise, excess, against)


@dataclass(frozen=True)
class Recommendation:
    mode: str
    flags: str
    sentence: str


def recommend(findings: list[Finding], base: Baseline | None, fp32_flags: str) -> Recommendation:
    """The findings come in the order of preference between equally fast ones."""
    sound = [f for f in findings if not f.against]
    if base is None:
        return _without_fp32(sound, fp32_flags)
    noisy = 1 + base.speed_noise
    fast = [f for f in sound if f.speed and f.speed > max(FASTER, noisy)]
    if fast:
        enough = ALIKE * max(f.speed or 0 for f in fast)
        chosen = next(f for f in fast if (f.speed or 0) >= enough)
        return Recommendation(chosen.name, chosen.flags, f"{chosen.flags}: {_gains(chosen)}; {_harmless(chosen)}.")
    small = [f for f in sound if f.memory and f.memory <= SMALLER and f.speed and f.speed * noisy >= 1]
    if small:
        chosen = min(small, key=lambda f: f.memory or 1)
        return Recommendation(
            chosen.name, chosen.flags, f"{chosen.flags}: no faster, but {_memory(chosen)}; {_harmless(chosen)}."
        )
    why = f"equal runs differed by {100 * base.speed_noise:.0f} % in speed" if base.speed_noise > 0.02 else ""
    nothing = "nothing that trained as well as fp32 was faster, or took less memory, by more than chance"
    return Recommendation("fp32", fp32_flags, f"{fp32_flags}: {nothing}{f' ({why})' * bool(why)}.")


def _without_fp32(sound: list[Finding], fp32_flags: str) -> Recommendation:
    if not sound:
        return Recommendation(
            "fp32", fp32_flags, "No precision trained soundly; a smaller -batch_size would let fp32 run."
        )
    chosen = max(sound, key=lambda f: f.measured.images_per_second)
    return Recommendation(
        chosen.name,
        chosen.flags,
        f"{chosen.flags}: it runs where fp32 did not; a smaller -batch_size would let its loss be compared to fp32's.",
    )


def _gains(finding: Finding) -> str:
    return f"{finding.speed:.2g}x faster, {_memory(finding)}"


def _memory(finding: Finding) -> str:
    percent = round(100 * ((finding.memory or 1) - 1))
    if abs(percent) < 2:
        return "the same memory"
    return f"{abs(percent)} % {'less' if percent < 0 else 'more'} memory"


def _harmless(finding: Finding) -> str:
    difference, noise = f"{finding.difference:.2g}", f"{finding.noise:.2g}"
    text = f"its loss curve differs from fp32's by at most {difference}, two fp32 seeds differ by {noise}"
    if (finding.difference or 0) <= (finding.noise or 0):
        return text
    worse = f"is never more than {finding.excess:.2g} above" if (finding.excess or 0) > 0 else "is never above"
    return f"{text}, and {worse} all of theirs"
