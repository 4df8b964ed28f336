"""Types of settings: ranges of numbers, and lists and other values in all forms in which people write them."""

import ast
import os
import re
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, WrapValidator


def is_no_value(value: Any) -> bool:
    return isinstance(value, str) and value.strip().casefold() in ("none", "null", "~", "")


def parse_text(value: Any) -> Any:
    """Convert text that YAML leaves as a string: words for no value to None, and Python's lists and tuples.

    Numbers such as `3e-3` stay text: pydantic converts them, where the field is a number.
    """
    if not isinstance(value, str):
        return value
    if is_no_value(value):
        return None
    text = value.strip()  # not empty, because an empty text is no value
    if text[0] in "([" and text[-1] in ")]":
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value


LIST = "tag:yaml.org,2002:seq"


class OneLine(yaml.SafeDumper):
    """Writes every value on its key's line: lists in brackets, line breaks escaped."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


OneLine.add_representer(str, _text)
OneLine.add_representer(tuple, lambda dumper, value: dumper.represent_sequence(LIST, value, flow_style=True))


def as_yaml(values: Any, flow: bool = False) -> str:
    """Values as YAML, without breaking or sorting lines. `flow`: lists and mappings in brackets."""
    options = {"width": float("inf"), "allow_unicode": True, "sort_keys": False, "default_flow_style": flow}
    return yaml.dump(values, Dumper=OneLine, **options)


def one_line(value: Any) -> str:
    """A value as YAML on one line: `[0.9, 0.999]`, `null`, `true`."""
    # YAML would end a value alone by a line `...`. So it is put into a list, whose brackets and line break are removed.
    return as_yaml([value], flow=True)[1:-2]


AUTO = "auto"
Place = Annotated[str, AfterValidator(os.path.expanduser)]  # a shell leaves the ~ after a `=` as it is
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
FractionAboveZero = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


def _as_tuple(value: Any) -> Any:
    """Convert `0.5`, `30, 60, 90` or `"(0.9, 0.999)"` to a list; pydantic converts its items to numbers."""
    parsed = parse_text(value)
    if isinstance(parsed, str):
        return [part for part in parsed.replace(",", " ").split() if part]
    return [parsed] if isinstance(parsed, int | float) else parsed


def as_names(value: Any) -> Any:
    """Convert text to a list of names at its commas; other values stay."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _as_background(value: Any) -> Any:
    """Leave a word, such as `white`, and convert anything else to a list of three numbers."""
    return value if isinstance(value, str) and value.strip().isalpha() else _as_tuple(value)


def as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _as_size(value: Any) -> Any:
    """Convert `224`, `224,448`, `224x448` or a list to an image size: one number for a square, else a list of two."""
    if isinstance(value, str):
        value = re.sub(r"(?<=\d)x(?=\d)", ",", value)
    items = _as_tuple(value)
    if not isinstance(items, list | tuple):
        return items  # no size: pydantic rejects it
    numbers = [as_integer(item) for item in items]
    is_square = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == numbers[1])
    return numbers[0] if is_square else numbers


def folded(value: Any) -> Any:
    """Text in lower case without blanks around it, for comparisons; other values stay."""
    return value.strip().casefold() if isinstance(value, str) else value


class Fold(NamedTuple):
    """Fold `number` of `folds`, counted from 1, as in `2/5`."""

    number: int
    folds: int

    def __str__(self) -> str:
        return f"{self.number}/{self.folds}"


def read_fold(value: str) -> Fold:
    """Parse a fold such as `2/5`; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", value)
    if match:
        fold = Fold(number=int(match[1]), folds=int(match[2]))
        if fold.folds >= 2 and 1 <= fold.number <= fold.folds:
            return fold
    raise ValueError(f"{value} is not {FOLD_WORDS}")


def _in_words(words: str, kind: str = "string") -> WithJsonSchema:
    """JSON schema of a type that errors and docs/config.md describe by `words`. `kind`: its JSON type."""
    return WithJsonSchema({"type": kind, "description": words})


FOLD_WORDS = "K/N (fold K of N, with N >= 2 and K from 1 to N, such as 2/5)"
FoldText = Annotated[
    Annotated[str, _in_words(FOLD_WORDS)] | None,
    BeforeValidator(lambda value: None if value is None else str(read_fold(str(value)))),
]
COLUMN = r"(file|label)=([^=,]+)"
Columns = Annotated[str, Field(pattern=f"^{COLUMN}(,{COLUMN})?$"), _in_words("file=NAME,label=NAME, or one of both")]
Time = Annotated[str, Field(pattern=r"^\d+:[0-5]\d:[0-5]\d$"), _in_words("a time as HH:MM:SS, such as 0:30:00")]
Numbers = Annotated[tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...], BeforeValidator(_as_tuple)]
NumbersAboveZero = Annotated[tuple[AboveZero, ...], BeforeValidator(_as_tuple)]
Shade = Annotated[int, Field(ge=0, le=255)]
Colour = Annotated[tuple[Shade, Shade, Shade], _in_words("[r, g, b] of 0 to 255", "array")]
Background = Annotated[Literal["white", "black", "mean", "drop"] | Colour, BeforeValidator(_as_background)]
Integers = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]
Betas = Annotated[tuple[FractionBelowOne, FractionBelowOne], BeforeValidator(_as_tuple)]
Fractions = Annotated[tuple[Fraction, Fraction], BeforeValidator(_as_tuple)]
FractionsAboveZero = Annotated[tuple[FractionAboveZero, FractionAboveZero], BeforeValidator(_as_tuple)]
Ratios = Annotated[tuple[AboveZero, AboveZero], BeforeValidator(_as_tuple)]
_Size = Annotated[
    Positive | Annotated[tuple[Positive, Positive], _in_words("[height, width]", "array")], BeforeValidator(_as_size)
]
SizeSteps = tuple[tuple[NonNegative, _Size], ...]
"""Pairs (start, image size)."""
Names = Annotated[tuple[str, ...], BeforeValidator(as_names)]
OWN_SETTING = re.compile(r"\s*([A-Za-z_]\w*)\.([A-Za-z_]\w*)\s*=\s*(.*?)\s*", re.DOTALL)
"""A setting of the user's own code: focal.gamma=1.5"""


def is_own_setting(value: Any) -> bool:
    return isinstance(value, str) and OWN_SETTING.fullmatch(value) is not None


OwnName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$"), _in_words("a name that USE registers")]
_WHOLE = {"type": "integer", "minimum": 1}
_NUMBER = {"type": "number"}
_AUTO = {"enum": [AUTO]}
_SIDES = {"type": "array", "description": "[height, width]"}


def _either(*kinds: dict[str, Any]) -> WithJsonSchema:
    """JSON schema of a value that is of one of these kinds."""
    return WithJsonSchema({"anyOf": [*kinds]})


def _list_of(**limits: float) -> WithJsonSchema:
    """JSON schema of a list of numbers within limits, or `auto`."""
    return _either({"type": "array", "items": {**_NUMBER, **limits}}, _AUTO)


# Python's types below leave `auto` out, because a number replaces it before anything is built.
_Auto = _either(_WHOLE, {"type": "string", **_AUTO})
_or_auto = WrapValidator(lambda value, check: AUTO if folded(value) == AUTO else check(value))
PositiveOrAuto = Annotated[Positive, _or_auto, _Auto]
SizeOrAuto = Annotated[_Size, _or_auto, _either(_WHOLE, _SIDES, {"type": "string", **_AUTO})]
RateOrAuto = Annotated[NonNegative, _or_auto, _either({**_NUMBER, "minimum": 0}, _AUTO)]
FractionOrAuto = Annotated[
    FractionAboveZero, _or_auto, _either({**_NUMBER, "exclusiveMinimum": 0, "maximum": 1}, _AUTO)
]
CountOrAuto = Annotated[Count, _or_auto, _either({**_WHOLE, "minimum": 0}, _AUTO)]
NumbersOrAuto = Annotated[Numbers, _or_auto, _list_of(minimum=-1e6, maximum=1e6)]
NumbersAboveZeroOrAuto = Annotated[NumbersAboveZero, _or_auto, _list_of(exclusiveMinimum=0)]
Range = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
_PAIR = {"type": "array", "prefixItems": [_NUMBER, _NUMBER]}
RangeOrAuto = Annotated[Range | None, _or_auto, _either(_PAIR, _AUTO, {"type": "null"})]
PositiveUnlessAuto = Annotated[
    Annotated[Positive, _Auto] | None, BeforeValidator(lambda value: None if folded(value) == AUTO else value)
]
