"""The command line of every program: `-flag value`, `-flag=value`, `--flag` and `KEY=VALUE` words, in any order.

argparse, built from the table in utils/flags.py, converts values and writes -h. Before it, `split` separates the
KEY=VALUE words and puts each flag and its value into one word. argparse cannot do this: it has no optional value that
only some words can be (`-amp O1`, `-amp SEED=1`), distinguishes `-` from `_`, and does not suggest a flag for a typo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from utils.config.keys import default_of, settings
from utils.errors import EXIT_DONE, UserError, either, nearest
from utils.flags import BY_NAME, FLAGS, IGNORED, RANK_FLAGS, Action, Flag, Positional
from utils.precisions import AMP_WORDS, amp_settings_of
from utils.program import INSTALLED, help_here, version

WIDTH = 100
"""Columns of -h."""
BOOLEANS = {"true", "false", "none", "null", "0", "1"}
"""Values for on and off in other programs: after -amp, a similarly spelt value is no helpful suggestion."""

WORD = re.compile(r"([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*|[A-Za-z_]\w*\.[a-z_]\w*)=(.*)", re.DOTALL)
"""A setting, or one of the user's own code (focal.gamma=1.5)"""
FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line; its settings are not checked yet."""

    cfg: str | None = None
    flags: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Dotted key -> (value, the flag that gave it)."""
    words: dict[str, str] = field(default_factory=dict)
    """Dotted key -> the text after `=`."""
    action: Action = "train"
    pattern: str | None = None
    """The pattern of -list_models."""
    trust: bool = False
    """-trust: execute the user's own code in the folder of a run."""
    ranks: dict[str, Any] = field(default_factory=dict)
    """-host, -port, -rank and -world_size, for utils.distributed.world.read_world."""


class Parser(argparse.ArgumentParser):
    """argparse with the rules of this module.

    `groups`: flags by their heading in -h. `hidden`: flags missing in -h. `settings`: whether KEY=VALUE is allowed.
    """

    def __init__(
        self,
        program: str,
        about: str,
        groups: Mapping[str, Sequence[Flag]],
        hidden: Sequence[Flag] = (),
        positionals: Sequence[Positional] = (),
        settings: bool = True,
        end: str | None = None,
    ) -> None:
        usage = ["python", program, *(f"{one.metavar}{' ...' * (one.nargs in ('+', '*'))}" for one in positionals)]
        usage += ["[-flag value ...]", *["[KEY=VALUE ...]"] * settings]
        super().__init__(
            program,
            help_here(" ".join(usage)).replace("%", "%%"),
            help_here(about) if about else about,
            end,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Layout,
        )
        self.settings, self.positionals = settings, positionals
        self.known: dict[str, Flag] = {}
        """Flags by all their names."""
        for title, flags in groups.items():
            group = self.add_argument_group(title)
            for one in positionals if title == next(iter(groups)) else ():
                options = {"metavar": one.metavar, "nargs": one.nargs, "type": partial(_value, one.metavar, one)}
                group.add_argument(one.name, help=_escaped(one.about), **options)
            for flag in flags:
                self._add(group, flag, _escaped(help_text(flag)))
        for flag in (*hidden, IGNORED):
            if flag.name not in self.known:
                self._add(self, flag, argparse.SUPPRESS)

    def _add(self, group: Any, flag: Flag, text: str) -> None:
        for name in (flag.name, *flag.also):
            self.known.setdefault(name, flag)
        options: dict[str, Any] = {"dest": flag.name, "required": flag.required, "help": text, "action": "store_true"}
        if flag.value:
            options |= {"action": "append" if flag.append else "store", "metavar": flag.value}
            options["type"] = partial(_value, f"-{flag.name}", flag)
            options |= {"nargs": "?", "const": flag.const} if flag.optional_value else {}
        group.add_argument(f"-{flag.name}", f"--{flag.name}", **options)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values of flags and positional arguments by name, and the KEY=VALUE words. -h prints and exits with 0.

        After `--`, every word is positional: `predict.py RUN -- A=b.png`.
        """
        end = argv.index("--") if self.positionals and "--" in argv else len(argv)
        argv, files = argv[:end], argv[end + 1 :]
        if any(match and match[1] in ("h", "help") for match in map(FLAG.fullmatch, argv)):
            print(self.format_help(), end="")
            sys.exit(EXIT_DONE)
        flags: list[str] = []
        positionals: list[str] = []
        words: dict[str, str] = {}
        before: Flag | None = None
        many = any(one.nargs in ("+", "*") for one in self.positionals)
        for flag, value in split(argv, self.known, self.settings):
            if flag is not None:
                flags.append(f"--{flag.name}" if value is None else f"--{flag.name}={value}")
            elif self.settings and (match := WORD.fullmatch(value)) and _is_setting(match[1]):
                words[match[1]] = match[2]
            elif (len(positionals) < len(self.positionals) or many) and not (self.settings and "=" in value):
                positionals.append(value)
            else:
                raise _unrecognised(value, before, self)
            before = flag
        positionals += files
        return vars(self.parse_args([*flags, *["--"] * bool(positionals), *positionals])), words

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; -h lists all arguments.")


def _is_setting(key: str) -> bool:
    """Whether a key is not one of ours in small letters, for which there is a suggestion."""
    return key.isupper() or key.upper() not in settings()


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


def help_text(flag: Flag) -> str:
    """A flag's text in -h, with its default."""
    default = flag.default_text or flag.default
    if default is None and flag.keys and flag.keys[0] in settings():
        default = default_of(flag.keys[0])
    about = help_here(flag.about)
    return about if default is None or isinstance(default, bool) else f"{about} (default: {default})"


def _value(name: str, argument: Flag | Positional, text: str) -> Any:
    if isinstance(argument, Flag) and not text and not argument.optional_value:
        raise UserError(f"{name} needs a value: {name} {argument.value} ({argument.about})")
    if argument.choices and text not in argument.choices:
        raise UserError(f"{name} {text}: takes {either(argument.choices)}.{nearest(text, argument.choices)}")
    try:
        return argument.kind(text)
    except ValueError as error:
        raise UserError(f"{name} {text}: {error}.") from None


def split(
    argv: Sequence[str], known: Mapping[str, Flag], takes_settings: bool = True
) -> Iterator[tuple[Flag | None, Any]]:
    """(flag, its value or None) for each flag, (None, word) for each other word. UserError with all unknown flags."""
    rest, unknown = list(argv), {}
    names = [name for name in known if name != IGNORED.name]
    while rest:
        text = rest.pop(0)
        if text == "--":
            yield from ((None, word) for word in rest)
            break
        match = FLAG.fullmatch(text)
        if match is None:
            yield None, text
            continue
        flag, value = known.get(match[1].replace("-", "_")), match[2]
        if flag is None:
            name = match[1].replace("-", "_")
            if value is None:  # its values: all words up to the next flag or KEY=VALUE
                values = []
                while rest and not FLAG.fullmatch(rest[0]) and not WORD.fullmatch(rest[0]) and rest[0] != "--":
                    values.append(rest.pop(0))
                value = ",".join(values)
            from utils.foreign_flags import suggest_flag

            unknown[text.partition("=")[0]] = suggest_flag(name, value, names, takes_settings)
            continue
        if value is not None and not flag.value:
            raise UserError(f"{text}: -{flag.name} takes no value; leave out '={value}'")
        # `-ngpus -1` is a value; a value that begins like a flag needs `-flag=value`.
        if (
            value is None
            and flag.value
            and rest
            and not FLAG.fullmatch(rest[0])
            and (not flag.optional_value or flag.accepts(rest[0]))
        ):
            value = rest.pop(0)
        yield flag, "" if value is None and flag.value and not flag.optional_value else value
    lines = [f"{flag}.{suggestion}" for flag, suggestion in unknown.items()]
    if len(lines) == 1:
        raise UserError(f"unknown flag {lines[0]} -h lists all flags.")
    if lines:
        found = "".join(f"\n  {line}" for line in lines)
        raise UserError(
            f"{len(lines)} unknown flags; -h lists all flags, docs/migrating.md those of other programs:{found}"
        )


def parse(argv: Sequence[str], program: str) -> CommandLine:
    """Parse the command line of an entry script. -h prints and exits with code 0."""
    return command_line(*_entry_parser(program).read(argv))


def command_line(given: Mapping[str, Any], words: dict[str, str]) -> CommandLine:
    """A CommandLine of those flags in `given` that entry scripts have, and of KEY=VALUE words."""
    flags: dict[str, tuple[Any, str]] = {}
    for flag in (flag for name, flag in BY_NAME.items() if name in given):  # batch_size before batch_size_eval
        source, value = f"-{flag.name}", given[flag.name]
        if flag.append:
            flags |= {key: (setting, source) for one in value for key, setting in amp_settings(one).items()}
        else:
            flags |= dict.fromkeys(flag.keys, (value, source)) | {key: (own, source) for key, own in flag.sets}
    actions = [flag for name in given if (flag := BY_NAME.get(name)) and flag.action]
    if len(actions) > 1:
        names = " and ".join(f"-{flag.name}" for flag in actions)
        raise UserError(f"{names} exclude each other; give only one")
    action = actions[0].action if actions else None
    pattern, trust = given.get("list_models"), "trust" in given
    ranks = {flag.name: given[flag.name] for flag in RANK_FLAGS if flag.name in given}
    return CommandLine(given.get("cfg"), flags, words, action or "train", pattern, trust, ranks)


def amp_settings(value: str) -> dict[str, Any]:
    """The settings that `-amp value` stands for."""
    settings = amp_settings_of(value)
    if settings is None:
        raise UserError(f"-amp={value}: {_amp_advice(value)}")
    return {f"AMP.{key}": setting for key, setting in settings.items()}


def _amp_advice(value: str) -> str:
    """Advice on what to write instead of `-amp value`."""
    guess = "" if value.casefold() in BOOLEANS else nearest(value, AMP_WORDS.split()).lstrip() + " "
    return f"{guess}-amp alone turns AMP on; its values are {AMP_WORDS}.".lstrip()


def _unrecognised(text: str, before: Flag | None, parser: Parser) -> UserError:
    """The error for a word that is neither a flag, nor a flag's value, nor KEY=VALUE, with a suggestion."""
    key, separator, value = text.partition("=")
    name = text.replace("-", "_").partition("=")[0]
    forms = "-flag value or KEY=VALUE" if parser.settings else "-flag value"
    advice = f" Arguments have the form {forms}; -h lists the flags."
    if text.endswith((".yaml", ".yml")) and "cfg" in parser.known:
        advice = f" Did you mean -cfg {text}?"
    elif name in parser.known:
        advice = f" Did you mean -{text if separator else name}?"
    elif separator and parser.settings:
        from utils.config.words import suggest

        suggestion = suggest(key.upper()).replace("?", f"={value}?")
        advice = suggestion or " Settings have the form KEY=VALUE, such as TRAIN.BASE_LR=1e-4."
    elif before is not None and before.name == "amp":
        advice = f" {_amp_advice(text)}"
    elif before is not None and not before.value:
        advice = f" -{before.name} takes no value."
    return UserError(f"unrecognised argument '{text}'.{advice}")


def _entry_parser(program: str) -> Parser:
    return Parser(program, ABOUT.format(program=program), FLAGS, end="\n".join(textwrap.wrap(USAGE_END, WIDTH)))


def usage(program: str) -> str:
    """The text of -h."""
    return _entry_parser(program).format_help().rstrip("\n")


ABOUT = """\
Trains a Vision Transformer, with -amp in mixed precision. Examples:

  python {program} -cfg configs/vit_digits.yaml -amp
  python {program} -cfg configs/vit_small_patch16_224.yaml -data_path /data/imagenet -amp
  python {program} -cfg configs/vit_digits.yaml -output output/mine -resume auto
  python {program} -eval -resume output/mine
  python {program} -cfg configs/vit_digits.yaml -amp -dry_run TRAIN.BASE_LR=1e-3"""

USAGE_END = (
    "-flag value, -flag=value and --flag value are equivalent, and so are - and _ inside a name. KEY=VALUE, such as "
    "TRAIN.BASE_LR=1e-4, sets any setting in docs/config.md and overrides files and flags. Guide: README.md; error "
    "messages: docs/troubleshooting.md. "
) + ("vitamp -h lists the other tools." if INSTALLED else "Other tools are in scripts/; -h describes each.")


def version_text() -> str:
    """The output of -version, without importing torch, which takes seconds."""
    lines = [f"vitamp {version()}"]
    for package in ("torch", "timm"):
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)
