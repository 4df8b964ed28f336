"""The command line of every program: `-flag value`, `-flag=value`, `--flag` and `KEY=VALUE` words, in any order.

argparse, built from the table in utils/flags.py, converts values and writes -h. Before it, `Parser.read` separates the
KEY=VALUE words and puts each flag and its value into one word. argparse cannot do this: it has no optional value that
only some words can be (`-amp O1`, `-amp SEED=1`), distinguishes `-` from `_`, and does not suggest a flag for a typo.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from utils.config.keys import default_of, settings
from utils.errors import EXIT_DONE, UserError, either, nearest
from utils.flags import BY_NAME, FLAGS, IGNORED, RANK_FLAGS, Action, Flag, Positional
from utils.precisions import amp_settings_of
from utils.program import INSTALLED, help_here
from utils.record.run_folder import is_run_folder, versions
from vitamp import __version__
from vitamp.checkpoints import INDEX
from vitamp.meta import META

WIDTH = 100
"""Columns of -h."""

WORD = re.compile(r"([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*|[A-Za-z_]\w*\.[A-Za-z_]\w*)=(.*)", re.DOTALL)
"""A setting, or one of the user's own code (focal.gamma=1.5)"""
FLAG = re.compile(r"--?([A-Za-z][\w-]*|(?<=--)[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
"""One with dots is another program's, such as --trainer.max_epochs."""


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
    """-host, -port, -rank and -world_size, for utils.distributed.launchers.read_world."""

    @property
    def keys(self) -> list[str]:
        """The settings that it gives."""
        return list(self.flags | self.words)


@dataclass
class _Found:
    """The words of a command line, sorted."""

    flags: list[str] = field(default_factory=list)
    """Each with its value in one word"""
    positionals: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    """KEY=VALUE"""
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """Flags of other programs, with their values"""
    strays: list[UserError] = field(default_factory=list)
    before: Flag | None = None
    """The flag that the last word was"""

    def the_folder(self) -> str:
        """The folder that is the value of -data_path, which nothing else may give."""
        named = self.folders + [flag for flag in self.flags if flag.startswith("-data_path=")]
        if "DATA.DATA_PATH" in self.words:
            named.append("DATA.DATA_PATH")
        if len(named) > 1:
            raise UserError(f"{' and '.join(named)} name the data more than once; give one folder.")
        return self.folders[0]


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
        self.settings = settings
        self.positionals = positionals
        self.takes_many = any(one.nargs in ("+", "*") for one in positionals)
        self.takes_folder = settings and all(one.nargs == "?" for one in positionals)
        """Whether a word that is a folder of images is the value of -data_path."""
        self.known: dict[str, Flag] = {}
        """Flags by all their names."""
        super().__init__(
            program,
            help_here(self._usage(program)).replace("%", "%%"),
            help_here(about),
            end,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=WIDTH),
        )
        first = next(iter(groups))
        for title, flags in groups.items():
            group = self.add_argument_group(title)
            if title == first:
                self._add_positionals(group)
            for flag in flags:
                self._add_flag(group, flag, help_text(flag).replace("%", "%%"))
        for flag in (*hidden, IGNORED):
            self._add_flag(self, flag, argparse.SUPPRESS)

    def _usage(self, program: str) -> str:
        usage = ["python", program]
        for one in self.positionals:
            usage.append(f"{one.metavar} ..." if one.nargs in ("+", "*") else one.metavar)
        if self.takes_folder:
            usage.append("[DIR]")
        usage.append("[-flag value ...]")
        if self.settings:
            usage.append("[KEY=VALUE ...]")
        return " ".join(usage)

    def _add_positionals(self, group: argparse._ActionsContainer) -> None:
        for one in self.positionals:
            options: dict[str, Any] = {"metavar": one.metavar, "nargs": one.nargs, "help": one.about}
            group.add_argument(one.name, type=partial(value_of, one.metavar, one), **options)

    def _add_flag(self, group: argparse._ActionsContainer, flag: Flag, text: str) -> None:
        if flag.name in self.known:  # a tool's own, which has the name of a hidden one
            return
        for name in (flag.name, *flag.also):
            self.known.setdefault(name, flag)
        options: dict[str, Any] = {"dest": flag.name, "required": flag.required, "help": text}
        if flag.value:
            options["action"] = "append" if flag.append else "store"
            options["metavar"] = flag.value.strip("[]")
            options["type"] = partial(value_of, f"-{flag.name}", flag)
            if flag.optional_value:
                options["nargs"] = "?"
                options["const"] = flag.const
        else:
            options["action"] = "store_true"
        group.add_argument(f"-{flag.name}", **options)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values of flags and positional arguments by name, and the KEY=VALUE words. -h prints and exits with 0.

        After `--`, every word is positional: `predict.py RUN -- A=b.png`.
        """
        end = argv.index("--") if self.positionals and "--" in argv else len(argv)
        rest = list(argv[:end])
        matches = [FLAG.fullmatch(text) for text in rest]
        if any(match and match[1] in ("h", "help") for match in matches):
            print(self.format_help(), end="")
            sys.exit(EXIT_DONE)
        found = _Found()
        while rest:
            text = rest.pop(0)
            match = FLAG.fullmatch(text)
            if match is None:
                self._sort_word(text, found)
            else:
                self._sort_flag(text, match, rest, found)
        if found.unknown or found.strays:
            from utils.foreign_flags import unknown_flags

            raise unknown_flags(found.unknown, found.strays, self.known, self.settings)
        words = found.flags
        if found.folders:
            words.append(f"-data_path={found.the_folder()}")
        positionals = found.positionals + list(argv[end + 1 :])
        if positionals:
            words.append("--")
        return vars(self.parse_args(words + positionals)), found.words

    def _sort_word(self, text: str, found: _Found) -> None:
        """Sort a word that is no flag."""
        word = WORD.fullmatch(text) if self.settings else None
        takes_another = self.takes_many or len(found.positionals) < len(self.positionals)
        # One of our keys in small letters is a mistake, for which there is a suggestion.
        if word and (word[1].isupper() or word[1].upper() not in settings()):
            found.words[word[1]] = word[2]
        elif self.takes_folder and _may_hold_data(Path(text)):
            found.folders.append(text)
        elif takes_another and not (self.settings and "=" in text):
            found.positionals.append(text)
        else:
            from utils.foreign_flags import unrecognised

            found.strays.append(unrecognised(text, found.before, self.known, self.settings, convert=value_of))
        found.before = None

    def _sort_flag(self, text: str, match: re.Match[str], rest: list[str], found: _Found) -> None:
        """Sort a flag, with its value, which may be the next of the words that are left."""
        flag = self.known.get(match[1].replace("-", "_"))
        found.before = flag
        value = match[2]
        if flag is None:
            theirs = _take_foreign_value(rest) if value is None else value
            found.unknown.append((text.partition("=")[0], theirs))
            return
        if value is None:
            value = self._take_value(flag, rest)
        elif not flag.value:
            raise UserError(f"{text}: -{flag.name} takes no value; leave out '={value}'")
        found.flags.append(f"-{flag.name}" if value is None else f"-{flag.name}={value}")

    def _take_value(self, flag: Flag, rest: list[str]) -> str | None:
        """Remove the next word, if it is the flag's value; None for a flag without one, '' if the value is missing."""
        missing = "" if flag.value and not flag.optional_value else None
        # `-ngpus -1` is a value; a value that begins like a flag needs `-flag=value`.
        if not flag.value or not rest or FLAG.fullmatch(rest[0]):
            return missing
        word = WORD.fullmatch(rest[0]) if self.settings and "=" not in flag.value else None
        if word and word[1] in settings():  # as in `-output $EMPTY SEED=1`
            return missing
        return missing if flag.optional_value and not flag.accepts(rest[0]) else rest.pop(0)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; -h lists all arguments.")


def _may_hold_data(folder: Path) -> bool:
    """Whether it is a folder, and no run nor checkpoint."""
    return folder.is_dir() and not is_run_folder(folder) and not any((folder / name).exists() for name in (META, INDEX))


def _take_foreign_value(rest: list[str]) -> str:
    """Remove all words up to the next flag or KEY=VALUE; a path comes alone."""
    own: list[str] = []
    while rest and not (FLAG.fullmatch(rest[0]) or WORD.fullmatch(rest[0]) or (own and "/" in rest[0])):
        own.append(rest.pop(0))
    return ",".join(own)


def help_text(flag: Flag) -> str:
    """A flag's text in -h, with its default."""
    default = flag.default_text or flag.default
    if default is None and flag.keys and flag.keys[0] in settings():
        default = default_of(flag.keys[0])
    about = help_here(flag.about)
    return about if default in (None, ()) or isinstance(default, bool) else f"{about} (default: {default})"


def value_of(name: str, argument: Flag | Positional, text: str) -> Any:
    """The value that `text` gives an argument, which errors call `name`."""
    if isinstance(argument, Flag):
        # True is what switches of other programs take: -pretrained=True
        if text.casefold() in ("", "true", "false") and argument.value and not argument.optional_value:
            raise UserError(f"{name} needs a value: {name} {argument.value} ({argument.about})")
        if argument.choices and text not in argument.choices:
            from utils.foreign_flags import why_not

            advice = why_not(f"{argument.name} {text}") or nearest(text, argument.choices)
            raise UserError(f"{name} {text}: takes {either(argument.choices)}.{advice}")
    try:
        return argument.kind(text)
    except ValueError as error:
        raise UserError(f"{name} {text}: {error}.") from None


def parse(argv: Sequence[str], program: str) -> CommandLine:
    """Parse the command line of an entry script. -h prints and exits with code 0."""
    return command_line(*entry_parser(program).read(argv))


def command_line(given: Mapping[str, Any], words: dict[str, str]) -> CommandLine:
    """A CommandLine of those flags in `given` that entry scripts have, and of KEY=VALUE words."""
    flags: dict[str, tuple[Any, str]] = {}
    for name, flag in BY_NAME.items():  # batch_size before batch_size_eval
        if name not in given:
            continue
        source = f"-{name}"
        value = given[name]
        if flag.append:
            for one in value:
                flags |= {key: (setting, source) for key, setting in amp_settings(one).items()}
        else:
            flags |= dict.fromkeys(flag.keys, (value, source))
            flags |= {key: (setting, source) for key, setting in flag.sets}
    own = [BY_NAME[name] for name in given if name in BY_NAME]
    actions = [flag for flag in own if flag.action]
    if len(actions) > 1:
        names = " and ".join(f"-{flag.name}" for flag in actions)
        raise UserError(f"{names} exclude each other; give only one")
    return CommandLine(
        cfg=given.get("cfg"),
        flags=flags,
        words=words,
        action=(actions[0].action if actions else None) or "train",
        pattern=given.get("list_models"),
        trust="trust" in given,
        ranks={flag.name: given[flag.name] for flag in RANK_FLAGS if flag.name in given},
    )


def amp_settings(value: str) -> dict[str, Any]:
    """The settings that `-amp value` stands for."""
    settings = amp_settings_of(value)
    if settings is None:
        from utils.foreign_flags import amp_advice

        raise UserError(f"-amp={value}: {amp_advice(value)}")
    return {f"AMP.{key}": setting for key, setting in settings.items()}


def entry_parser(program: str) -> Parser:
    return Parser(program, ABOUT.format(program=program), FLAGS, end="\n".join(textwrap.wrap(USAGE_END, WIDTH)))


ABOUT = """\
Trains a Vision Transformer, with -amp in mixed precision. Examples:

  python {program} -cfg configs/vit_digits.yaml -amp
  python {program} -cfg configs/vit_small_patch16_224.yaml -data_path /data/imagenet -amp
  python {program} -cfg configs/vit_digits.yaml -output output/mine -resume auto
  python {program} -eval -resume output/mine
  python {program} -cfg configs/vit_digits.yaml -amp -dry_run TRAIN.BASE_LR=1e-3"""

WITHOUT_WORDS = """\
nothing to train is named.
  quickstart: python {program} -cfg configs/vit_digits.yaml -amp
  own images: python {program} DIR -cfg configs/finetune.yaml -amp
  all flags:  python {program} -h"""

USAGE_END = (
    "-flag value, -flag=value and --flag value are equivalent, and so are - and _ inside a name. KEY=VALUE, such as "
    "TRAIN.BASE_LR=1e-4, sets any setting in docs/config.md and overrides files and flags. Guide: README.md; error "
    "messages: docs/troubleshooting.md. "
) + ("vitamp -h lists the other tools." if INSTALLED else "Other tools are in scripts/; -h describes each.")


def version_text() -> str:
    """The output of -version, without importing torch, which takes seconds."""
    packages = ("torch", "timm")
    found = dict.fromkeys(packages, "is not installed") | versions(*packages)
    lines = [f"vitamp {__version__}"]
    lines += [f"{name} {number}" for name, number in found.items()]
    return "\n".join(lines)
