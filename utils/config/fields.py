"""What every section of the schema shares: strictness, the values PyYAML leaves as strings, keys that mean nothing."""

from __future__ import annotations

import ast
from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

NO_VALUE = {"none", "null", "~", ""}


def is_no_value(value: Any) -> bool:
    return isinstance(value, str) and value.strip().casefold() in NO_VALUE


def revive(value: Any) -> Any:
    """YAML 1.1 leaves `None`, `(0.9, 0.999)` and `3e-3` as strings; give back what the writer meant.

    Numbers are left to pydantic, which knows whether the field wants one.
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


def inert(default: Any, description: str, why: str) -> Any:
    """A key that others' files carry and that cannot mean anything here: accepted, and the log says why."""
    return Field(default, description=description, json_schema_extra={"accepted_because": why})


def with_retired(default: Any, description: str, retired: dict[str, str]) -> Any:
    """A key with values (and why) that are not supported any more: each is accepted for the default, and logged."""
    return Field(default, description=description, json_schema_extra={"retired": {**retired}})


def retired_values(field: FieldInfo) -> dict[str, str]:
    """Values of earlier versions that now mean the default -> why."""
    extra = field.json_schema_extra
    found = extra.get("retired") if isinstance(extra, dict) else None
    return {word: str(why) for word, why in found.items()} if isinstance(found, dict) else {}


class Section(BaseModel):
    """One section of the YAML. Unknown keys are errors; nothing changes after loading."""

    # Defaults are validated too: the 32 of a `float` becomes 32.0, as it does when a saved file is read again.
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and value.strip().casefold() in retired_values(field):
            return field.default
        kinds = _plain_types(field.annotation)
        if isinstance(value, str) and value in kinds:
            return value  # one of a list of words, `none` maybe among them
        # Text stays as written, a folder may be called `(1)`; only the words for no value are known there.
        value = revive(value) if str not in kinds or is_no_value(value) else value
        if value is None and get_origin(field.annotation) is tuple and field.default == ():
            return ()
        # Without this `BATCH_SIZE: true` would pass as 1, and an empty `SEED:` would be reported as a puzzle.
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError("true/false where another kind of value belongs")
        if value is None and type(None) not in kinds:
            raise ValueError("needs a value; leave the key out to get its default")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    args = getattr(annotation, "__args__", None)
    return {annotation} if args is None else {annotation}.union(*(_plain_types(a) for a in args))
