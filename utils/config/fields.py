"""Sections of the schema, and rules between settings beside a setting:

`setting(False, "...", needs("DIST.STRATEGY=fsdp", why="..."))`. Every text about a rule comes from here: the error, the
note in the log, and the sentence in docs/config.md. Sections take strict keys and values that YAML leaves as strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from utils.config.kinds import is_no_value, one_line, parse_text
from utils.errors import either

Read = Callable[[str], Any]
"""Dotted key -> value"""
TRAINING = "EVAL=false"
"""For a rule that an evaluation need not keep."""


@dataclass(frozen=True)
class Condition:
    """A condition on a setting. `KEY`: it is set (not null, false, 0 or empty). `KEY=a|b`: it is one of these, or
    matches a glob such as `*muon`. `KEY!=a|b`: it is set, and none of these."""

    key: str
    sign: str
    values: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Condition:
        key, sign, values = text.partition("=")
        return cls(key.rstrip("!"), "!=" if key.endswith("!") else sign, tuple(values.split("|")) if sign else ())

    def holds(self, read: Read) -> bool:
        value = read(self.key)
        return _matches(value, self.values) if self.sign == "=" else bool(value) and not _matches(value, self.values)

    def __str__(self) -> str:
        sign = " other than " if self.sign == "!=" else self.sign
        return f"{self.key}{sign}{either(self.values) if self.values else ''}"

    def now(self, read: Read) -> str:
        """The setting with its value: 'DIST.STRATEGY fsdp'."""
        value = read(self.key)
        return self.key if value is True else f"{self.key} {one_line(value)}"

    def missed(self, read: Read) -> str:
        """Why it does not hold: 'TRAIN.LOSS is ce, not bce'."""
        return f"{self.key} is {one_line(read(self.key))}{f', not {either(self.values)}' if self.sign == '=' else ''}"


@dataclass(frozen=True)
class Rule:
    """A rule of one setting about others; the four functions below make them."""

    kind: Literal["needs", "not with", "only with", "no effect with"]
    """In the words of the reference."""
    others: tuple[Condition, ...]
    why: str
    do: str
    at: tuple[str, ...]
    """The values of its own setting that the rule is about; (): all but the default."""
    when: tuple[Condition, ...]
    """Conditions without which the rule says nothing."""

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
        if not concerned or not all(condition.holds(read) for condition in self.when):
            return False
        return self.wanted != any(condition.holds(read) for condition in self.others)

    def error(self, key: str, read: Read) -> str:
        value = one_line(read(key))
        if self.wanted:
            do = self.do or f"set {self.others[0]} too, or leave {key} out"
            return f"{value} needs {either(self.others)}: {self.why}; {do}"
        return f"{value} is not possible with {self._met(read)}: {self.why}; {self.do or f'leave {key} out'}"

    def note(self, key: str, read: Read) -> str:
        if self.wanted:
            missed = " and ".join(condition.missed(read) for condition in self.others)
            return f"{key} has no effect: {missed}{f'; {self.why}' if self.why else ''}"
        return f"{key} has no effect with {self._met(read)}{f': {self.why}' if self.why else ''}"

    def __str__(self) -> str:
        """The rule as a sentence for the reference."""
        text = " if ".join([f"{self.kind} {either(self.others)}", *map(str, self.when)])
        return f"{either(self.at)}: {text}." if self.at else f"{text[0].upper()}{text[1:]}."

    def _met(self, read: Read) -> str:
        """The conditions that hold, but for TRAINING, which goes without saying."""
        held = [condition for condition in (*self.others, *self.when) if condition.holds(read) and read(condition.key)]
        return " and ".join(condition.now(read) for condition in held)


def needs(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """An error where none of the others holds."""
    return _rule("needs", others, why, do, at, when)


def excludes(*others: str, why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    """An error where one of the others holds."""
    return _rule("not with", others, why, do, at, when)


def only_with(*others: str, why: str = "", at: str = "") -> Rule:
    """Where none of the others holds, the setting has no effect, and its other rules say nothing."""
    return _rule("only with", others, why, at=at)


def overridden_by(*others: str, why: str = "", when: str = "") -> Rule:
    """Where one of the others holds, the setting has no effect, and its other rules say nothing."""
    return _rule("no effect with", others, why, when=when)


def _rule(kind: Any, others: Iterable[str], why: str, do: str = "", at: str = "", when: str = "") -> Rule:
    values = tuple(at.split("|")) if at else ()
    return Rule(kind, tuple(map(Condition.of, others)), why, do, values, (Condition.of(when),) if when else ())


def broken(rules: Iterable[Rule], value: Any, default: Any, read: Read) -> list[Rule]:
    """The rules that a setting breaks; only the first of those by which it has no effect, if there is one."""
    found = [rule for rule in rules if rule.is_broken(value, default, read)]
    return [rule for rule in found if not rule.is_error][:1] or found


def _matches(value: Any, patterns: Iterable[str]) -> bool:
    """Whether a value, or one of several, matches a pattern."""
    texts = [str(one).casefold() for one in (value if isinstance(value, tuple) else (value,))]
    return any(fnmatchcase(text, pattern.casefold()) for pattern in patterns for text in texts)


def setting(default: Any, description: str, *rules: Rule, **limits: float) -> Any:
    """A setting with its default; `limits`: gt, ge, lt, le."""
    sentences = " ".join([description, *map(str, rules)])
    return Field(default, description=sentences, json_schema_extra={"rules": rules} if rules else None, **limits)  # pyright: ignore[reportCallIssue, reportArgumentType]


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
