"""What an unknown flag, word or key may mean: a typo, or one of another program or of an earlier version.

Imported only where there is a mistake. foreign_flags.yaml is the table; docs/migrating.md says what differs between
flags of other programs and ours.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from utils.config.keys import nested, settings
from utils.config.paddlevit import ours
from utils.config.read import TYPE, Entry, type_of
from utils.config.schema import Config
from utils.config.words import allowed, suggest
from utils.errors import UserError, closest, either, nearest
from utils.flags import BY_NAME, IGNORED, Flag
from utils.precisions import AMP_WORDS, amp_settings_of
from utils.program import tool
from utils.record.run_folder import is_run_folder

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
INSTEAD: dict[str, list[str]] = TABLE["instead"]
ABSENT: dict[str, list[str]] = TABLE["absent"]
GONE: dict[str, list[str]] = TABLE["gone"]
MODELS: dict[str, str] = TABLE["models"]
CLOSE = 0.7
CLOSE_WORD = 0.85
"""Similarity from which a flag, or a KEY=VALUE word, is taken for one of ours: a wrong suggestion is worse than none"""
ANY_VALUE = "..."
"""After `KEY=`: the value of the other program means something else here."""


def unknown_flags(
    unknown: Iterable[tuple[str, str]], strays: list[UserError], known: Mapping[str, Flag], takes_settings: bool
) -> UserError:
    """The error for flags, each with its values, that are none of the `known`, and for `strays`, other words."""
    names = [name for name in known if name != IGNORED.name]
    lines = [f"{flag}.{suggest_flag(flag, value, names, takes_settings)}" for flag, value in dict(unknown).items()]
    end = "-h lists all flags, docs/migrating.md those of other programs"
    if len(lines) + len(strays) == 1:
        return strays[0] if strays else UserError(f"unknown flag {lines[0]} {end}.")
    noun = "arguments" if strays else "flags"
    every = [str(stray) for stray in strays] + lines
    return UserError(f"{len(every)} unknown {noun}; {end}:" + "".join(f"\n  {line}" for line in every))


def suggest_flag(flag: str, value: str, known: list[str], takes_settings: bool) -> str:
    """' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`; '' if nothing is close. `known`: our flags."""
    name = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
    advice = by_table(name, value, known, takes_settings)
    if advice:
        return advice
    same = [key for key in settings() if takes_settings and key.rpartition(".")[2] == name.upper()]
    if len(same) == 1:
        return f" Did you mean {_with_value(same[0], value)}?"
    nearly_equal = closest(name, known, cutoff=0.9)
    if nearly_equal:
        return f" Did you mean -{nearly_equal}?"
    if same:
        text = value or ANY_VALUE
        return suggest(name.upper()).replace("?", f"={text}?")
    harmless = [one for one in known if one != "use" or "_" not in name]  # -use executes files
    similar = closest(name, harmless, CLOSE)
    return f" Did you mean -{similar}?" if similar else ""


def by_table(name: str, value: str, known: Iterable[str], takes_settings: bool = True) -> str:
    """What the table says of a flag or word, such as ' Did you mean TRAIN.SMOOTHING=0.1?'; '' if it is not there."""

    def is_possible(one: str) -> bool:
        return one.split()[0][1:] in known if one.startswith("-") else takes_settings

    for spelt in (f"{name} {value}", f"{name} {value.partition('-')[0]}", name):
        ours = [_with_value(one, value) for one, theirs in INSTEAD.items() if spelt in theirs and is_possible(one)]
        if ours:
            return f" Did you mean {either(ours)}?"
        why = why_not(spelt)
        if why:
            return why
    return ""


def without_file(word: str) -> str:
    """The problem with a setting of own code, such as focal.gamma=3, where USE names no file."""
    key, _, value = word.partition("=")
    name = key.rpartition(".")[2]  # of another program, such as trainer.max_epochs=3
    advice = f" Did you mean -{name}?" if name in BY_NAME else by_table(name, value, BY_NAME)
    return f"{word}: no such setting; one of your own code needs its file: -use FILE.{advice}"


def why_not(spelt: str) -> str:
    """Why there is no such flag, word or key here, or no longer; '' if the table does not say it."""
    for table, words in ((ABSENT, ""), (GONE, "It is gone: ")):
        for why, names in table.items():
            if spelt in names:
                return f" {words}{why}."
    return ""


def _with_value(ours: str, value: str) -> str:
    """`ours`, or for -amp or a setting without a value, the same with `value`, if it allows this value."""
    ours, also, more = ours.partition(" and ")
    return f"{_valued(ours, value)}{also}{more}"


def _valued(ours: str, value: str) -> str:
    if ours == "-amp" and value and amp_settings_of(value) is not None:
        return f"-amp {value}"
    if ours.startswith("-") or "=" in ours:
        return ours
    if not value:
        usual = "true" if "true" in allowed(ours) else ANY_VALUE
        return f"{ours}={usual}"
    try:
        Config.model_validate(nested({ours: value}))
    except ValidationError:
        return f"{ours}={ANY_VALUE}"
    return f"{ours}={value}"


def _setting_for(key: str) -> str:
    """Our setting for a key of another program, such as one in timm's args.yaml; '' if there is none."""
    name = key.rpartition(".")[2].casefold()
    ours = next((one for one, theirs in INSTEAD.items() if name in theirs), f"-{name}")
    if not ours.startswith("-"):
        return ours.partition(" and ")[0].partition("=")[0]
    flag = BY_NAME.get(ours[1:])
    return flag.keys[0] if flag and flag.keys else ""


def unknown_keys(given: Mapping[str, Entry], unknown: Mapping[str, Entry]) -> list[str]:
    """One line per key; the keys of a model that vitamp does not build are reported with its MODEL.TYPE."""
    kind = type_of(given)
    foreign = [key for key in unknown if key.startswith("MODEL.") and not closest(key, settings(), 0.9)]
    of_type = foreign if kind not in ours() else []
    rest = {key: one.source for key, one in unknown.items() if key not in of_type}
    lines = []
    for key, source in rest.items():
        advice = why_not(key) or why_not(key.rpartition(".")[2].casefold()) or suggest(key, _setting_for(key))
        lines.append(f"{source}: unknown key {key}.{advice}")
    if of_type:
        left_out = ", ".join(of_type[:6]) + (", ..." if of_type[6:] else "")
        lines.append(
            f"{given[TYPE].source}: MODEL.TYPE {kind} is not one of {', '.join(ours())}, nor has a family of "
            "docs/migrating.md these keys. To train a model of timm, set MODEL.NAME (-list_models "
            f"'*{kind}*' lists names) and leave out MODEL.TYPE, {left_out}"
        )
    return lines


def unrecognised(
    text: str,
    before: Flag | None,
    known: Mapping[str, Flag],
    takes_settings: bool,
    convert: Callable[[str, Flag, str], Any],
) -> UserError:
    """The error for a word, after the flag `before`, that is neither a flag, nor a flag's value, nor KEY=VALUE.

    `convert`: as `value_of` in utils/cli.py.
    """
    key, separator, value = text.partition("=")
    name = key.replace("-", "_")
    if text.endswith((".yaml", ".yml")) and "cfg" in known:
        advice = f"Did you mean -cfg {text}?"
    elif name in known:
        advice = _flag_without_dash(text, known[name], convert)
    elif separator and takes_settings:
        advice = (by_table(name, value, known) or _similar_setting(key, value)).lstrip()
    else:
        advice = _advice_on_path(text, known)
        if not advice and before is not None and before.name == "amp":
            advice = amp_advice(text)
        elif not advice and before is not None and not before.value:
            advice = f"-{before.name} takes no value."
    if not advice:
        forms = "-flag value or KEY=VALUE" if takes_settings else "-flag value"
        advice = f"Arguments have the form {forms}; -h lists the flags."
    return UserError(f"unrecognised argument '{text}'. {advice}")


def _flag_without_dash(text: str, flag: Flag, convert: Callable[[str, Flag, str], Any]) -> str:
    key, separator, value = text.partition("=")
    name = key.replace("-", "_")
    if not separator or not flag.value:
        return f"Did you mean -{name}?"
    try:
        convert(f"-{name}", flag, value)
    except UserError as error:
        return str(error)
    return f"Did you mean -{text}?"


def _advice_on_path(text: str, known: Mapping[str, Flag]) -> str:
    """What a word may be that names a file or folder; '' for another."""
    if is_run_folder(Path(text)):
        read_by = f"`{tool('evaluate')} {text}` evaluates it, `{tool('report')} RUN RUN` compares two"
        return f"It is a run: training takes it as -resume {text}, {read_by}."
    if "data_path" in known and Path(text).exists():
        return f"Did you mean -data_path {text}?"
    if "data_path" in known and "/" in text:
        return "There is no such file or folder for -data_path."
    return ""


def _similar_setting(key: str, value: str) -> str:
    name = key.rpartition(".")[2]
    names = [one.rpartition(".")[2] for one in settings()]
    similar = suggest(key.upper()).replace("?", f"={value}?") if closest(name, names, CLOSE_WORD) else ""
    return similar or " Settings have the form KEY=VALUE, such as TRAIN.BASE_LR=1e-4."


def amp_advice(value: str) -> str:
    """Advice on what to write instead of `-amp value`."""
    of_others = value.casefold() in ("none", "null", "0", "1")  # on and off elsewhere: a similar word is no help
    guess = "" if of_others else nearest(value, AMP_WORDS.split())
    return f"{guess} -amp alone turns AMP on; its values are {AMP_WORDS}.".lstrip()
