"""Values as people write them: read from text, and written as YAML on one line."""

from __future__ import annotations

import ast
from typing import Any

import yaml

NO_VALUE = {"none", "null", "~", ""}


def is_no_value(value: Any) -> bool:
    return isinstance(value, str) and value.strip().casefold() in NO_VALUE


def parse_text(value: Any) -> Any:
    """The value meant by text that YAML leaves as a string: `None`, or a tuple as in `(0.9, 0.999)`.

    Numbers such as `3e-3` stay text: pydantic converts them, where the field is a number.
    """
    if not isinstance(value, str):
        return value
    if is_no_value(value):
        return None
    text = value.strip()
    if text[0] in "([" and text[-1] in ")]":
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value


class OneLine(yaml.SafeDumper):
    """Writes every value on its key's line: lists in brackets, line breaks escaped."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


def _list(dumper: yaml.SafeDumper, value: tuple[Any, ...]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


OneLine.add_representer(str, _text)
OneLine.add_representer(tuple, _list)


def one_line(value: Any) -> str:
    """A value as YAML on one line: `[0.9, 0.999]`, `null`, `true`."""
    return yaml.dump([value], Dumper=OneLine, width=float("inf"), allow_unicode=True, default_flow_style=True)[1:-2]
