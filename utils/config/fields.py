"""Declares a setting: its default, its description, what it decides, and its rules about other settings.

For example, `setting(False, "...", needs("DIST.STRATEGY=fsdp", why="..."))`. Every text about a rule comes from here
and words.py: the error, the note in the log, and the sentence in docs/config.md. `Section`, the base class of the
schema's sections, rejects unknown keys and converts the strings that YAML leaves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from utils.config.kinds import is_no_value, parse_text

Read = Callable[[str], Any]
"""A function that returns the value of a setting by its dotted key."""
TRAINING = "EVAL=false"
"""The condition (`when`) of a rule that does not apply to evaluations."""
DECIDES = {
    "source": "the data set and its place",
    "images": "which of its images there are, and their labels",
    "training images": "which of these are trained with, and as what",
    "split": "which images validate, by what may fit this data alone",
    "random split": "the same, by what fits any data",
    "input": "how pixels become the input of a model, which its weights know",
    "evaluation": "the same for validation images, by what fits the images",
    "weights": "what weights there are and compute, which they know",
    "patches": "which patches are hidden without labels, and validated on",
    "one start": "where a run was, how it was launched, and for how long",
    "nothing": "of the result: a name or a place",
}
"""What a setting may decide, in words. Every list of such settings is made from these by `deciding` in keys.py."""


@dataclass(frozen=True)
class Rule:
    """A rule of one setting about other settings, made by one of the four functions below."""

    kind: Literal["needs", "not with", "only with", "no effect with"]
    """The kind of rule, as docs/config.md words it."""
    others: tuple[str, ...]
    """Conditions on other settings, as for `holds`."""
    why: str = ""
    """The reason, for the error or the note in the log."""
    do: str = ""
    """The advice in the error; "": set one of the others, or leave the setting out."""
    at: str = ""
    """The values of the rule's own setting to which the rule applies, separated by |; "": all but the default."""
    when: str = ""
    """A condition, as for `holds`, without which the rule does not apply; "": it always applies."""

    @property
    def is_error(self) -> bool:
        """Whether settings that break the rule are refused; otherwise the rule's own setting has no effect."""
        return self.kind in ("needs", "not with")

    @property
    def wanted(self) -> bool:
        """Whether one of the conditions must hold; otherwise none of them may."""
        return self.kind in ("needs", "only with")

    def is_broken(self, value: Any, default: Any, read: Read) -> bool:
        """Whether the rule applies to its setting, which has this value and default, and is broken."""
        applies = _matches(value, self.at) if self.at else value != default
        if not applies or (self.when and not holds(self.when, read)):
            return False
        any_holds = any(holds(condition, read) for condition in self.others)
        return self.wanted != any_holds


def needs(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """A rule by which it is an error to set the setting if none of the conditions holds."""
    return Rule("needs", others, why, do, at, when)


def excludes(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """A rule by which it is an error to set the setting if one of the conditions holds."""
    return Rule("not with", others, why, do, at, when)


def only_with(*others: str, why: str = "", at: str = "", when: str = "") -> Rule:
    """A rule by which the setting has no effect if none of the conditions holds; then no other rule is reported."""
    return Rule("only with", others, why, at=at, when=when)


def overridden_by(*others: str, why: str = "") -> Rule:
    """A rule by which the setting has no effect if one of the conditions holds; then no other rule is reported."""
    return Rule("no effect with", others, why)


def broken(rules: Iterable[Rule], value: Any, default: Any, read: Read) -> list[Rule]:
    """Return the rules of a setting that are broken.

    There are rules whose break is an error, and rules whose break means that the setting has no effect. If one of the
    latter is broken, only the first of these is returned: errors of a setting without effect do not matter.

    value, default: of the setting
    read: returns the value of any setting by its dotted key
    """
    broken_rules = [rule for rule in rules if rule.is_broken(value, default, read)]
    for rule in broken_rules:
        if not rule.is_error:  # The setting has no effect.
            return [rule]
    return broken_rules


def holds(condition: str, read: Read) -> bool:
    """Whether a condition on a setting holds.

    `KEY`: the setting is set (not null, false, 0 or empty).
    `KEY=a|b`: its value, or one of the items of a tuple, matches one of these globs, such as `*muon`.
    `KEY!=a|b`: it is set, and its value, or at least one of the items of a tuple, matches none of these globs.
    """
    key, sign, patterns = condition.partition("=")
    is_negated = key.endswith("!")
    value = read(key.rstrip("!"))
    is_set = bool(value)
    if not sign:
        return is_set
    if not is_negated:
        return _matches(value, patterns)
    items = value if isinstance(value, tuple) else (value,)
    return is_set and not all(_matches(item, patterns) for item in items)


def _matches(value: Any, patterns: str) -> bool:
    """Whether a value, or one of the items of a tuple, matches one of the globs, which | separates."""
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        text = str(item).casefold()
        if any(fnmatchcase(text, pattern.casefold()) for pattern in patterns.split("|")):
            return True
    return False


def setting(default: Any, description: str, *rules: Rule, decides: str = "", **limits: float) -> Any:
    """Declare a setting with its default, its description for docs/config.md, and its rules about other settings.

    decides: which results of a run depend on the setting: keys of DECIDES, such as "images|split"; "": none of these
    limits: gt, ge, lt, le, as pydantic takes them
    """
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
        """A copy with some values replaced, without validation; a dict replaces some of a section's values.

        For example, `config.changed(SEED=1, DATA={"PART": "all"})`.
        """
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = getattr(self, name).changed(**value)
        return self.model_copy(update=values)

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert the value of any setting from text, before pydantic validates it."""
        field = cls.model_fields[info.field_name or ""]
        # The types of the setting, such as int or str, and the words of a Literal, such as "fp16"
        types_and_words = _types_in(field.annotation)
        if isinstance(value, str):
            # A word counts in upper or lower case. This is before all else, because the word may be `none`.
            words = {word.casefold(): word for word in types_and_words if isinstance(word, str)}
            value = words.get(value.strip().casefold(), value)
            if value in types_and_words:
                return value
        # A setting that may be text keeps it as written, since a folder may be called `(1)`. Only `none` is converted.
        if str not in types_and_words or is_no_value(value):
            value = parse_text(value)
        # `none` for a list that is empty by default means the empty list.
        if value is None and get_origin(field.annotation) is tuple and field.default == ():
            return ()
        # Without this, `BATCH_SIZE: true` would pass as 1.
        if isinstance(value, bool) and bool not in types_and_words:
            raise ValueError("true and false are not allowed here")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """Collect an annotation and all that it is made of: types, and the words of a Literal."""
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        return {annotation}
    return {annotation}.union(*(_types_in(argument) for argument in arguments))
