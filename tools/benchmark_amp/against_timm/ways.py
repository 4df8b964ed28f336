"""The training loops that the table `timm` compares, by name. It imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.config import Config

OURS, TIMM, FUSED, PLAIN = "ours", "timm", "timm, fused", "plain loop"
LOOPS = {"fused": FUSED, "plain": PLAIN, "ours": OURS}
"""Word of -loops -> kind of loop."""
COMPILED = (FUSED, OURS)
"""Kinds that -compile adds in a compiled version."""


@dataclass(frozen=True)
class Way:
    """One loop in one precision."""

    kind: str
    precision: str
    compiled: bool = False
    train_py: Path | None = None
    """timm's train.py, whose own loop is to run."""
    variant: str = ""
    """Settings of -variants, as the user wrote them."""
    settings: Config | None = None
    """Settings of the variant; None for those of all loops."""

    @property
    def name(self) -> str:
        parts = (self.kind, "compiled" * self.compiled, self.variant, self.precision)
        return ", ".join(filter(None, parts))


def ways(
    precisions: Collection[str],
    loops: Collection[str],
    compiled: bool,
    train_py: Path | None,
    variants: Mapping[str, Config],
) -> dict[str, Way]:
    """All loops to compare, by name; timm's in the first precision comes first."""
    kinds = [TIMM, *(kind for word, kind in LOOPS.items() if word in loops)]
    all_ways: list[Way] = []
    for precision in precisions:
        all_ways += [Way(kind, precision, train_py=train_py) for kind in kinds]
        all_ways += [Way(kind, precision, True, train_py) for kind in kinds if compiled and kind in COMPILED]
    for precision in precisions:
        all_ways += [
            Way(OURS, precision, compiled, variant=words, settings=config) for words, config in variants.items()
        ]
    return {way.name: way for way in all_ways}
