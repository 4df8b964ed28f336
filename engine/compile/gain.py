"""Estimate whether compiling is worthwhile on a GPU: time saved in the remaining updates against compile time.

Both are estimates close to measurements on an H200 (docs/benchmarks.md), so the gain must exceed the cost by far.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.text import counted

SECONDS_TO_COMPILE = 60.0
"""Measured: 20 to 35, on an H200 with 16 CPU cores."""
FRACTION_SAVED = 0.2
"""Measured: 0.24 of an update's time for ViT-S/16, 0.18 for B, 0.14 for L."""
SAVED_PER_MICRO_BATCH = 0.002
"""Least number of seconds saved, even with small models: kernels are no longer launched one by one."""
FLOPS_PER_SECOND = {False: 4e13, True: 2e14}
"""Speed of training on a large GPU, in fp32 and in half precision."""
REQUIRED_RATIO = 2.0
"""Time saved divided by compile time, above which `auto` compiles."""


@dataclass(frozen=True)
class Gain:
    updates: int
    seconds: float

    @property
    def is_worthwhile(self) -> bool:
        return self.seconds > REQUIRED_RATIO * SECONDS_TO_COMPILE

    def words(self) -> str:
        verdict = "more" if self.is_worthwhile else "no more"
        return (
            f"about {self.seconds:,.0f} s saved in {counted(self.updates, 'update')}, {verdict} than "
            f"{REQUIRED_RATIO:g} times the {SECONDS_TO_COMPILE:.0f} s of compiling"
        )


def estimate_gain(flops: float | None, samples: int, accumulated: int, updates: int, half: bool) -> Gain:
    """Time saved by compiling.

    `flops`: per image in training; None if unknown. `samples`: images per micro-batch. `accumulated`: micro-batches
    per update. `half`: whether the run computes in half precision.
    """
    seconds = (flops or 0.0) * samples / FLOPS_PER_SECOND[half]
    return Gain(updates, max(FRACTION_SAVED * seconds, SAVED_PER_MICRO_BATCH) * accumulated * updates)
