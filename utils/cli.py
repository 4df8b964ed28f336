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
"""A KEY=VALUE word: a setting of ours, or one of the user's own code (focal.gamma=1.5)."""
FLAG = re.compile(r"--?([A-Za-z][\w-]*|(?<=--)[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
"""A flag, with its value after `=` if it has one. Only flags of other programs have dots: --trainer.max_epochs."""


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
class _SortedWords:
    """The words of a command line, sorted by what each of them is."""

    flags: list[str] = field(default_factory=list)
    """Flags of this program; each word is a flag with its value, such as `-seed=1`."""
    positionals: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Folders of images, given without a flag."""
    settings: dict[str, str] = field(default_factory=dict)
    """The KEY=VALUE words: dotted key -> the text after `=`."""
    unknown_flags: list[tuple[str, str]] = field(default_factory=list)
    """Flags of other programs, with their values."""
    errors: list[UserError] = field(default_factory=list)
    """One error for each word that is none of the above."""
    previous_flag: Flag | None = None
    """The flag that came directly before the current word, for the error about that word; None if none did."""

    def data_folder(self) -> str:
        """Return the folder of images that was given without a flag; raise a UserError if the data is named twice.

        At least one folder must have been given.
        """
        data_words = self.folders + [flag for flag in self.flags if flag.startswith("-data_path=")]
        if "DATA.DATA_PATH" in self.settings:
            data_words.append("DATA.DATA_PATH")
        if len(data_words) > 1:
            raise UserError(f"{' and '.join(data_words)} name the data more than once; give one folder.")
        return self.folders[0]


class Parser(argparse.ArgumentParser):
    """argparse with the rules of this module: see the module's docstring."""

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
        """Declare all flags and positional arguments.

        program: the script's name in -h
        about: text at the beginning of -h, after the usage
        groups: heading in -h -> its flags; positional arguments go under the first heading
        hidden: flags that work, but are not shown in -h
        settings: whether KEY=VALUE words are allowed
        end: text at the end of -h
        """
        self.allows_settings = settings
        self.positionals = positionals
        self.takes_many = any(positional.nargs in ("+", "*") for positional in positionals)
        """Whether the number of positional arguments is unlimited."""
        # Only then can no positional argument of a tool be meant.
        self.takes_folder = settings and all(positional.nargs == "?" for positional in positionals)
        """Whether a word that is a folder of images is the value of -data_path."""
        self.flag_by_name: dict[str, Flag] = {}
        """Each flag under every name that it has."""
        super().__init__(
            prog=program,
            usage=help_here(self._usage(program)).replace("%", "%%"),
            description=help_here(about),
            epilog=end,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=WIDTH),
        )
        first_title = next(iter(groups))
        for title, flags in groups.items():
            group = self.add_argument_group(title)
            if title == first_title:
                self._add_positionals(group)
            for flag in flags:
                self._add_flag(group, flag, help_text(flag).replace("%", "%%"))
        for flag in (*hidden, IGNORED):
            self._add_flag(self, flag, argparse.SUPPRESS)

    def _usage(self, program: str) -> str:
        """Compose the usage line of -h: `python compare.py RUN ... [-flag value ...] [KEY=VALUE ...]`."""
        usage = ["python", program]
        for positional in self.positionals:
            repeated = positional.nargs in ("+", "*")
            usage.append(f"{positional.metavar} ..." if repeated else positional.metavar)
        if self.takes_folder:
            usage.append("[DIR]")
        usage.append("[-flag value ...]")
        if self.allows_settings:
            usage.append("[KEY=VALUE ...]")
        return " ".join(usage)

    def _add_positionals(self, group: argparse._ActionsContainer) -> None:
        """Declare the positional arguments to argparse."""
        for positional in self.positionals:
            # Converts the text of the argument; an error calls the argument by its metavar.
            convert = partial(value_of, positional.metavar, positional)
            options: dict[str, Any] = {
                "metavar": positional.metavar,
                "nargs": positional.nargs,
                "help": positional.about,
                "type": convert,
            }
            group.add_argument(positional.name, **options)

    def _add_flag(self, group: argparse._ActionsContainer, flag: Flag, help_message: str) -> None:
        """Declare a flag to argparse, unless a flag of the same name is declared already.

        Hidden flags are declared last, so that a tool's own flag replaces a hidden flag of the same name.
        """
        if flag.name in self.flag_by_name:
            return
        for name in (flag.name, *flag.also):
            self.flag_by_name.setdefault(name, flag)
        options: dict[str, Any] = {"dest": flag.name, "required": flag.required, "help": help_message}
        if flag.takes_value:
            options["action"] = "append" if flag.append else "store"
            options["metavar"] = flag.metavar.strip("[]")  # [N] marks an optional value; argparse adds brackets itself.
            options["type"] = partial(value_of, f"-{flag.name}", flag)
            if flag.optional_value:
                options["nargs"] = "?"
                options["const"] = flag.const  # the value if none is given
        else:
            options["action"] = "store_true"
        group.add_argument(f"-{flag.name}", **options)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Parse a command line: return the values of flags and positional arguments by name, and the KEY=VALUE words.

        -h prints the help and exits with code 0. After `--`, every word is a positional argument, even one that looks
        like a setting: `predict.py RUN -- A=b.png`.
        """
        only_positionals_from = len(argv)
        if self.positionals and "--" in argv:
            only_positionals_from = argv.index("--")
        remaining = list(argv[:only_positionals_from])
        matches = [FLAG.fullmatch(word) for word in remaining]
        if any(match and match[1] in ("h", "help") for match in matches):
            print(self.format_help(), end="")
            sys.exit(EXIT_DONE)

        # Each of these two adds a word to `sorted_words`; a flag may also take its value out of `remaining`.
        sorted_words = _SortedWords()
        while remaining:
            word = remaining.pop(0)
            flag_match = FLAG.fullmatch(word)
            if flag_match is None:
                self._sort_word(word, sorted_words)
            else:
                self._sort_flag(word, flag_match, remaining, sorted_words)
        if sorted_words.unknown_flags or sorted_words.errors:
            from utils.foreign_flags import unknown_flags

            raise unknown_flags(
                sorted_words.unknown_flags, sorted_words.errors, self.flag_by_name, self.allows_settings
            )

        argparse_words = sorted_words.flags
        if sorted_words.folders:
            argparse_words.append(f"-data_path={sorted_words.data_folder()}")
        positionals = sorted_words.positionals + list(argv[only_positionals_from + 1 :])
        if positionals:
            argparse_words.append("--")
        return vars(self.parse_args(argparse_words + positionals)), sorted_words.settings

    def _sort_word(self, word: str, sorted_words: _SortedWords) -> None:
        """Add a word that is no flag to `sorted_words`.

        It is a setting, a folder of data, a positional argument, or else an error.
        """
        setting_match = WORD.fullmatch(word) if self.allows_settings else None
        takes_another = self.takes_many or len(sorted_words.positionals) < len(self.positionals)
        # One of our keys in lower case is a mistake. It becomes an error, which suggests the right spelling.
        if setting_match and not _is_key_in_lower_case(setting_match[1]):
            sorted_words.settings[setting_match[1]] = setting_match[2]
        elif self.takes_folder and _may_hold_data(Path(word)):
            sorted_words.folders.append(word)
        elif takes_another and not (self.allows_settings and "=" in word):
            sorted_words.positionals.append(word)
        else:
            from utils.foreign_flags import unrecognised

            error = unrecognised(
                word, sorted_words.previous_flag, self.flag_by_name, self.allows_settings, convert=value_of
            )
            sorted_words.errors.append(error)
        sorted_words.previous_flag = None

    def _sort_flag(self, word: str, match: re.Match[str], remaining: list[str], sorted_words: _SortedWords) -> None:
        """Add a flag and its value to `sorted_words`; a value that is the next word is removed from `remaining`.

        match: FLAG's match of `word`
        """
        flag = self.flag_by_name.get(match[1].replace("-", "_"))
        sorted_words.previous_flag = flag
        value = match[2]
        if flag is None:  # a flag of another program
            foreign_value = _take_foreign_value(remaining) if value is None else value
            sorted_words.unknown_flags.append((word.partition("=")[0], foreign_value))
            return
        if value is None:
            value = self._take_value(flag, remaining)
        elif not flag.takes_value:
            raise UserError(f"{word}: -{flag.name} takes no value; leave out '={value}'")
        sorted_words.flags.append(f"-{flag.name}" if value is None else f"-{flag.name}={value}")

    def _take_value(self, flag: Flag, remaining: list[str]) -> str | None:
        """Remove the next word from `remaining` and return it, if it is the flag's value.

        Otherwise, return '' for a flag that needs a value, which `value_of` reports, and None for one that does not.
        """
        no_value = "" if flag.needs_value else None
        if not flag.takes_value or not remaining:
            return no_value
        next_word = remaining[0]
        # `-ngpus -1` is a value; a value that begins like a flag needs `-flag=value`.
        if FLAG.fullmatch(next_word):
            return no_value
        # A setting is no value: an empty variable of the shell may be missing before it, as in `-output $EMPTY SEED=1`.
        # Only the values of some flags look like settings, such as KEY=A,B of compare.py's -vary.
        takes_settings = "=" in flag.metavar
        setting = WORD.fullmatch(next_word) if self.allows_settings and not takes_settings else None
        if setting and setting[1] in settings():
            return no_value
        if flag.optional_value and not flag.accepts(next_word):
            return no_value
        return remaining.pop(0)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; -h lists all arguments.")


def _is_key_in_lower_case(key: str) -> bool:
    """Whether a key is one of our settings, but not in capitals."""
    return not key.isupper() and key.upper() in settings()


def _may_hold_data(folder: Path) -> bool:
    """Whether a path is a folder that is neither a run nor a checkpoint."""
    return folder.is_dir() and not is_run_folder(folder) and not any((folder / name).exists() for name in (META, INDEX))


def _take_foreign_value(remaining: list[str]) -> str:
    """Remove the values of another program's flag from the remaining words; return them, separated by commas.

    The values end before the next flag or KEY=VALUE word. A path is taken only as the first value: after another value,
    it is probably the data.
    """
    values: list[str] = []
    while remaining:
        word = remaining[0]
        is_later_path = len(values) > 0 and "/" in word
        if FLAG.fullmatch(word) or WORD.fullmatch(word) or is_later_path:
            break
        values.append(remaining.pop(0))
    return ",".join(values)


def help_text(flag: Flag) -> str:
    """A flag's text in -h, with its default unless that is empty, true or false."""
    default = flag.default_text or flag.default
    if default is None and flag.keys and flag.keys[0] in settings():
        default = default_of(flag.keys[0])
    about = help_here(flag.about)
    if default in (None, ()) or isinstance(default, bool):
        return about
    return f"{about} (default: {default})"


def value_of(name: str, argument: Flag | Positional, text: str) -> Any:
    """Convert the text of an argument to its value; raise a UserError if the argument does not take this text.

    name: what an error calls the argument, such as -epochs
    text: the text on the command line; '' means that the value is missing
    """
    if isinstance(argument, Flag):
        # In other programs, -pretrained and others are switches, so that people write -pretrained=True.
        if text.casefold() in ("", "true", "false") and argument.needs_value:
            raise UserError(f"{name} needs a value: {name} {argument.metavar} ({argument.about})")
        if argument.choices and text not in argument.choices:
            from utils.foreign_flags import why_absent

            advice = why_absent(f"{argument.name} {text}") or nearest(text, argument.choices)
            raise UserError(f"{name} {text}: takes {either(argument.choices)}.{advice}")
    try:
        return argument.kind(text)
    except ValueError as error:
        raise UserError(f"{name} {text}: {error}.") from None


def parse(argv: Sequence[str], program: str) -> CommandLine:
    """Parse the command line of an entry script. -h prints and exits with code 0."""
    return command_line(*entry_parser(program).read(argv))


def command_line(given: Mapping[str, Any], words: dict[str, str]) -> CommandLine:
    """Make a CommandLine from parsed values of flags and KEY=VALUE words.

    A flag gives its value to the settings in `flag.keys`, and fixed values to those in `flag.sets`.

    given: flag's name -> its value; flags that entry scripts do not have, which are a tool's own, are ignored
    words: dotted key -> the text after `=`
    """
    flags: dict[str, tuple[Any, str]] = {}
    for name, flag in BY_NAME.items():  # In the order of the table, so that -batch_size_eval overrides -batch_size.
        if name not in given:
            continue
        source = f"-{name}"
        value = given[name]
        if flag.append:  # Only -amp is like this: its value is a list of all values that were given.
            for amp_value in value:
                flags |= {key: (setting, source) for key, setting in amp_settings(amp_value).items()}
        else:
            flags |= dict.fromkeys(flag.keys, (value, source))
            flags |= {key: (setting, source) for key, setting in flag.sets}

    given_flags = [BY_NAME[name] for name in given if name in BY_NAME]
    action_flags = [flag for flag in given_flags if flag.action]
    if len(action_flags) > 1:
        names = " and ".join(f"-{flag.name}" for flag in action_flags)
        raise UserError(f"{names} exclude each other; give only one")
    return CommandLine(
        cfg=given.get("cfg"),
        flags=flags,
        words=words,
        action=(action_flags[0].action if action_flags else None) or "train",
        pattern=given.get("list_models"),
        trust="trust" in given,
        ranks={flag.name: given[flag.name] for flag in RANK_FLAGS if flag.name in given},
    )


def amp_settings(value: str) -> dict[str, Any]:
    """The settings that `-amp value` stands for, by dotted key; an unknown value is a UserError."""
    amp_section = amp_settings_of(value)
    if amp_section is None:
        from utils.foreign_flags import amp_advice

        raise UserError(f"-amp={value}: {amp_advice(value)}")
    return {f"AMP.{key}": setting for key, setting in amp_section.items()}


def entry_parser(program: str) -> Parser:
    """The parser of main_single_gpu.py, main_multi_gpu.py and `vitamp train`."""
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
    installed = versions(*packages)
    lines = [f"vitamp {__version__}"]
    lines += [f"{name} {installed.get(name, 'is not installed')}" for name in packages]
    return "\n".join(lines)
