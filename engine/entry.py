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
    several.
    """
    signals.listen()
    die_with_starting_tool()
    # timm imports wandb if it is installed, which takes as long as importing torch. None marks a missing module.
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
    world = world_from_launcher() or ALONE
    start_log(world.first, survives_closed_pipe=True)
    try:
        return flush_after(lambda: _dispatch(script, argv, many))
    except ClosedPipe:  # printing for a flag such as -list_models; log lines never raise it
        discard_output()
        return EXIT_DONE
    except OutputError as error:
        discard_output()
        _report(f"{error}.", aloud=True)
        return EXIT_FAILED
    except UserError as error:
        # Ranks raise the same error together, and rank 0 prints it. Before the ranks are known, and where each has a
        # terminal of its own, each machine prints its own.
        on_all_ranks = isinstance(error, AllRanksUserError) and world.size > 1 and world.launcher != BY_HAND
        _report(str(error), aloud=world.local_rank == 0 and not on_all_ranks)
        return EXIT_USAGE
    except TrainingError as error:
        on_all_ranks = isinstance(error, AllRanksError)
        rank_name = _rank_name()
        message = str(error)
        if not on_all_ranks and rank_name is not None:
            message = f"{rank_name}: {error}"
        _report(message, aloud=not on_all_ranks)
        return EXIT_FAILED
    except (SystemExit, KeyboardInterrupt) as leave:
        own_code_error = _describe_in_own_code(leave)
        if own_code_error:
            _report(_with_rank_name(own_code_error), aloud=True)
            return EXIT_FAILED
        if isinstance(leave, KeyboardInterrupt):
            raise
        return leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except Exception as error:
        _give_way_to_lost_rank(error)
        _report(_with_rank_name(_describe_in_own_code(error) or traceback.format_exc()), aloud=True)
        return EXIT_FAILED


def _give_way_to_lost_rank(error: Exception) -> None:
    """If this rank's error only follows from the loss of another rank, leave time to find out which one was lost."""
    group = _group()
    if group and group.caused_by_lost_rank(error):
        signals.exit_if_asked(CTRL_C)
        # The launcher will end this rank by SIGTERM; until then, the watchdog has time to log which rank is lost.
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


def _report(text: str, aloud: bool) -> None:
    """Log an error. `aloud`: also print it if this process is a rank that does not log to the terminal."""
    log.error("%s", text)
    if aloud and not logs_to_terminal():
        print(f"error: {redacted(text)}", file=sys.stderr)
    signals.failure_was_reported()
    if not aloud and not logs_to_terminal():
        # The launcher ends all ranks once the first has exited: let a rank that prints the error be that one.
        time.sleep(SECONDS_FOR_OTHER_RANK)


def _dispatch(script: str, argv: list[str], many: bool) -> int:
    """Do what the command line asks for, such as printing the settings or training, and return the exit code."""
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
    loaded, given = load_command(command)
    if command.action == "print_config":
        if given:
            _use_own_code(loaded, given, command.trust)
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
        _use_own_code(loaded, given, command.trust)
        from engine.amp.precision import check_amp
        from engine.amp.print_amp import show_precisions
        from engine.preflight import fill_in
        from models.build import check_model

        config = fill_in(loaded).config
        check_amp(config.AMP, config.TRAIN)
        check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
        print(show_precisions(config))
        return EXIT_DONE
    return _train(script, argv, command, loaded, given, many)


def _use_own_code(loaded: Loaded, given: bool, trust: bool) -> None:
    """Execute the files of USE. `given`: the user has named them now; otherwise they are those of a run."""
    if loaded.config.USE or trust:
        from engine.trained.own_code import use_own_code

        use_own_code(loaded.config, given, trust)


def _train(script: str, argv: list[str], command: CommandLine, loaded: Loaded, given: bool, many: bool) -> int:
    """Train or evaluate: alone, as one rank of several, or by starting one process per device."""
    world = _world_of(command, loaded, many)
    try:
        _use_own_code(loaded, given, command.trust)
        from engine.preflight import check, fill_in

        process_count = 1
        if many and world is ALONE:
            from engine.machine.device import visible_devices, why_one_process

            process_count = visible_devices(loaded.config)
            if process_count == 1:
                log.info("One process: %s.", why_one_process(loaded.config))
        elif world.size > 1:
            from utils.distributed.launch import die_with_launcher

            die_with_launcher()

        # A process that starts others checks the settings first, without warnings, which rank 0 logs.
        if process_count > 1:
            hold_warnings(after=0)
        loaded = fill_in(loaded)
        check(loaded.config)
        if process_count > 1:
            stop_holding_warnings(counts=False)
            from utils.distributed.launch import self_launch

            os.environ[stopping.LAUNCHER_BEGAN] = str(stopping.BEGAN)
            return self_launch(script, argv, process_count)
        from engine.run import run

        return run(loaded, world, dry=command.action == "dry_run")
    except Exception as error:
        # A rank that fails before it has joined the others tells them, since they would wait for it.
        if world.size > 1 and _rank_name() is None:
            from utils.distributed.group import refuse

            if not refuse(world, error) and not logs_to_terminal():
                start_log(to_terminal=True)  # nobody else would print the error
        raise


def _world_of(command: CommandLine, loaded: Loaded, many: bool) -> World:
    """Return the ranks that a launcher or flags give, and let this rank log to the terminal as it should from now on.

    Raises UserError if a launcher has started main_single_gpu.py several times.
    """
    config = loaded.config
    # main_single_gpu.py needs no address at which ranks find each other, for which read_world would ask.
    world = (None if many else world_from_launcher()) or read_world(command.ranks) or ALONE
    if not world.first:  # a rank set with -rank is known only now
        start_log(to_terminal=False)
    if command.action == "train" and not config.EVAL:
        on_terminal = sys.stdout.isatty() and world.launcher not in MAKE_TERMINALS
        if config.LOG_STYLE == "table" or (config.LOG_STYLE == "auto" and on_terminal):
            shorten_on_terminal()
        hold_warnings()
    if not many and world.size > 1:
        raise UserError(
            f"{started_as('main_single_gpu.py')} was started {world.size} times ({world.launcher}), and each "
            "process would train a model of its own. "
            f"Start {started_as('main_multi_gpu.py')} with the same flags, or start one process."
        )
    starts_processes = many and world is ALONE
    if not starts_processes and loaded.sources["NGPUS"].is_typed and config.NGPUS not in (-1, world.local_size):
        log.warning("-ngpus has no effect: only main_multi_gpu.py without a launcher starts processes.")
    return world
