"""Flags of other training programs, and our flag or setting for each, from the tables of docs/migrating.md.

The page is the only list of them. It is read when a flag is unknown; without it, only similar names are suggested.
"""

from __future__ import annotations

import re
from functools import cache

from pydantic import ValidationError

from utils.config.keys import allowed, nested, settings, suggest
from utils.config.schema import Config
from utils.errors import closest, either, nearest
from utils.program import ROOT

PAGE = ROOT / "docs" / "migrating.md"
_ROW = re.compile(r"^\| (`-.+?) \| (.*?) ?\| (.*?) ?\|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_FOREIGN = re.compile(r"`-+([^` ]+)( [^`]+)?`")
ANY_VALUE = "..."
"""After `KEY=`: the value of the other program means something else here."""


@cache
def equivalents() -> dict[str, tuple[list[str], str]]:
    """Flag of another program, or flag and value -> our equivalents, and what the page adds to them."""
    try:
        page = PAGE.read_text(encoding="utf-8")
    except OSError:
        return {}
    rows = {}
    for flags, ours, note in _ROW.findall(page):
        for flag, value in _FOREIGN.findall(flags):
            rows.setdefault(flag.replace("-", "_") + value, (_CODE.findall(ours), note))
    return rows


def suggest_flag(name: str, value: str | None, known: list[str], takes_settings: bool = True) -> str:
    """' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`; '' if nothing is close. `known`: our flags."""
    rows = equivalents()
    if row := rows.get(f"{name} {value}") or rows.get(name):
        ours, note = row
        possible = [_with_value(one, value) for one in ours if _is_possible(one, known, takes_settings)]
        if possible:
            return f" Did you mean {either(possible)}?"
        if not ours:
            return f" {note[0].upper()}{note[1:]}."
    if intended := closest(name, known, cutoff=0.9):
        return f" Did you mean -{intended}?"
    names = {key.rpartition(".")[2] for key in settings()} if takes_settings else set()
    setting = suggest(name.upper()) if name.upper() in names else ""
    return setting.replace("?", f"={value or ANY_VALUE}?") or nearest(name, known).replace("mean ", "mean -")


def _is_possible(ours: str, known: list[str], takes_settings: bool) -> bool:
    return ours.split()[0].removeprefix("-") in known if ours.startswith("-") else takes_settings


def _with_value(ours: str, value: str | None) -> str:
    """`ours`, or for a setting without a value, the setting with `value`, if it allows this value."""
    if ours.startswith("-") or "=" in ours:
        return ours
    if not value:
        return f"{ours}={'true' if 'true' in allowed(ours) else ANY_VALUE}"
    try:
        Config.model_validate(nested({ours: value}))
    except ValidationError:
        return f"{ours}={ANY_VALUE}"
    return f"{ours}={value}"
