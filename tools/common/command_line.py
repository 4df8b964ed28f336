"""Read the command lines of the tools in scripts/, and turn their errors into exit codes.

A tool has flags of its own beside those of the entry scripts.
"""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.machine.late_compiler import import_compiler_late
from tools.common.output_file import check_output_file, if_interrupted, written
from utils.cli import WIDTH, CommandLine, Parser, command_line
from utils.config import Loaded, load_config
from utils.config.keys import AUTO_BY_DATA, CLASSES, IMAGE_SIZE, MEASURED, PATCH_SIZE, value_of
from utils.config.kinds import AUTO
from utils.config.read import Kind
from utils.distributed.launchers import VARIABLES, world_from_launcher
from utils.distributed.world import ALONE
from utils.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    AllRanksError,
    AllRanksUserError,
    TrainingError,
    UserError,
    nearest,
)
from utils.flags import BY_NAME, HELP, Flag, Positional
from utils.log import log, start_log
from utils.own_code import allow
from utils.program import die_with_starting_tool, help_here, started_as
from utils.standard_output import OutputError, discard_output, flush_after, watch_standard_output
from vitamp.checkpoints import located
from vitamp.files import suggested_path
from vitamp.metrics import BETTER, CHOICES, CHOICES_IN_WORDS, NO_LABELS, ONE_LABEL
from vitamp.pooling import PATCHES, POOLED, POOLS

PAGES = {
    "check_data.py": "broken_images",
    "checkpoint.py": "checkpoints",
    "choose_precision.py": "amp",
    "evaluate.py": "predict",
    "pack_images.py": "shards",
    "show_batch.py": "augmentation",
}
"""Documentation page of a tool whose page is not named like the tool."""
SECONDS_FOR_RANK_0 = 5
"""Time that the other ranks leave rank 0 to print an error that all ranks have"""
SAY = {CLASSES: 1000, IMAGE_SIZE: 224, PATCH_SIZE: 16, **dict.fromkeys(MEASURED, 0.5), MEASURED[0]: "0,4095"}
"""Values that an error suggests in place of `auto`, in tools that do not read the data"""
WEIGHTS = Flag("weights", CHOICES_IN_WORDS, "|".join(CHOICES), default=BETTER, choices=CHOICES)
"""For tools that load a trained model."""
PART = Flag(
    "part",
    "split of the data set: train, val, test or all; training images are not augmented",
    "PART",
    default_text="val; of other data than the run's without a validation split all",
    choices=("train", "val", "test", "all"),
)
"""For tools that read the images of the run's data set."""
MEMORISED = ("train", "all")
"""Values of -part that include training images"""
TTA = Flag(
    "tta",
    "test-time augmentation: the mean of the probabilities of the image and its mirror image, in twice the time",
    "flip",
    choices=("flip",),
)
"""For tools that predict."""
MODES = Flag(
    "modes",
    "precisions to compare with fp32: values of -amp such as tf32,bf16,O2-fp16",
    "A,B",
    default_text="all that are useful on this device",
)
"""For tools that measure what a precision gains"""
NO_CALIBRATION = Flag("no_calibration", "leave out the temperature that evaluate.py -calibrate fitted to the weights")
"""For tools that apply this temperature."""
POOL = Flag(
    "pool",
    "what the classifier sees (pooled), the class token, the mean of all patches, both, class tokens of the last 4 "
    "blocks with that mean (blocks), or each of the patches",
    "POOL",
    default_text=POOLED,
    choices=POOLS + (PATCHES,),
)
"""For tools that take a model's features."""
TRUST = (BY_NAME["use"], BY_NAME["trust"])
"""For tools that load a trained model: which code of its run may be executed."""
OVERWRITE = Flag("overwrite", "replace existing output files")
"""For tools that write a file named by the user."""


def number(condition: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Make a `Flag.kind` that converts the flag's text to a number and checks it with `is_allowed`.

    `condition` describes the allowed numbers in the error, such as 'above 0'.
    """

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if is_allowed(value):
                return value
        raise ValueError(f"takes a number {condition}")

    return convert


above_zero = number("above 0", lambda value: 0 < value < math.inf)


def tool(work: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Decorate the main function of a tool: errors are printed as one line, and an exit code is returned."""
    return partial(_run, work)


def _run(work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run the main function `work` of a tool and return its exit code, or that of the error that it raised."""
    die_with_starting_tool()
    import_compiler_late()
    watch_standard_output()
    start_log(to_terminal=True)
    # A tool that ran in this process before may have filled the lists of written files and of messages.
    written.clear()
    if_interrupted.clear()
    try:
        return flush_after(lambda: work(argv))
    except (UserError, TrainingError) as error:
        rank = 0
        with contextlib.suppress(UserError):  # the error may be about the launcher's variables
            rank = (world_from_launcher() or ALONE).rank
        if rank and isinstance(error, AllRanksUserError | AllRanksError):
            # Rank 0 prints this error. A launcher ends all ranks once the first has exited, so give rank 0 time.
            time.sleep(SECONDS_FOR_RANK_0)
        else:
            log.error("%s%s", f"rank {rank}: " if rank else "", error)
        return EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
    except PermissionError as error:  # for example, a folder that this user may not enter
        if error.filename is None:
            raise
        log.error("%s: no permission.", error.filename)
        return EXIT_USAGE
    except OutputError as error:
        log.error("%s; the output is incomplete.", error)
        discard_output()
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of the output, such as `| head`, has closed it
        discard_output()
        return EXIT_DONE
    except KeyboardInterrupt as error:
        results = "no result was written"
        if if_interrupted:  # the tool's own message
            results = if_interrupted[-1]
        elif written:
            results = f"already written and complete: {', '.join(map(str, written))}"
        log.warning("interrupted; %s", results)
        return getattr(error, "exit_code", EXIT_INTERRUPTED)  # SIGTERM has an exit code of its own


def model_at(text: str) -> Path:
    """Convert a positional argument (`Positional.kind`) to the path of a run, a checkpoint or a file.

    RUN/best and RUN/last become the folder of that checkpoint. Raises UserError for a missing path that resembles
    another one.
    """
    path = located(Path(text).expanduser())
    if not path.exists():
        suggestion = suggested_path(path)
        if suggestion:
            raise UserError(f"{path}: no such file or folder{suggestion}.")
    return path


@dataclass(frozen=True)
class Tool:
    """Describe the command line that the script `folder`/`name` accepts.

    -h shows `about`, the positional arguments and the tool's own flags.
    """

    name: str
    about: str | None
    flags: tuple[Flag, ...]
    places: tuple[Positional, ...] = ()
    settings: bool = True
    """Whether the flags and settings of the entry scripts are accepted too."""
    command: str = ""
    """Name of the subcommand, if the tool has several; `read` gets the words after it."""
    one_label: str = ""
    """The reason why the tool needs one label per image; empty if images may have several (DATA.MULTI_LABEL)."""
    folder: str = "scripts"

    def read(self, argv: Sequence[str]) -> ToolLine:
        """Parse the words `argv`: the tool's own flags and positional arguments, and those of the entry scripts.

        Raises UserError for unknown words, and for flags by which an entry script does something else than train.
        """
        program = f"{self.folder}/{self.name} {self.command}".rstrip()
        flags_in_help = {"Flags of this tool" if self.settings else "Flags": self.flags + (HELP,)}
        flags_not_in_help = tuple(BY_NAME.values()) if self.settings else ()  # those of the entry scripts
        about = about_tool(self.about, self.name)
        parser = Parser(program, about, flags_in_help, flags_not_in_help, self.places, self.settings)
        given, settings = parser.read(argv)
        allow(given.get("use"), "trust" in given)

        # Flags and positional arguments of the tool itself; the other flags are those of the entry scripts.
        defaults = {place.name: None for place in self.places} | {flag.name: flag.default for flag in self.flags}
        own_values = {name: value for name, value in given.items() if name in defaults}
        of_entry_scripts = {name: value for name, value in given.items() if name not in own_values}
        run = command_line(of_entry_scripts, settings)
        if run.action != "train":
            raise UserError(
                f"{self.name} has no -{run.action}; use {started_as('main_single_gpu.py')}, which has it and takes the "
                "same flags."
            )
        return ToolLine(run, Namespace(**{**defaults, **own_values}), frozenset(own_values), self.one_label)


@dataclass(frozen=True)
class ToolLine:
    """Hold a tool's parsed command line."""

    run: CommandLine
    """Flags and settings of the entry scripts, which `load` checks."""
    asked: Namespace = field(default_factory=Namespace)
    """Values of the tool's own flags and positional arguments, by name; defaults for those not given."""
    given: frozenset[str] = frozenset()
    """Names of the own flags and positional arguments that are on the command line."""
    one_label: str = ""
    """As in `Tool`."""

    def load(self, more: dict[str, tuple[Any, str]] | None = None, resolved: bool = True) -> Loaded:
        """Load and check the settings of this command line, without initialising CUDA.

        `more`: further settings, key -> (value, source).
        `resolved`: replace `auto` by values that follow from the data and the weights (engine/preflight.py). A tool
        that reads neither passes False: then an `auto` that needs the data is an error.
        """
        flags = {**self.run.flags, **(more or {})}
        # With the path of a run, -use names a file with the code of that run, which `read` has allowed. Without a path,
        # it is the setting USE.
        if getattr(self.asked, "use", None) and not self.asked.path:
            flags["USE"] = (self.asked.use, "-use")
        loaded = load_config(self.run.cfg, flags, self.run.words)
        config = loaded.config

        if config.DATA.BATCH_SIZE == AUTO:
            source = loaded.sources["DATA.BATCH_SIZE"]
            raise UserError(
                f"{source}: DATA.BATCH_SIZE auto does not work in this tool; give a number, say -batch_size 64."
            )
        if config.USE:
            from engine.trained.own_code import use_own_code

            is_from_user = loaded.sources["USE"].kind is not Kind.RUN  # and not from the settings of a run
            use_own_code(config, is_from_user, self.run.trust)
        needs_one_label = bool(self.one_label)
        if needs_one_label and config.task != ONE_LABEL:
            key = "MODEL.MAE_PRETRAIN" if config.task == NO_LABELS else "DATA.MULTI_LABEL"
            raise UserError(f"{loaded.sources[key]}: {key} true: {self.one_label}.")
        if resolved:
            from engine.preflight import fill_in  # imports torch, which takes seconds, so only for valid settings

            return fill_in(loaded, of_run=False)

        # Range, mean and deviation of the pixels would be measured on the data. Any value does here, such as 0.5,
        # because the tools that do not read the data measure speed.
        measured = [key for key in MEASURED if value_of(config, key) == AUTO and loaded.is_default(key)]
        loaded = loaded.with_values(dict.fromkeys(measured, 0.5), "not measured: no speed depends on it")
        for key in AUTO_BY_DATA:
            if value_of(loaded.config, key) == AUTO:
                raise UserError(
                    f"{loaded.sources[key]}: {key} auto does not work in this tool, which does not read the data set; "
                    f"give a number, say {key}={SAY[key]}."
                )
        return loaded

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise UserError if one of the tool's own flags `names` is given. `why`: the error, with {} for its name."""
        for name in names:
            if name in self.given:
                raise UserError(why.format(name))

    def given_by(self, key: str) -> str:
        """Return the flag that gave a setting, or 'on the command line' for KEY=VALUE; '' if it was not given."""
        if key in self.run.words:
            return "on the command line"
        _, flag = self.run.flags.get(key, ("", ""))
        return flag

    def file(self, name: str, *endings: str) -> Path | None:
        """Return the file that the tool's flag `name` gives, after checking that it can be written; None without it.

        `endings`: the file must have one of these suffixes, such as '.png', if any are listed. If the tool has the flag
        -overwrite, an existing file is an error unless that flag is given. A tool without it overwrites files.
        """
        text = getattr(self.asked, name)
        flag = f"-{name}"
        if text is None:
            return None
        path = Path(text).expanduser()
        if endings and path.suffix.lower() not in endings:
            stem = path.stem or "result"
            example = f"{stem}{endings[0]}"
            raise UserError(f"{flag} {text}: name a file that ends in {' or '.join(endings)}, such as {example}.")
        may_overwrite = getattr(self.asked, "overwrite", True)
        return check_output_file(path, flag, fresh=not may_overwrite)


def first_word(argv: Sequence[str], tool: str, about: str | None, known: Mapping[str, str], kind: str) -> str:
    """Return the subcommand, which is the first word and must be one of `known` (name -> description).

    `kind`: what the error calls it, such as 'command'. -h prints `about` with the list, and exits with 0.
    """
    word = argv[0] if argv else ""
    if word.lstrip("-") in ("h", "help"):
        print(f"{about_tool(about, tool)}\n")
        for name, description in known.items():
            print(textwrap.fill(f"  {name:<12}{description}", WIDTH, subsequent_indent=" " * 14))
        sys.exit(EXIT_DONE)
    if word not in known:
        problem = f"unknown {kind} {word!r}.{nearest(word, known)}" if word else f"the {kind} is missing."
        raise UserError(f"{problem} The first word must be one of {', '.join(known)}; -h describes them.")
    return word


def about_tool(about: str | None, tool: str) -> str:
    """Return the help text of a tool: its docstring `about`, and a link to its page of the docs.

    Paragraphs are wrapped, except those with indented lines, which are commands to type.
    """
    paragraphs = help_here(about or "").strip("\n").split("\n\n")
    page = f"docs/{PAGES.get(Path(tool).name, Path(tool).stem)}.md"
    if page not in (about or ""):
        paragraphs.append(f"More: {page}.")
    wrapped = []
    for paragraph in paragraphs:
        has_indented_line = "\n " in f"\n{paragraph}"
        wrapped.append(paragraph if has_indented_line else textwrap.fill(paragraph, WIDTH))
    return "\n\n".join(wrapped)


def about_one_device(loaded: Loaded) -> list[str]:
    """Return the note that -ngpus has no effect in a tool that measures one device; none if it asks for one device."""
    gpus = loaded.config.NGPUS
    asks_for_all = gpus == -1 and loaded.sources["NGPUS"] == "-ngpus"  # -1 is also the default, without the flag
    if gpus > 1 or asks_for_all:
        return [
            f"-ngpus {gpus} has no effect: the tool sets the number of processes itself; each process has the full "
            "DATA.BATCH_SIZE"
        ]
    return []


def check_one_training(loaded: Loaded, tool: str) -> None:
    """Raise UserError for settings that a tool that trains does not have, and for a launch in several processes.

    Such a tool starts its own processes. `tool`: its name, such as 'compare.py'.
    """
    config = loaded.config
    auto_epochs = config.TRAIN.NUM_EPOCHS == AUTO and tool != "compare.py"  # which takes auto
    for key, is_refused, words, advice in (
        ("EVAL", config.EVAL, "EVAL", "leave it out, since the tool trains"),
        ("MODEL.RESUME", config.MODEL.RESUME, "MODEL.RESUME", "give -pretrained RUN to start from its weights"),
        ("TRAIN.NUM_EPOCHS", auto_epochs, "TRAIN.NUM_EPOCHS auto", "give a number"),
    ):
        if is_refused:
            raise UserError(f"{loaded.sources[key]}: {tool} has no {words}; {advice}.")
    check_one_process(tool)


def check_one_process(tool: str) -> None:
    """Raise UserError if a launcher started the tool in several processes: each would do all the work."""
    world = world_from_launcher()
    if world is not None and world.size > 1:
        rank_variable = "RANK"  # the environment variable by which the launcher gives the rank
        if world.launcher in VARIABLES:
            rank_variable, *_others = VARIABLES[world.launcher]
        raise UserError(
            f"{tool} is one process, but {rank_variable} says that this is one of {world.size} ({world.launcher}). "
            f"Start one; if this is the only one, put env -u {rank_variable} before the command."
        )
