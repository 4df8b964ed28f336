"""Sections of the schema; what a setting decides, and rules between settings, beside the setting:

`setting(False, "...", needs("DIST.STRATEGY=fsdp", why="..."))`. Every text about a rule comes from here and words.py:
the error, the note in the log, and the sentence in docs/config.md. Sections take strict keys and values that YAML
leaves as strings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from utils.config.kinds import is_no_value, parse_text

Read = Callable[[str], Any]
"""Dotted key -> value"""
TRAINING = "EVAL=false"
"""For a rule that an evaluation need not keep."""
DECIDES = {
    "source": "the data set and its place",
    "images": "which of its images there are, and their labels",
    "training images": "which of these are trained with, and as what",
    "split": "which images validate, by what may fit this data alone",
    "random split": "the same, by what fits any data",
    "input": "how pixels become the input of a model, which its weights know",
    "weights": "what weights there are and compute, which they know",
    "patches": "which patches are hidden without labels, and validated on",
    "one start": "where a run was, how it was launched, and for how long",
    "nothing": "of the result: a name or a place",
}
"""What a setting may decide. Every list of such settings is made from it, by `deciding` in keys.py."""


@dataclass(frozen=True)
class Rule:
    """A rule of one setting about others; the four functions below make them."""

    kind: Literal["needs", "not with", "only with", "no effect with"]
    """In the words of the reference."""
    others: tuple[str, ...]
    """Conditions on other settings"""
    why: str = ""
    do: str = ""
    at: str = ""
    """The values of its own setting that the rule is about, separated by |; "": all but the default."""
    when: str = ""
    """A condition without which the rule says nothing."""

    @property
    def is_error(self) -> bool:
        """Whether settings that break the rule are refused; otherwise the rule's own setting has no effect."""
        return self.kind in ("needs", "not with")

    @property
    def wanted(self) -> bool:
        """Whether one of the others must hold; otherwise none of them may."""
        return self.kind in ("needs", "only with")

    def is_broken(self, value: Any, default: Any, read: Read) -> bool:
        concerned = _matches(value, self.at) if self.at else value != default
        if not concerned or (self.when and not holds(self.when, read)):
            return False
        return self.wanted != any(holds(condition, read) for condition in self.others)


def needs(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """An error where none of the others holds."""
    return Rule("needs", others, why, do, at, when)


def excludes(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """An error where one of the others holds."""
    return Rule("not with", others, why, do, at, when)


def only_with(*others: str, why: str = "", at: str = "", when: str = "") -> Rule:
    """Where none of the others holds, the setting has no effect, and its other rules say nothing."""
    return Rule("only with", others, why, at=at, when=when)


def overridden_by(*others: str, why: str = "") -> Rule:
    """Where one of the others holds, the setting has no effect, and its other rules say nothing."""
    return Rule("no effect with", others, why)


def broken(rules: Iterable[Rule], value: Any, default: Any, read: Read) -> list[Rule]:
    """The rules that a setting breaks; only the first of those by which it has no effect, if there is one."""
    found = [rule for rule in rules if rule.is_broken(value, default, read)]
    return [rule for rule in found if not rule.is_error][:1] or found


def holds(condition: str, read: Read) -> bool:
    """Whether a condition on a setting holds.

    `KEY`: it is set (not null, false, 0 or empty). `KEY=a|b`: it is one of these, or matches a glob such as `*muon`.
    `KEY!=a|b`: it, or one of several values, is set and none of these.
    """
    key, sign, patterns = condition.partition("=")
    value = read(key.rstrip("!"))
    if sign and not key.endswith("!"):
        return _matches(value, patterns)
    values = value if isinstance(value, tuple) else (value,)
    return bool(value) and not (sign and all(_matches(one, patterns) for one in values))


def _matches(value: Any, patterns: str) -> bool:
    """Whether a value, or one of several, matches a pattern."""
    values = value if isinstance(value, tuple) else (value,)
    for one in values:
        text = str(one).casefold()
        if any(fnmatchcase(text, pattern.casefold()) for pattern in patterns.split("|")):
            return True
    return False


def setting(default: Any, description: str, *rules: Rule, decides: str = "", **limits: float) -> Any:
    """A setting with its default. `decides`: of DECIDES, several separated by |. `limits`: gt, ge, lt, le."""
    facts: Any = {"rules": rules, "decides": decides}
    return Field(default, description=description, json_schema_extra=facts, **limits)  # pyright: ignore[reportCallIssue, reportArgumentType]


def rules_of(field: FieldInfo) -> tuple[Rule, ...]:
    """The rules between a setting and others."""
    return _facts_of(field).get("rules", ())


def decided_by(field: FieldInfo) -> list[str]:
    """What a setting decides, in words of DECIDES."""
    return _facts_of(field).get("decides", "").split("|")


def _facts_of(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


class Section(BaseModel):
    """One section of the YAML. Unknown keys are errors; values are frozen after loading."""

    # Defaults are validated too: the 32 of a `float` becomes 32.0, as when a saved file is read again.
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, validate_default=True
    )

    def changed(self, **values: Any) -> Self:
        """A copy with other values, which are not validated; a dict has those of a section: `DATA={"PART": "all"}`."""
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = getattr(self, name).changed(**value)
        return self.model_copy(update=values)

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        kinds = _plain_types(field.annotation)
        if isinstance(value, str):
            # One of a Literal's words, which may be `none`, in any case.
            words = {word.casefold(): word for word in kinds if isinstance(word, str)}
            value = words.get(value.strip().casefold(), value)
            if value in kinds:
                return value
        # Text stays as written, since a folder may be called `(1)`; only words for no value are converted.
        value = parse_text(value) if str not in kinds or is_no_value(value) else value
        if value is None and get_origin(field.annotation) is tuple and field.default == ():
            return ()
        # Without this, `BATCH_SIZE: true` would pass as 1.
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError("true and false are not allowed here")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    args = getattr(annotation, "__args__", None)
    return {annotation} if args is None else {annotation}.union(*(_plain_types(a) for a in args))
