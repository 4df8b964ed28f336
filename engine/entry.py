"""Entry point of both main scripts: turns a command line into an exit code.

Heavy packages are imported only once the settings are known to be valid, so a typo is reported at once.
"""

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from engine.machine import late_compiler, stopping
from engine.machine.stopping import CTRL_C, ENDED, signals
from utils.cli import WITHOUT_WORDS, CommandLine, parse, version_text
from utils.config import Loaded, format_config
from utils.config.keys import default_of
from utils.config.load import load_command
from utils.distributed.launchers import BY_HAND, MAKE_TERMINALS, read_world, world_from_launcher
from utils.distributed.world import ALONE, World
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, AllRanksError, AllRanksUserError, TrainingError, UserError
from utils.log import hold_warnings, log, logs_to_terminal, shorten_on_terminal, start_log, stop_holding_warnings
from utils.program import die_with_starting_tool, help_here, started_as
from utils.standard_output import ClosedPipe, OutputError, discard_output, flush_after, watch_standard_output
from utils.text import redacted

SECONDS_TO_FIND_LOST_RANK = 12
SECONDS_FOR_OTHER_RANK = 5


def main(script: str, many: bool) -> NoReturn:
    """Run the program and exit.

    `script`: path of the main script, to start it again. `many`: the program may start several processes, or be one of
    several, as main_multi_gpu.py may.
    """
    signals.listen()
    die_with_starting_tool()

    # Neither wandb nor torch's compiler is imported unless it is used, since each takes as long as torch itself. timm
    # imports wandb if it is installed; None marks it as missing.
    sys.modules.setdefault("wandb", None)  # pyright: ignore[reportArgumentType]
    late_compiler.import_compiler_late()

    watch_standard_output()
    # Otherwise, c10d prints a C++ stack trace whenever the connection to a rank or launcher that died is closed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    code = _exit_code(script, sys.argv[1:], many)
    with contextlib.suppress(OutputError):
        sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: at the interpreter's teardown, a thread of the process group aborts now and then.
    os._exit(code)


def _exit_code(script: str, argv: list[str], many: bool) -> int:
    """Run the program, report any exception as text, and return the exit code."""
    try:
        world = world_from_launcher() or ALONE
    except UserError as error:
        start_log(to_terminal=True, survives_closed_pipe=True)
        _report(str(error), must_print=True)
        return EXIT_USAGE
    start_log(world.first, survives_closed_pipe=True)
    try:
        return flush_after(lambda: _dispatch(script, argv, many))
    except ClosedPipe:  # printing for a flag such as -list_models; log lines never raise it
        discard_output()
        return EXIT_DONE
    except OutputError as error:
        discard_output()
        _report(f"{error}.", must_print=True)
        return EXIT_FAILED
    except UserError as error:
        # An error that all ranks raise together is printed by rank 0 alone. Ranks that were started by hand may each
        # have a terminal of their own. There, and before the ranks have joined, the first rank of each machine prints.
        rank_0_prints = isinstance(error, AllRanksUserError) and world.size > 1 and world.launcher != BY_HAND
        _report(str(error), must_print=world.local_rank == 0 and not rank_0_prints)
        return EXIT_USAGE
    except TrainingError as error:
        rank_0_prints = isinstance(error, AllRanksError)
        rank_name = _rank_name()
        message = str(error)
        if not rank_0_prints and rank_name is not None:
            message = f"{rank_name}: {error}"
        _report(message, must_print=not rank_0_prints)
        return EXIT_FAILED
    except (SystemExit, KeyboardInterrupt) as leave:
        own_code_error = _describe_in_own_code(leave)
        if own_code_error:
            _report(_with_rank_name(own_code_error), must_print=True)
            return EXIT_FAILED
        if isinstance(leave, KeyboardInterrupt):
            raise
        return leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except Exception as error:
        _wait_if_rank_is_lost(error)
        _report(_with_rank_name(_describe_in_own_code(error) or traceback.format_exc()), must_print=True)
        return EXIT_FAILED


def _wait_if_rank_is_lost(error: Exception) -> None:
    """If this rank's error only follows from the loss of another rank, wait until the watchdog has logged which one.

    Exits if the other ranks are gone because the user or the launcher has ended the run.
    """
    group = _group()
    if group and group.caused_by_lost_rank(error):
        signals.exit_if_asked(CTRL_C)  # this rank was interrupted, too: the others have exited for the same reason
        # The launcher will end this rank by SIGTERM. That waits until the watchdog has had time.
        signals.deferred = True
        group.watchdog.expect_lost_rank()
        time.sleep(SECONDS_TO_FIND_LOST_RANK)
        signals.exit_if_asked(ENDED)


def _group() -> Any:
    """Return the module of the process group; None in a run of one process, which does not import it."""
    return sys.modules.get("utils.distributed.group")


def _rank_name() -> str | None:
    """Return the name of this rank for messages; None in a run of one process, or before the ranks have joined."""
    group = _group()
    return group.rank_name if group else None


def _with_rank_name(failure: str) -> str:
    """Put the name of this rank before the text of an error, if there are several ranks."""
    name = _rank_name()
    return f"{name} failed:\n{failure}" if name else failure


def _describe_in_own_code(error: BaseException) -> str:
    """Describe an error in the user's own code, with its lines there; '' for an error elsewhere."""
    own_code = sys.modules.get("utils.own_code")
    return own_code.own_lines(error) if own_code else ""


def _report(text: str, must_print: bool) -> None:
    """Log an error. `must_print`: also print it if this process is a rank that does not log to the terminal.

    A rank that does neither waits a moment: the launcher ends all ranks once the first has exited, and that one shall
    be a rank that shows the error.
    """
    log.error("%s", text)
    if must_print and not logs_to_terminal():
        print(f"error: {redacted(text)}", file=sys.stderr)
    signals.failure_was_reported()  # from now on, signals end this process without a message
    if not must_print and not logs_to_terminal():
        time.sleep(SECONDS_FOR_OTHER_RANK)


def _dispatch(script: str, argv: list[str], many: bool) -> int:
    """Do what the command line asks for, such as printing the settings or training, and return the exit code.

    `many`: the program may start several processes, or be one of several.
    """
    if not argv:
        raise UserError(help_here(WITHOUT_WORDS.format(program=Path(script).name)))
    command = parse(argv, Path(script).name)
    if command.action == "version":
        print(version_text())
        return EXIT_DONE
    if command.action == "list_models":
        from models.build import list_models

        names = list_models(command.pattern)
        print("\n".join(names) if names else f"no model name matches {command.pattern!r}")
        return EXIT_DONE if names else EXIT_USAGE
    loaded, names_own_code = load_command(command)
    if command.action == "print_config":
        if names_own_code:
            _use_own_code(loaded, names_own_code, command.trust)
        optimizer = loaded.config.TRAIN.OPTIMIZER.NAME
        if optimizer != default_of("TRAIN.OPTIMIZER.NAME"):
            # Refuse an unknown name here too. This imports torch, so not for the default.
            from engine.optim.build import optimizer_name

            optimizer_name(optimizer)
        if loaded.config.DATA.DATA_PATH is not None:
            from engine.preflight import with_data_set

            loaded = with_data_set(loaded)
        print(format_config(loaded), end="")
        return EXIT_DONE
    if command.action == "print_amp":
        _use_own_code(loaded, names_own_code, command.trust)
        from engine.amp.precision import check_amp
        from engine.amp.print_amp import show_precisions
        from engine.preflight import fill_in
        from models.build import check_model

        config = fill_in(loaded).config
        check_amp(config.AMP, config.TRAIN)
        check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
        print(show_precisions(config))
        return EXIT_DONE
    return _train(script, argv, command, loaded, names_own_code, many)


def _use_own_code(loaded: Loaded, names_own_code: bool, trust: bool) -> None:
    """Execute the files of USE. `names_own_code`: the command line names them; otherwise they are those of a run."""
    if loaded.config.USE or trust:
        from engine.trained.own_code import use_own_code

        use_own_code(loaded.config, names_own_code, trust)


def _train(script: str, argv: list[str], command: CommandLine, loaded: Loaded, names_own_code: bool, many: bool) -> int:
    """Train or evaluate: alone, as one rank of several, or by starting one process per device. Returns the exit code.

    `names_own_code`: the command line names the files of USE. `many`: the program may start several processes, or be
    one of several.
    """
    world = _world_of(command, loaded, many)
    try:
        _use_own_code(loaded, names_own_code, command.trust)
        from engine.preflight import check, fill_in

        processes_to_start = 1
        if many and world is ALONE:  # no launcher has started this process
            from engine.machine.device import visible_devices, why_one_process

            processes_to_start = visible_devices(loaded.config)
            if processes_to_start == 1:
                log.info("One process: %s.", why_one_process(loaded.config))
        elif world.size > 1:
            from utils.distributed.launch import die_with_launcher

            die_with_launcher()

        # A process that starts others checks the settings first, but leaves the warnings to rank 0.
        starts_processes = processes_to_start > 1
        if starts_processes:
            hold_warnings(after=0)
        loaded = fill_in(loaded)
        check(loaded.config)
        if starts_processes:
            stop_holding_warnings(counts=False)
            from utils.distributed.launch import self_launch

            os.environ[stopping.LAUNCHER_BEGAN] = str(stopping.BEGAN)  # -max_time counts from now on all ranks
            return self_launch(script, argv, processes_to_start)

        from engine.run import run

        return run(loaded, world, dry=command.action == "dry_run")
    except Exception as error:
        # A rank that fails before it has joined the others tells them, since they would wait for it.
        has_joined = _rank_name() is not None
        if world.size > 1 and not has_joined:
            from utils.distributed.group import refuse

            if not refuse(world, error) and not logs_to_terminal():
                start_log(to_terminal=True)  # nobody else would print the error
        raise


def _world_of(command: CommandLine, loaded: Loaded, many: bool) -> World:
    """Return the ranks that a launcher or flags give, and let this rank log to the terminal as it should from now on.

    `many`: the program may be one of several ranks. Otherwise, raises UserError if a launcher has started it several
    times. Returns ALONE if there is neither a launcher nor a flag.
    """
    config = loaded.config
    # `read_world` also finds the address at which ranks meet, and raises an error without one. A program of one
    # process needs none, so it asks the launcher alone first.
    world = None
    if not many:
        world = world_from_launcher()
    if world is None:
        world = read_world(command.ranks) or ALONE

    # What this rank logs to the terminal. Too many warnings are held back until the banner is printed.
    if not world.first:  # a rank set with -rank is known only now
        start_log(to_terminal=False)
    if command.action == "train" and not config.EVAL:
        on_terminal = sys.stdout.isatty() and world.launcher not in MAKE_TERMINALS
        if config.LOG_STYLE in ("auto", "table"):
            shorten_on_terminal(has_table=config.LOG_STYLE == "table" or on_terminal)
        hold_warnings()

    if not many and world.size > 1:
        raise UserError(
            f"{started_as('main_single_gpu.py')} was started {world.size} times ({world.launcher}), and each "
            "process would train a model of its own. "
            f"Start {started_as('main_multi_gpu.py')} with the same flags, or start one process."
        )
    starts_processes = many and world is ALONE
    asks_for_other_number = loaded.sources["NGPUS"].is_typed and config.NGPUS not in (-1, world.local_size)
    if not starts_processes and asks_for_other_number:
        log.warning("-ngpus has no effect: only main_multi_gpu.py without a launcher starts processes.")
    return world
