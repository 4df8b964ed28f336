"""Verdict: differences from fp32, whether they matter, and the recommended precision."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config import config_of_run
from utils.record.history import History
from utils.record.run_folder import read_about

if TYPE_CHECKING:
    from tools.choose_precision.layers import Layer

SMOOTHED_OVER = 20
"""Loss curves are smoothed by a moving mean over a twentieth of their reports: single batches are noisy."""
MAX_SKIPPED = 0.05
SKIPS_TO_FIND_THE_SCALE = 10
"""fp16 often skips its first updates until the loss scale is small enough."""
ALIKE = 0.97
"""Fraction of the highest speed that counts as equally fast."""
FASTER, SMALLER = 1.05, 0.90
"""Least speed-up, or largest fraction of memory, for a precision to be recommended over fp32."""


@dataclass
class Measured:
    """What a short run showed."""

    losses: list[float] = field(default_factory=list)
    """One per report."""
    images_per_second: float = 0.0
    data_wait_percent: float = 0.0
    peak_memory_gb: float = 0.0
    updates: int = 0
    skipped: int = 0
    scale: float = 1.0
    learning_rate: float = 0.0
    """At the last update."""
    epochs: float = 0.0
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    """Why nothing was measured."""


def measured_of(run: Path) -> Measured:
    """Read a run's metrics."""
    history = History.of_run(run)
    lines = history.of("train")
    if not lines:
        return Measured(failed="not even one update was reported")
    last = lines[-1]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    waits = [line["perf"]["data_wait_percent"] for line in lines[1:] or lines]
    config, samples = config_of_run(run), read_about(run)["samples"]["train"]
    return Measured(
        losses=losses,
        images_per_second=history.images_per_second or 0.0,
        data_wait_percent=statistics.median(waits),
        peak_memory_gb=history.peak_memory_gb or 0.0,
        updates=last["update"],
        skipped=history.skipped,
        scale=last["scale"],
        learning_rate=last["lr"],
        epochs=last["update"] * config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER / samples,
    )


def smooth(values: list[float], window: int) -> list[float]:
    """Moving mean; the result has `window - 1` fewer values."""
    return [math.fsum(values[at : at + window]) / window for at in range(len(values) - window + 1)]


def smooth_together(curves: list[list[float]]) -> list[list[float]]:
    """Loss curves, smoothed over the reports that all of them have."""
    length = min(map(len, curves))
    window = max(1, length // SMOOTHED_OVER)
    return [smooth(curve[:length], window) for curve in curves]


def largest_difference(first: list[float], second: list[float]) -> float:
    """Largest difference of two smoothed loss curves; infinite if one has a NaN."""
    return _greatest(abs(a - b) for a, b in zip(*smooth_together([first, second]), strict=True))


def _greatest(values: Iterable[float]) -> float:
    return max((value if math.isfinite(value) else math.inf for value in values), default=math.inf)


@dataclass(frozen=True)
class Baseline:
    """fp32 with three seeds: its speed and loss curves, and the noise of both."""

    runs: tuple[Measured, Measured, Measured]

    @property
    def losses(self) -> list[float]:
        """With the user's seed, which the other precisions use as well."""
        return self.runs[0].losses

    @property
    def images_per_second(self) -> float:
        return statistics.median(self._speeds())

    @property
    def speed_noise(self) -> float:
        """Variation of the speed between the three runs: 0.1 is 10 %."""
        return max(self._speeds()) / min(self._speeds()) - 1

    @property
    def peak_memory_gb(self) -> float:
        return self.runs[0].peak_memory_gb

    def seed_noise(self, reports: int) -> float:
        """Largest difference between loss curves of two seeds, over this many reports."""
        curves = [run.losses[:reports] for run in self.runs]
        return max(largest_difference(*pair) for pair in itertools.combinations(curves, 2))

    def excess(self, losses: list[float]) -> float:
        """How far a loss curve rises above those of all three seeds; negative if it never does.

        One seed is not enough to compare with: small differences grow until two curves differ as much as those of two
        seeds do, in either direction.
        """
        curve, *seeds = smooth_together([losses, *(run.losses for run in self.runs)])
        return _greatest(value - max(others) for value, *others in zip(curve, *seeds, strict=True))

    def _speeds(self) -> list[float]:
        return [run.images_per_second for run in self.runs]


@dataclass(frozen=True)
class Finding:
    """One mode compared with fp32."""

    name: str
    flags: str
    measured: Measured
    speed: float | None
    """Relative to fp32; None if it is meaningless, or fp32 was not measured."""
    memory: float | None
    """Peak memory relative to fp32."""
    difference: float | None
    """Largest difference from fp32's loss curve."""
    noise: float | None
    """Largest difference between two fp32 seeds over the same updates."""
    excess: float | None
    """How far its loss rises above all fp32 seeds."""
    against: list[str] = field(default_factory=list)
    """Reasons not to recommend it, whatever its speed."""


def judge(name: str, flags: str, measured: Measured, base: Baseline | None, updates: int, slow: str = "") -> Finding:
    """`slow`: why its speed must not count."""
    against = [slow] if slow else []
    if measured.failed:
        return Finding(name, flags, measured, None, None, None, None, None, [measured.failed])
    done = measured.updates
    if measured.skipped > max(SKIPS_TO_FIND_THE_SCALE, MAX_SKIPPED * done):
        against.append(f"{measured.skipped} of {done} updates were skipped")
    if 2 * done < (updates if base is None else min(updates, base.runs[0].updates)):
        against.append(f"only {done} updates were trained")
    if base is None:
        return Finding(name, flags, measured, None, None, None, None, None, against)
    difference, noise = largest_difference(base.losses, measured.losses), base.seed_noise(len(measured.losses))
    excess = base.excess(measured.losses)
    if excess > noise:
        against.append(
            f"its loss is up to {excess:.2g} above all fp32 seeds, which differ by {noise:.2g} among themselves"
        )
    speed = None if slow else measured.images_per_second / base.images_per_second
    memory = measured.peak_memory_gb / base.peak_memory_gb
    return Finding(name, flags, measured, speed, memory, difference, noise, excess, against)


@dataclass(frozen=True)
class Recommendation:
    mode: str
    flags: str
    sentence: str


def recommend(findings: list[Finding], base: Baseline | None, fp32_flags: str) -> Recommendation:
    """`findings`: in order of preference between equally fast modes."""
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
    why = f"the speed of equal runs varied by {100 * base.speed_noise:.0f} %" if base.speed_noise > 0.02 else ""
    nothing = (
        f"of the precisions that trained as well as fp32, none was faster by more than both {100 * (FASTER - 1):.0f} % "
        f"and the noise, and none saved {100 * (1 - SMALLER):.0f} % of memory without being slower"
    )
    return Recommendation("fp32", fp32_flags, f"{fp32_flags}: {nothing}{f' ({why})' * bool(why)}.")


def _without_fp32(sound: list[Finding], fp32_flags: str) -> Recommendation:
    if not sound:
        return Recommendation(
            "fp32",
            fp32_flags,
            "fp32 could not be measured, and every other precision had problems; try a smaller -batch_size, so that "
            "fp32 runs.",
        )
    chosen = max(sound, key=lambda f: f.measured.images_per_second)
    return Recommendation(
        chosen.name,
        chosen.flags,
        f"{chosen.flags}: it ran, but fp32 did not; try a smaller -batch_size to compare its loss with fp32's.",
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
    text = f"its loss differs from fp32's by at most {difference}; two fp32 seeds differ by {noise}"
    if (finding.difference or 0) <= (finding.noise or 0):
        return text
    worse = f"rises at most {finding.excess:.2g} above" if (finding.excess or 0) > 0 else "never rises above"
    return f"{text}; its loss {worse} the highest of the fp32 seeds"
