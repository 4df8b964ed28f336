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
from utils.config.paddlevit import resizable_families
from utils.config.read import TYPE, Entry, type_of
from utils.config.schema import Config
from utils.config.words import allowed, suggest
from utils.errors import UserError, closest, either, nearest
from utils.flags import BY_NAME, IGNORED, Flag
from utils.precisions import AMP_WORDS, amp_settings_of
from utils.program import tool
from utils.record.run_folder import is_run_folder
from vitamp.files import suggested_path

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
INSTEAD: dict[str, list[str]] = TABLE["instead"]
"""Ours -> spellings of other programs. Ours is `-flag`, `-flag value`, `KEY` or `KEY=value`, and perhaps ` and ...`."""
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
    """Return the error for flags that this program does not have, and for words that are no arguments.

    unknown: the flags, each with its values
    strays: an error for each word that is neither a flag nor a setting
    known: the flags of this program
    takes_settings: whether this program takes KEY=VALUE words
    """
    names = [name for name in known if name != IGNORED.name]
    # The dict lists a flag that is given twice only once.
    lines = [f"{flag}.{suggest_flag(flag, value, names, takes_settings)}" for flag, value in dict(unknown).items()]
    end = "-h lists all flags, docs/migrating.md those of other programs"
    if len(lines) + len(strays) == 1:
        return strays[0] if strays else UserError(f"unknown flag {lines[0]} {end}.")
    noun = "arguments" if strays else "flags"
    all_lines = [str(stray) for stray in strays] + lines
    return UserError(f"{len(all_lines)} unknown {noun}; {end}:" + "".join(f"\n  {line}" for line in all_lines))


def suggest_flag(flag: str, value: str, known: list[str], takes_settings: bool) -> str:
    """Suggest one of our flags or settings for an unknown flag; '' if nothing is close.

    For example, ' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`.

    value: the flag's value; '' if it has none
    known: names of the flags of this program
    takes_settings: whether this program takes KEY=VALUE words
    """
    name = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
    advice = advice_from_table(name, value, known, takes_settings)
    if advice:
        return advice

    keys_of_name = [key for key in settings() if takes_settings and key.rpartition(".")[2] == name.upper()]
    if len(keys_of_name) == 1:
        return f" Did you mean {_complete_with_value(keys_of_name[0], value)}?"
    nearly_equal = closest(name, known, cutoff=0.9)
    if nearly_equal:
        return f" Did you mean -{nearly_equal}?"
    if len(keys_of_name) > 1:
        text = value or ANY_VALUE
        return suggest(name.upper()).replace("?", f"={text}?")

    # -use executes files, so that it is not suggested for a name of several words, such as use_amp.
    harmless = [known_name for known_name in known if known_name != "use" or "_" not in name]
    similar = closest(name, harmless, CLOSE)
    return f" Did you mean -{similar}?" if similar else ""


def advice_from_table(name: str, value: str, known: Iterable[str], takes_settings: bool = True) -> str:
    """Look up a flag or word of another program in foreign_flags.yaml; return advice, or '' if it is not there.

    The advice suggests ours, such as ' Did you mean TRAIN.SMOOTHING=0.1?', or says why there is none.

    name, value: the flag or word without its dashes, and its value or ''
    known: names of the flags of this program; others are not suggested
    takes_settings: whether this program takes KEY=VALUE words
    """

    def is_possible(replacement: str) -> bool:
        """Whether this program has the flag, such as `-amp` in `-amp fp16`, or takes the setting."""
        if replacement.startswith("-"):
            return replacement.split()[0][1:] in known
        return takes_settings

    # The table lists `name value` for special values, and `name` for all others. The part of a value before its `-` is
    # a special value, too: `precision 16-mixed`.
    for spelling in (f"{name} {value}", f"{name} {value.partition('-')[0]}", name):
        suggestions = [
            _complete_with_value(replacement, value)
            for replacement, spellings in INSTEAD.items()
            if spelling in spellings and is_possible(replacement)
        ]
        if suggestions:
            return f" Did you mean {either(suggestions)}?"
        why = why_absent(spelling)
        if why:
            return why
    return ""


def without_file(word: str) -> str:
    """Describe the problem with a setting of the user's own code, such as focal.gamma=3, if USE names no file."""
    key, _, value = word.partition("=")
    name = key.rpartition(".")[2]  # of another program, such as trainer.max_epochs=3
    advice = f" Did you mean -{name}?" if name in BY_NAME else advice_from_table(name, value, BY_NAME)
    return f"{word}: no such setting; one of your own code needs its file: -use FILE.{advice}"


def why_absent(spelling: str) -> str:
    """Say why there is no such flag, word or key here, or no longer; '' if foreign_flags.yaml gives no reason."""
    for table, beginning in ((ABSENT, ""), (GONE, "It is gone: ")):
        for why, names in table.items():
            if spelling in names:
                return f" {beginning}{why}."
    return ""


def _complete_with_value(replacement: str, value: str) -> str:
    """Complete a suggested flag or setting with the value that the user gave to the flag of another program.

    replacement: a key of INSTEAD, such as `-amp`, `TRAIN.SMOOTHING` or `KEY=VALUE and -flag`; only the first part
        before `and` gets the value
    value: '' if the user gave none
    """
    first, also, more = replacement.partition(" and ")
    return f"{_flag_or_setting_with_value(first, value)}{also}{more}"


def _flag_or_setting_with_value(replacement: str, value: str) -> str:
    """Return `KEY=value` for a key without a value, or `-amp value`; other flags and settings stay.

    If the setting does not take this value, it means something else there: then `KEY=...` is returned.
    """
    if replacement == "-amp" and value and amp_settings_of(value) is not None:
        return f"-amp {value}"
    is_complete = replacement.startswith("-") or "=" in replacement
    if is_complete:
        return replacement
    key = replacement
    if not value:
        switched_on = "true" if "true" in allowed(key) else ANY_VALUE
        return f"{key}={switched_on}"
    try:
        Config.model_validate(nested({key: value}))
    except ValidationError:
        return f"{key}={ANY_VALUE}"
    return f"{key}={value}"


def _setting_for(foreign_key: str) -> str:
    """Return the key of our setting for a key of another program, such as timm's `smoothing`; '' if there is none."""
    name = foreign_key.rpartition(".")[2].casefold()
    # Keys of INSTEAD are `-flag value`, `KEY` or `KEY=value`, perhaps followed by ` and ...`.
    replacement = next((ours for ours, spellings in INSTEAD.items() if name in spellings), f"-{name}")
    if not replacement.startswith("-"):
        setting = replacement.partition(" and ")[0]
        return setting.partition("=")[0]
    flag = BY_NAME.get(replacement[1:])
    return flag.keys[0] if flag and flag.keys else ""


def unknown_keys(given: Mapping[str, Entry], unknown: Mapping[str, Entry]) -> list[str]:
    """Return one line for each unknown key, with a suggestion.

    For a model that vitamp does not build, all keys of the model share one line, which is about its MODEL.TYPE.

    given: the settings of the run, by dotted key
    unknown: the entries whose keys are no settings
    """
    family_name = type_of(given)
    model_keys = [key for key in unknown if key.startswith("MODEL.") and not closest(key, settings(), 0.9)]
    keys_of_foreign_model = model_keys if family_name not in resizable_families() else []
    lines = []
    for key, entry in unknown.items():
        if key in keys_of_foreign_model:
            continue
        name = key.rpartition(".")[2].casefold()
        advice = why_absent(key) or why_absent(name) or suggest(key, translation=_setting_for(key))
        lines.append(f"{entry.source}: unknown key {key}.{advice}")
    if keys_of_foreign_model:
        left_out = ", ".join(keys_of_foreign_model[:6])
        if len(keys_of_foreign_model) > 6:
            left_out += ", ..."
        lines.append(
            f"{given[TYPE].source}: MODEL.TYPE {family_name} is not one of {', '.join(resizable_families())}, nor has "
            "a family of docs/migrating.md these keys. To train a model of timm, set MODEL.NAME (-list_models "
            f"'*{family_name}*' lists names) and leave out MODEL.TYPE, {left_out}"
        )
    return lines


def unrecognised(
    text: str,
    before: Flag | None,
    known: Mapping[str, Flag],
    takes_settings: bool,
    convert: Callable[[str, Flag, str], Any],
) -> UserError:
    """Return the error for a word that is neither a flag, nor a flag's value, nor a KEY=VALUE word.

    text: the word
    before: the flag directly before the word; None if there is none
    known: name -> flag, of this program
    takes_settings: whether this program takes KEY=VALUE words
    convert: a function as `value_of` in utils/cli.py, which raises a UserError for a value that a flag does not take
    """
    key, separator, value = text.partition("=")
    name = key.replace("-", "_")
    if text.endswith((".yaml", ".yml")) and "cfg" in known:
        advice = f"Did you mean -cfg {text}?"
    elif name in known:
        advice = _advice_on_missing_dash(text, known[name], convert)
    elif separator and takes_settings:
        advice = (advice_from_table(name, value, known) or _similar_setting(key, value)).lstrip()
    else:
        advice = _advice_on_path(text, known)
        # The word may have been meant as a value of the flag before it.
        if not advice and before is not None and before.name == "amp":
            advice = amp_advice(text)
        elif not advice and before is not None and not before.takes_value:
            advice = f"-{before.name} takes no value."
    if not advice:
        forms = "-flag value or KEY=VALUE" if takes_settings else "-flag value"
        advice = f"Arguments have the form {forms}; -h lists the flags{suggested_path(Path(text))}."
    return UserError(f"unrecognised argument '{text}'. {advice}")


def _advice_on_missing_dash(text: str, flag: Flag, convert: Callable[[str, Flag, str], Any]) -> str:
    """Return advice for `name` or `name=value` where the flag `-name` was meant: what to write, or why it is wrong.

    convert: as for `unrecognised`
    """
    key, separator, value = text.partition("=")
    name = key.replace("-", "_")
    if not separator or not flag.takes_value:
        return f"Did you mean -{name}?"
    try:
        convert(f"-{name}", flag, value)
    except UserError as error:
        return str(error)
    return f"Did you mean -{text}?"


def _advice_on_path(text: str, known: Mapping[str, Flag]) -> str:
    """Return advice for a word that is a path: how to give a run or a folder of data; '' for any other word."""
    if is_run_folder(Path(text)):
        uses_of_run = f"`{tool('evaluate')} {text}` evaluates it, `{tool('report')} RUN RUN` compares two"
        return f"It is a run: training takes it as -resume {text}, {uses_of_run}."
    if "data_path" in known and Path(text).exists():
        return f"Did you mean -data_path {text}?"
    if "data_path" in known and "/" in text:
        return f"There is no such file or folder for -data_path{suggested_path(Path(text))}."
    return ""


def _similar_setting(key: str, value: str) -> str:
    """Suggest a setting for an unknown KEY=VALUE word; if none is similar, explain the form of settings."""
    name = key.rpartition(".")[2]
    names = [setting_key.rpartition(".")[2] for setting_key in settings()]
    suggestion = ""
    if closest(name, names, CLOSE_WORD):
        suggestion = suggest(key.upper()).replace("?", f"={value}?")
    return suggestion or " Settings have the form KEY=VALUE, such as TRAIN.BASE_LR=1e-4."


def amp_advice(value: str) -> str:
    """Advice on what to write instead of `-amp value`."""
    # These words mean on and off in other programs: a word that merely looks similar is no help.
    is_foreign_switch = value.casefold() in ("none", "null", "0", "1")
    guess = "" if is_foreign_switch else nearest(value, AMP_WORDS.split())
    return f"{guess} -amp alone turns AMP on; its values are {AMP_WORDS}.".lstrip()
