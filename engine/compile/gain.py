"""Whether compiling repays on a GPU: what it saves in the updates that are left, against what it takes.

Both by rule of thumb, near to what an H200 gave (docs/benchmarks.md), so it must repay by far.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_TO_COMPILE = 60.0
"""20 to 35 on the host of an H200, with 16 cores."""
SHARE_SAVED = 0.2
"""0.24 of ViT-S/16, 0.18 of B, 0.14 of L."""
SAVED_PER_MICRO_BATCH = 0.002
"""Seconds, however small the model: of starting its kernels one by one."""
OPERATIONS_A_SECOND = {False: 4e13, True: 2e14}
"""What training reaches on a large GPU: in fp32, in half precision."""
TIMES_TO_REPAY = 2.0


@dataclass(frozen=True)
class Gain:
    updates: int
    seconds: float

    @property
    def pays(self) -> bool:
        return self.seconds > TIMES_TO_REPAY * SECONDS_TO_COMPILE

    def words(self) -> str:
        against = "against" if self.pays else "too little against"
        return (
            f"about {self.seconds:,.0f} s saved in {self.updates:,} updates, {against} {SECONDS_TO_COMPILE:.0f} s of it"
        )


def gain(flops: float | None, samples: int, accumulated: int, updates: int, half: bool) -> Gain:
    """`flops`: of one image in training; None where they could not be counted. `samples`: of one micro-batch."""
    computing = (flops or 0.0) * samples / OPERATIONS_A_SECOND[half]
    return Gain(updates, max(SHARE_SAVED * computing, SAVED_PER_MICRO_BATCH) * accumulated * updates)
