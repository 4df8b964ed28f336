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
    """Run the program and exit. `many`: it may start several processes, or be one of several."""
    signals.listen()
    die_with_starting_tool()
    # timm imports wandb if it is installed, which takes as long as importing torch. None marks a missing module.
    sys.modules.setdefault("wandb", None)  # pyright: ignore[reportArgumentType]
    late_compiler.import_compiler_late()
    watch_standard_output()
    # Without it, c10d prints a C++ stack trace whenever the connection to a rank or launcher that died is closed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = _exit_code(script, sys.argv[1:], many)
    with contextlib.suppress(OutputError):
        sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: at the interpreter's teardown, a thread of the process group aborts now and then.
    os._exit(code)


def _exit_code(script: str, argv: list[str], many: bool) -> int:
    """Run the program, and report any exception as text."""
    place = world_from_launcher() or ALONE
    start_log(place.first, survives_closed_pipe=True)
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
        on_all_ranks = isinstance(error, AllRanksUserError) and place.size > 1 and place.launcher != BY_HAND
        _report(str(error), aloud=place.local_rank == 0 and not on_all_ranks)
        return EXIT_USAGE
    except TrainingError as error:
        common = isinstance(error, AllRanksError)
        name = _rank_name()
        _report(str(error) if common or name is None else f"{name}: {error}", aloud=not common)
        return EXIT_FAILED
    except (SystemExit, KeyboardInterrupt) as leave:
        own = _in_own_code(leave)
        if own:
            _report(_of_this_rank(own), aloud=True)
            return EXIT_FAILED
        if isinstance(leave, KeyboardInterrupt):
            raise
        return leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except Exception as error:
        _give_way_to_lost_rank(error)
        _report(_of_this_rank(_in_own_code(error) or traceback.format_exc()), aloud=True)
        return EXIT_FAILED


def _give_way_to_lost_rank(error: Exception) -> None:
    """If another rank is lost, this rank's error only follows from it: leave time to find out which one it is."""
    group = _group()
    if group and group.caused_by_lost_rank(error):
        signals.exit_if_asked(CTRL_C)
        # The launcher will end this rank by SIGTERM; until then, the watchdog has time to log which rank is lost.
        signals.deferred = True
        group.watchdog.expect_lost_rank()
        time.sleep(SECONDS_TO_FIND_LOST_RANK)
        signals.exit_if_asked(ENDED)


def _group() -> Any:
    """The module of the process group; None in a run of one process, which does not import it."""
    return sys.modules.get("utils.distributed.group")


def _rank_name() -> str | None:
    group = _group()
    return group.rank_name if group else None


def _of_this_rank(failure: str) -> str:
    name = _rank_name()
    return f"{name} failed:\n{failure}" if name else failure


def _in_own_code(error: BaseException) -> str:
    """An error in the user's own code, with its lines there; '' for another."""
    own = sys.modules.get("utils.own_code")
    return own.own_lines(error) if own else ""


def _report(text: str, aloud: bool) -> None:
    """Log an error. `aloud`: also print it if this process is a rank that does not print to the terminal."""
    log.error("%s", text)
    if aloud and not logs_to_terminal():
        print(f"error: {redacted(text)}", file=sys.stderr)
    signals.failure_was_reported()
    if not aloud and not logs_to_terminal():
        # The launcher ends all ranks once the first has exited: let a rank that prints the error be that one.
        time.sleep(SECONDS_FOR_OTHER_RANK)


def _dispatch(script: str, argv: list[str], many: bool) -> int:
    """Do what the command line asks for."""
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
    """Execute the files of USE. Those in the settings of a run count as the run's, not as given."""
    if loaded.config.USE or trust:
        from engine.trained.own_code import use_own_code

        use_own_code(loaded.config, given, trust)


def _train(script: str, argv: list[str], command: CommandLine, loaded: Loaded, given: bool, many: bool) -> int:
    """Train or evaluate: alone, as one rank of several, or by starting one process per device."""
    world = _world_of(command, loaded, many)
    try:
        _use_own_code(loaded, given, command.trust)
        from engine.preflight import check, fill_in

        number = 1
        if many and world is ALONE:
            from engine.machine.device import visible_devices, why_one_process

            number = visible_devices(loaded.config)
            if number == 1:
                log.info("One process: %s.", why_one_process(loaded.config))
        elif world.size > 1:
            from utils.distributed.launch import die_with_launcher

            die_with_launcher()

        if number > 1:
            hold_warnings(after=0)  # rank 0 logs the same
        loaded = fill_in(loaded)
        check(loaded.config)
        if number > 1:
            stop_holding_warnings(counts=False)
            from utils.distributed.launch import self_launch

            os.environ[stopping.LAUNCHER_BEGAN] = str(stopping.BEGAN)
            return self_launch(script, argv, number)
        from engine.run import run

        return run(loaded, world, dry=command.action == "dry_run")
    except Exception as error:
        if world.size > 1 and _rank_name() is None:  # it has not joined
            from utils.distributed.group import refuse

            if not refuse(world, error) and not logs_to_terminal():
                start_log(to_terminal=True)  # nobody else would print the error
        raise


def _world_of(command: CommandLine, loaded: Loaded, many: bool) -> World:
    """The ranks that a launcher or flags give; from here on, the log goes to the terminal as this rank's should."""
    config = loaded.config
    # main_single_gpu.py needs no address where ranks meet, which read_world would ask for.
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
    starts = many and world is ALONE
    if not starts and loaded.sources["NGPUS"].is_typed and config.NGPUS not in (-1, world.local_size):
        log.warning("-ngpus has no effect: only main_multi_gpu.py without a launcher starts processes.")
    return world
