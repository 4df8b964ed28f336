"""What compare.py compares: the values of -modes and -vary, and the contenders that they make up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import ToolLine
from utils.cli import command_line
from utils.config import Loaded, differences
from utils.config.keys import settings, suggest
from utils.errors import UserError, nearest
from utils.flags import BY_NAME, Flag

if TYPE_CHECKING:
    from tools.common.precisions import Mode

SAME_FOR_ALL = "it is the same for all runs"
NOT_VARIED = {
    "SEED": "give -seeds",
    "DATA.FOLD": "give -folds",
    "OUTPUT": "every run has a folder of its own",
    "SAVE": "every run has a folder of its own",
    "NGPUS": SAME_FOR_ALL,
    "DEVICE": SAME_FOR_ALL,
    "MAX_TIME": SAME_FOR_ALL,
    "EVAL": "every run trains",
    "MODEL.RESUME": "every run starts anew",
    "TRAIN.LAST_EPOCH": "every run starts anew",
}
"""Settings that -vary refuses -> why, or what to give instead."""
EXAMPLE = "such as -vary DATA.SAMPLER=shuffle,balanced"
MODES = "modes"
"""Name of the axis of -modes"""
BRACKETS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Value:
    """One value of what varies."""

    label: str
    """In the names of contenders: bf16, SAMPLER=balanced"""
    cfg: str | None = None
    """The recipe, if that varies."""
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings, with their source."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Settings as text, as KEY=VALUE gives them."""

    @property
    def keys(self) -> set[str]:
        return {*self.flags, *self.words}


@dataclass(frozen=True)
class Axis:
    """What varies, with its values."""

    name: str
    """A setting, the name of a flag, or MODES."""
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Contender:
    """One value of each axis."""

    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ", ".join(value.label for value in self.values)

    @property
    def file_name(self) -> str:
        """The name without characters that a shell or the command line would take for something else."""
        return re.sub(r"[^A-Za-z0-9.+-]+", "-", self.name.replace("_", "-")).strip("-.")

    def load(self, line: ToolLine, more: Mapping[str, tuple[Any, str]] | None = None) -> Loaded:
        """Its settings. `more`: further ones, with their source."""
        cfg = next((value.cfg for value in self.values if value.cfg), None)
        flags = {key: given for value in self.values for key, given in value.flags.items()}
        words = {key: text for value in self.values for key, text in value.words.items()}
        return line.load({**flags, **(more or {})}, cfg=cfg, words=words)


def modes_axis(modes: Sequence[Mode]) -> Axis:
    return Axis(
        MODES,
        tuple(
            Value(mode.name, flags={f"AMP.{key}": (value, "-modes") for key, value in mode.settings.items()})
            for mode in modes
        ),
    )


def read_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Parse the -vary flags. `-vary amp=...` is left to -modes."""
    named = [_split(text) for text in texts]
    names = [name for name, _ in named]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"-vary {repeated}: given twice; list all its values in one -vary.")
    tails = [name.rpartition(".")[2] for name in names]
    return tuple(
        Axis(name, tuple(_value(name, tail if tails.count(tail) == 1 else name, text) for text in texts))
        for (name, texts), tail in zip(named, tails, strict=True)
    )


def _split(text: str) -> tuple[str, list[str]]:
    """'KEY=a,[b,c]' -> KEY, [a, '[b,c]']."""
    name, _, rest = text.partition("=")
    values = [value.strip() for value in _at_top_level(rest)]
    if len(values) < 2 or not all(values):
        raise UserError(f"-vary {text}: name a setting or flag and at least two values, {EXAMPLE}.")
    if len(set(values)) < len(values):
        raise UserError(f"-vary {text}: a value is listed twice; list each one once.")
    return name.strip().removeprefix("-"), values


def _at_top_level(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, open_brackets = [""], ""
    for letter in text:
        if letter in BRACKETS:
            open_brackets += BRACKETS[letter]
        elif open_brackets.endswith(letter):
            open_brackets = open_brackets[:-1]
        if letter == "," and not open_brackets:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(name: str, label: str, text: str) -> Value:
    if name == "cfg":
        return Value(Path(text).stem, cfg=text)
    flag = BY_NAME.get(name)
    if flag is not None and flag.keys:
        value = Value(f"{label}={text}", flags=_by_flag(flag, text))
    elif name in settings():
        value = Value(f"{label}={text}", words={name: text})
    elif name.isupper():
        raise UserError(f"-vary {name}: unknown key.{suggest(name)}")
    else:
        known = ["cfg", *(flag.name for flag in BY_NAME.values() if flag.keys)]
        raise UserError(f"-vary {name}: neither a setting nor a flag that sets one.{nearest(name, known)}")
    for key in value.keys & NOT_VARIED.keys():
        raise UserError(f"-vary {name}: {key} cannot be varied; {NOT_VARIED[key]}.")
    return value


def _by_flag(flag: Flag, text: str) -> dict[str, tuple[Any, str]]:
    try:
        value = [text] if flag.append else flag.kind(text)
    except ValueError as error:
        raise UserError(f"-vary {flag.name}={text}: {error}.") from None
    return command_line({flag.name: value}, {}).flags


def contenders_of(axes: Sequence[Axis], pairs: bool) -> tuple[Contender, ...]:
    """Every combination of values; with `pairs`, the first value of all axes, the second of all, and so on."""
    if pairs and len({len(axis.values) for axis in axes}) > 1:
        counts = ", ".join(f"{axis.name} has {len(axis.values)}" for axis in axes)
        raise UserError(f"-pairs: everything that varies needs the same number of values, but {counts}.")
    together = zip(*(axis.values for axis in axes), strict=True) if pairs else None
    rows = together or itertools.product(*(axis.values for axis in axes))
    contenders = tuple(Contender(tuple(row)) for row in rows)
    names: dict[str, str] = {}
    for contender in contenders:
        other = names.setdefault(contender.file_name, contender.name)
        if other != contender.name:
            raise UserError(f"-vary: {other} and {contender.name} would have the same folder; compare them separately.")
    return contenders


def refuse_fixed(axes: Sequence[Axis], line: ToolLine) -> None:
    """What varies must not be given for all runs as well: it would win, or be lost."""
    if any(axis.name == "cfg" for axis in axes) and line.run.cfg is not None:
        raise UserError(f"-cfg {line.run.cfg}: cannot be given here; list it in -vary cfg=...")
    for axis in axes:
        for key in sorted(set().union(*(value.keys for value in axis.values))):
            if given_by := line.given_by(key):
                raise UserError(f"{key} ({given_by}): cannot be given here, because it varies ({axis.name}).")


def refuse_equal(loaded: Mapping[str, Loaded]) -> None:
    """Two contenders with the same settings would be compared with themselves."""
    for (one, first), (other, second) in itertools.combinations(loaded.items(), 2):
        if not differences(first.config, second.config):
            raise UserError(f"{one} and {other} have the same settings here; list one of them.")


def first_as_baseline(contenders: Sequence[Contender], name: str | None) -> tuple[Contender, ...]:
    """The contenders with the one called `name` first; None: in their order."""
    if name is None:
        return tuple(contenders)
    names = [contender.name for contender in contenders]
    if name not in names:
        raise UserError(f"-baseline {name}: not compared.{nearest(name, names)} Compared: {'; '.join(names)}.")
    return tuple(sorted(contenders, key=lambda contender: contender.name != name))
