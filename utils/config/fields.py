"""The base of every section of the schema: strict keys, values that YAML leaves as strings, keys without effect."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from utils.config.rules import Rule
from utils.config.values import is_no_value, parse_text


def setting(default: Any, description: str, *rules: Rule, **limits: float) -> Any:
    """A setting with its default; `limits`: gt, ge, lt, le."""
    sentences = " ".join([description, *map(str, rules)])
    return Field(default, description=sentences, json_schema_extra={"rules": rules} if rules else None, **limits)  # pyright: ignore[reportCallIssue, reportArgumentType]


def without_effect(default: Any, description: str, why: str) -> Any:
    """A key of other programs' files that has no meaning here: accepted, and the log says why."""
    return Field(default, description=description, json_schema_extra={"accepted_because": why})


def with_retired(default: Any, description: str, retired: dict[str, str]) -> Any:
    """A key with `retired` values (value -> why): each is accepted as the default, and the log says why."""
    return Field(default, description=description, json_schema_extra={"retired": {**retired}})


def retired_values(field: FieldInfo) -> dict[str, str]:
    """Values of earlier versions that now mean the default -> why."""
    retired = _extra(field).get("retired", {})
    return {value: str(why) for value, why in retired.items()}


def why_without_effect(field: FieldInfo) -> str:
    """Why a key has no effect; '' if it has one."""
    return str(_extra(field).get("accepted_because", ""))


def rules_of(field: FieldInfo) -> tuple[Rule, ...]:
    """The rules between a setting and others."""
    return _extra(field).get("rules", ())


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


class Section(BaseModel):
    """One section of the YAML. Unknown keys are errors; values are frozen after loading."""

    # Defaults are validated too: the 32 of a `float` becomes 32.0, as when a saved file is read again.
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and value.strip().casefold() in retired_values(field):
            return field.default
        kinds = _plain_types(field.annotation)
        if isinstance(value, str) and value in kinds:
            return value  # one of a Literal's words, which may be `none`
        # Text stays as written, since a folder may be called `(1)`; only words for no value are converted.
        value = parse_text(value) if str not in kinds or is_no_value(value) else value
        if value is None and get_origin(field.annotation) is tuple and field.default == ():
            return ()
        # Without this, `BATCH_SIZE: true` would pass as 1, and the error for an empty `SEED:` would be unclear.
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError("true and false are not allowed here")
        if value is None and type(None) not in kinds:
            raise ValueError("needs a value; leave the key out to get its default")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    args = getattr(annotation, "__args__", None)
    return {annotation} if args is None else {annotation}.union(*(_plain_types(a) for a in args))
