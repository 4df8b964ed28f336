"""Reads families.yaml: what PaddleViT's files say of each family, and which timm models these are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FILE = Path(__file__).with_name("families.yaml")


@dataclass(frozen=True)
class Family:
    """A family of PaddleViT that timm has."""

    title: str
    models: Mapping[str, Mapping[str, Any]]
    """timm's name -> value of each MODEL key that only restates the model's sizes"""
    defaults: Mapping[str, Any]
    """Setting -> the family's default"""
    names: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    """MODEL key whose first number is the image size"""

    @property
    def size_keys(self) -> frozenset[str]:
        """The MODEL keys that restate sizes."""
        return frozenset(key for sizes in self.models.values() for key in sizes)

    def timm_name(self, name: str) -> str | None:
        """The timm model that PaddleViT's NAME means; None if it is none of this family's."""
        name = name.strip().casefold()
        for pattern, replacement in self.names:
            if name in self.models:
                break
            name = re.sub(pattern, replacement, name)
        return name if name in self.models else None


class Missing(NamedTuple):
    """A family of PaddleViT that timm lacks."""

    title: str
    nearest: str
    """The most similar timm model."""


@cache
def families() -> dict[str, Family]:
    """TYPE in small letters -> family."""
    tables = _read()
    found = {}
    for word, table in tables["families"].items():
        common = table.pop("sizes", {})
        also = table.pop("also", ())
        models = {name: {**common, **sizes} for name, sizes in table.pop("models").items()}
        own = table.pop("defaults")
        defaults = {key: _tuple(value) for key, value in {**tables["defaults"], **own}.items()}
        names = tuple((pattern, replacement) for pattern, replacement in table.pop("names", ()))
        found |= dict.fromkeys((word, *also), Family(models=models, defaults=defaults, names=names, **table))
    return found


@cache
def missing() -> dict[str, Missing]:
    """TYPE in small letters -> family that timm lacks."""
    return {word: Missing(*row) for word, row in _read()["missing"].items()}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read() -> dict[str, Any]:
    # libyaml's loader takes 30 ms, the one in Python 240 ms; both build plain values only.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
