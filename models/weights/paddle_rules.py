"""Rules of paddle_rules.yaml: names and layout of the weights of PaddleViT's other families, in timm's terms."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from utils.config.paddlevit import families
from utils.errors import UserError

FILE = Path(__file__).with_name("paddle_rules.yaml")
NUMBER = re.compile(r"<(\d+)((?:[-+*/]\d+)*)>")
"""In a replacement, after its groups were filled in: <2*2+1> is 5"""
STEP = re.compile(r"([-+*/])(\d+)")
STEPS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
OF_BATCH_NORM = (("._mean", ".running_mean"), ("._variance", ".running_var"))


@dataclass(frozen=True)
class Rules:
    """How the weights of one family become timm's. Patterns of names are searched for, so most are anchored."""

    family: str
    """TYPE in small letters"""
    signs: tuple[str, ...]
    """Patterns that a file of this family has a name for, each"""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns and replacements, applied in order; <\\1+1> is a number that is computed"""
    computed: str = "$^"
    """Names of tensors that follow from the sizes"""
    split: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """A fused linear layer, and timm's layers for its parts"""
    folded: tuple[tuple[str, str], ...] = ()
    """A bias that timm's layer lacks, and the mean of the batch norm behind it, which takes it up"""
    equal: tuple[tuple[str, str], ...] = ()
    """Weights that timm's model shares, and so must be equal in the file"""
    refused: str = ""
    """Why PaddleViT's model computes something else than timm's, if it does"""

    @property
    def title(self) -> str:
        return families()[self.family].title

    def timm_names(self, name: str) -> list[str]:
        """One, or several for the parts of a fused layer."""
        for pattern, parts in self.split:
            if re.search(pattern, name):
                return [re.sub(pattern, part, name) for part in parts]
        return [self._timm_name(name)]

    def _timm_name(self, name: str) -> str:
        for pattern, new in self.names:
            name = re.sub(pattern, new, name)
        name = NUMBER.sub(_computed, name)
        for paddle, torch in OF_BATCH_NORM:
            if name.endswith(paddle):
                return name.removesuffix(paddle) + torch
        return name

    def prepared(self, arrays: dict[str, np.ndarray], where: object) -> dict[str, np.ndarray]:
        """The arrays without what timm computes or lacks. Raise UserError for weights that timm's model cannot have."""
        if self.refused:
            raise UserError(f"{where}: weights of PaddleViT's {self.title} cannot be converted: {self.refused}.")
        kept = {name: array for name, array in arrays.items() if not re.search(self.computed, name)}
        for pattern, replacement in self.equal:
            for name in [name for name in kept if re.search(pattern, name)]:
                other = re.sub(pattern, replacement, name)
                if other not in kept or not np.array_equal(kept[name], kept[other]):
                    raise UserError(
                        f"{where}: {name} differs from {other}, but timm's {self.title} has one tensor for both, so "
                        "the weights cannot be converted."
                    )
        for pattern, replacement in self.folded:
            for name in [name for name in kept if re.search(pattern, name)]:
                mean = re.sub(pattern, replacement, name)
                if mean in kept:
                    kept[mean] = kept[mean] - kept.pop(name)
        return kept


def _computed(found: re.Match[str]) -> str:
    number = int(found[1])
    for sign, other in STEP.findall(found[2]):
        number = STEPS[sign](number, int(other))
    return str(number)


def rules_of(names: Collection[str]) -> Rules | None:
    """The rules for a file with these names; None for ViT, DeiT and Swin, and for families without rules."""
    return next(
        (one for one in all_rules() if all(any(re.search(sign, name) for name in names) for sign in one.signs)), None
    )


@cache
def all_rules() -> tuple[Rules, ...]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rules = []
    for word, table in tables.items():
        pairs = {key: tuple((a, b) for a, b in table.get(key, ())) for key in ("names", "folded", "equal")}
        split = tuple((pattern, tuple(parts)) for pattern, parts in table.get("split", ()))
        words = {key: table[key] for key in ("computed", "refused") if key in table}
        rules.append(Rules(word.partition(" ")[0], tuple(table["signs"]), split=split, **pairs, **words))
    return tuple(rules)
