"""Kinds of values that settings have: ranges of numbers, and rows of them in every form people write them in."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from utils.config.fields import revive

AUTO = "auto"
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
AboveZero = Annotated[float, Field(gt=0)]


def _as_tuple(value: Any) -> Any:
    """`0.5`, `30, 60, 90`, `"(0.9, 0.999)"` and a YAML list are all ways people write a row of numbers."""
    value = revive(value)
    if isinstance(value, str):
        value = [part for part in value.replace(",", " ").split() if part]
    return [value] if isinstance(value, int | float) else value


def _as_names(value: Any) -> Any:
    """One name, or several with commas between, without the brackets of a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def folded(value: Any) -> Any:
    return value.strip().casefold() if isinstance(value, str) else value


def as_word_or_integer(value: Any) -> Any:
    return as_integer(folded(value))


def _or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return AUTO if folded(value) == AUTO else check(value)


def _auto_is_none(value: Any) -> Any:
    return None if folded(value) == AUTO else value


Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Integers = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]
Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
SizeSteps = tuple[tuple[NonNegative, Positive], ...]
"""(start, size) one after another"""
Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
# A number to all who read it: before anything is built, the number that is found takes the place of the word.
PositiveOrAuto = Annotated[
    Positive,
    WrapValidator(_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "enum": [AUTO]}]}),
]
PositiveUnlessAuto = Annotated[Positive | None, BeforeValidator(_auto_is_none)]
