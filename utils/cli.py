"""The command line: `-flag value`, `-flag=value`, `--flag` and `KEY=VALUE` words, in any order, for every program.

argparse, built from the table of utils/flags.py, converts values and writes -h. Before it, `pieces` takes the
KEY=VALUE words out and puts each flag into one word: argparse knows neither an optional value that only some words
can be (`-amp O1`, `-amp SEED=1`), nor `-` and `_` as alike, nor a suggestion for a mistyped flag.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from utils.config.keys import default_of, settings, suggest
from utils.errors import EXIT_DONE, UserError, nearest
from utils.flags import BY_NAME, FLAGS, IGNORED, Action, Flag, Place
from utils.foreign_flags import hint
from utils.log import log
from utils.precisions import AMP_WORDS, amp_settings_of

__all__ = ["BY_NAME", "FLAG", "FLAGS", "WORD", "CommandLine", "Flag", "Parser", "Place", "parse", "pieces", "usage"]

WIDTH = 100
"""Of all that -h prints."""
BOOLEANS = {"true", "false", "none", "null", "0", "1"}
"""Words that others take for on and off: what is spelt like them is not what is meant."""

WORD = re.compile(r"([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class CommandLine:
    """What the user asked for; the settings among it are not checked yet."""

    cfg: str | None = None
    flags: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Dotted key -> (value, the flag it came by)."""
    words: dict[str, str] = field(default_factory=dict)
    """Dotted key -> the text behind `=`."""
    action: Action = "train"
    pattern: str | None = None
    """-list_models: which ones."""
    gpus: str | None = None
    """-gpus, for utils.gpus.show_only."""


class Parser(argparse.ArgumentParser):
    """`groups`: flags by the heading that -h shows them under. `hidden`: flags it takes and -h leaves out.

    `settings`: whether KEY=VALUE words set something.
    """

    def __init__(
        self,
        program: str,
        about: str,
        groups: Mapping[str, Sequence[Flag]],
        hidden: Sequence[Flag] = (),
        places: Sequence[Place] = (),
        settings: bool = True,
        end: str | None = None,
    ) -> None:
        usage = ["python", program, *(f"{place.shown}{' ...' * (place.many in ('+', '*'))}" for place in places)]
        usage += ["[-flag value ...]", *["[KEY=VALUE ...]"] * settings]
        super().__init__(
            program,
            " ".join(usage).replace("%", "%%"),
            about,
            end,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Layout,
        )
        self.settings, self.places = settings, places
        self.known: dict[str, Flag] = {}
        """By every name it goes by."""
        for title, flags in groups.items():
            group = self.add_argument_group(title)
            for place in places if title == next(iter(groups)) else ():
                how = {"metavar": place.shown, "nargs": place.many, "type": partial(_value, place.shown, place)}
                group.add_argument(place.name, help=_escaped(place.about), **how)
            for flag in flags:
                self._add(group, flag, _escaped(f"{flag.about}{_default(flag)}"))
        for flag in (*hidden, IGNORED):
            if flag.name not in self.known:
                self._add(self, flag, argparse.SUPPRESS)

    def _add(self, group: Any, flag: Flag, about: str) -> None:
        for name in (flag.name, *flag.also, *flag.old):
            self.known.setdefault(name, flag)
        how: dict[str, Any] = {"action": "store_true"}
        if flag.value:
            how = {"action": "append" if flag.adds_up else "store", "metavar": flag.value}
            how["type"] = partial(_value, f"-{flag.name}", flag)
            how |= {"nargs": "?", "const": flag.alone} if flag.optional else {}
        group.add_argument(f"-{flag.name}", f"--{flag.name}", dest=flag.name, required=flag.required, help=about, **how)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """What was given: the values of flags and places, by name, and the KEY=VALUE words. -h leaves with code 0."""
        if any(match and match[1] in ("h", "help") for match in map(FLAG.fullmatch, argv)):
            print(self.format_help(), end="")
            sys.exit(EXIT_DONE)
        flags: list[str] = []
        places: list[str] = []
        words: dict[str, str] = {}
        before: Flag | None = None
        for flag, value in pieces(argv, self.known):
            if flag is not None:
                flags.append(f"--{flag.name}" if value is None else f"--{flag.name}={value}")
            elif self.settings and WORD.fullmatch(value):
                key, _, words[key] = value.partition("=")
            elif self._has_room(places) and not (self.settings and "=" in value):
                places.append(value)
            else:
                raise _stray(value, before, self)
            before = flag
        return vars(self.parse_args([*flags, *["--"] * bool(places), *places])), words

    def _has_room(self, places: Sequence[str]) -> bool:
        return len(places) < len(self.places) or any(place.many in ("+", "*") for place in self.places)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; -h shows what there is.")


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0] if action.option_strings else ""
        return f"{name} {action.metavar or ''}".strip()

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _default(flag: Flag) -> str:
    default = flag.default
    if default is None and flag.keys and flag.keys[0] in settings():
        default = default_of(flag.keys[0])
    return "" if default is None or isinstance(default, bool) else f" (default {default})"


def _value(name: str, of: Flag | Place, text: str) -> Any:
    if isinstance(of, Flag) and not text and not of.optional:
        raise UserError(f"{name} needs a value: {name} {of.value} ({of.about})")
    if of.choices and text not in of.choices:
        known = f"{', '.join(of.choices[:-1])} or {of.choices[-1]}"
        raise UserError(f"{name} {text}: takes {known}.{nearest(text, of.choices)}")
    try:
        return of.kind(text)
    except ValueError as error:
        raise UserError(f"{name} {text}: {error}.") from None


def pieces(argv: Sequence[str], known: Mapping[str, Flag]) -> Iterator[tuple[Flag | None, Any]]:
    """(flag, its value or None) for each flag, (None, text) for each other word."""
    rest = list(argv)
    while rest:
        text = rest.pop(0)
        if text == "--":
            yield from ((None, word) for word in rest)
            return
        match = FLAG.fullmatch(text)
        if match is None:
            yield None, text
            continue
        flag, value = _flag(text, match[1].replace("-", "_"), known, rest), match[2]
        if value is not None and not flag.value:
            raise UserError(f"{text}: -{flag.name} takes no value; leave out '={value}'")
        # `-ngpus -1` is a value; a value that begins like a flag needs `-flag=value`.
        if value is None and flag.value and rest and not FLAG.fullmatch(rest[0]) and _fits(flag, rest[0]):
            value = rest.pop(0)
        yield flag, "" if value is None and flag.value and not flag.optional else value


def _fits(flag: Flag, text: str) -> bool:
    return not flag.optional or flag.fits(text)


def _flag(text: str, name: str, known: Mapping[str, Flag], rest: Sequence[str]) -> Flag:
    flag = known.get(name)
    if flag is None:
        spelling, equals, value = text.partition("=")
        if not equals and rest and not FLAG.fullmatch(rest[0]) and not WORD.fullmatch(rest[0]):
            value = rest[0]
        names = [name for name in known if name != IGNORED.name]
        raise UserError(f"unknown flag {spelling}.{hint(name, value, names)} -h lists all flags.")
    if name in flag.old:
        log.warning("-%s is now called -%s.", name, flag.name)
    return flag


def parse(argv: Sequence[str], program: str) -> CommandLine:
    """Read the command line of an entry script. -h prints and leaves with code 0."""
    return command_line(*_entry_parser(program).read(argv))


def command_line(given: Mapping[str, Any], words: dict[str, str]) -> CommandLine:
    """The flags among `given` that the entry scripts know, and KEY=VALUE words."""
    flags: dict[str, tuple[Any, str]] = {}
    for flag in (flag for name, flag in BY_NAME.items() if name in given):  # batch_size before batch_size_eval
        source, value = f"-{flag.name}", given[flag.name]
        if flag.adds_up:
            flags |= {key: (setting, source) for how in value for key, setting in amp_settings(how).items()}
        else:
            flags |= dict.fromkeys(flag.keys, (value, source))
    actions = [flag for name in given if (flag := BY_NAME.get(name)) and flag.action]
    if len(actions) > 1:
        names = " and ".join(f"-{flag.name}" for flag in actions)
        raise UserError(f"{names} exclude each other; give one of them")
    action = actions[0].action if actions else None
    return CommandLine(given.get("cfg"), flags, words, action or "train", given.get("list_models"), given.get("gpus"))


def amp_settings(value: str) -> dict[str, Any]:
    """The settings that -amp stands for with `value`."""
    settings = amp_settings_of(value)
    if settings is None:
        raise UserError(f"-amp={value}: {_about_amp(value)}")
    return {f"AMP.{key}": setting for key, setting in settings.items()}


def _about_amp(value: str) -> str:
    """What to write instead of `-amp value`."""
    guess = "" if value.casefold() in BOOLEANS else nearest(value, AMP_WORDS.split()).lstrip() + " "
    return f"{guess}-amp alone switches it on; leave it out for fp32; or give one of: {AMP_WORDS}.".lstrip()


def _stray(text: str, before: Flag | None, parser: Parser) -> UserError:
    """For a word that is neither a flag, nor a flag's value, nor KEY=VALUE: say what it might have been."""
    key, separator, value = text.partition("=")
    name = text.replace("-", "_").partition("=")[0]
    takes = "Settings are given as -flag value or KEY=VALUE" if parser.settings else "Options are given as -flag value"
    about = f" {takes}; -h lists the flags."
    if text.endswith((".yaml", ".yml")) and "cfg" in parser.known:
        about = f" Did you mean -cfg {text}?"
    elif name in parser.known:
        about = f" Did you mean -{text if separator else name}?"
    elif separator and parser.settings:
        close = suggest(key.upper()).replace("?", f"={value}?")
        about = close or " Settings are given as KEY=VALUE, such as TRAIN.BASE_LR=1e-4."
    elif before is not None and before.name == "amp":
        about = f" {_about_amp(text)}"
    elif before is not None and not before.value:
        about = f" -{before.name} takes no value."
    return UserError(f"unrecognised argument '{text}'.{about}")


def _entry_parser(program: str) -> Parser:
    return Parser(program, ABOUT.format(program=program), FLAGS, end="\n".join(textwrap.wrap(USAGE_END, WIDTH)))


def usage(program: str) -> str:
    """The text of -h."""
    return _entry_parser(program).format_help().rstrip("\n")


ABOUT = """\
Trains a Vision Transformer, in mixed precision with -amp. The usual command lines:

  python {program} -cfg configs/vit_digits.yaml -amp
  python {program} -cfg configs/vit_small_patch16_224.yaml -data_path /data/imagenet -amp
  python {program} -cfg configs/vit_digits.yaml -output output/mine -resume auto
  python {program} -eval -resume output/mine
  python {program} -cfg configs/vit_digits.yaml -amp -dry_run TRAIN.BASE_LR=1e-3"""

USAGE_END = (
    "-flag value, -flag=value and --flag value are alike, and so are - and _ inside a name. KEY=VALUE sets any "
    "setting of docs/config.md and wins over files and flags: TRAIN.BASE_LR=1e-4. Read on: README.md, and "
    "docs/troubleshooting.md where something goes wrong. Tools beside training are in scripts/, each with -h."
)


def version_text() -> str:
    """What -version prints; read without importing torch, which takes seconds."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    lines = [f"vitamp {tomllib.loads(project.read_text(encoding='utf-8'))['project']['version']}"]
    for package in ("torch", "timm"):
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)
