"""Where the program is, in a clone or in the installed package; its version, and how its commands are started.

The texts in the code name the commands of a clone: `python scripts/evaluate.py RUN`. Where pip has installed the
program, the same command is `vitamp evaluate RUN`: `started_as` for the log, `help_here` for the texts of -h.
"""

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from utils.distributed.launchers import BY_HAND
from utils.distributed.world import World
from vitamp.errors import INSTALLED

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = {"main_single_gpu": "train", "main_multi_gpu": "multi"}
"""Entry script -> subcommand of `vitamp`. The other subcommands have the names of their files in scripts/."""
_SCRIPT = re.compile(r"(?<![\w/.-])(?:python )?(?:scripts/)?(\w+)\.py\b(?!, line)")
_RECIPE = re.compile(r"(?<=-cfg )configs/(\w+)\.yaml")


def started_as(script: str) -> str:
    """A script of a clone as it is started here: scripts/evaluate.py, or `vitamp evaluate` of the installed program."""
    stem = Path(script).stem
    return f"vitamp {ENTRIES.get(stem, stem)}" if INSTALLED else script


def typed(script: str, words: Sequence[str]) -> str:
    """The command that starts a script of a clone with these words."""
    command = started_as(script).split()
    if not INSTALLED:
        command.insert(0, "python")
    return shlex.join(command + list(words))


def help_here(text: str, installed: bool = INSTALLED) -> str:
    """Adapt a text of -h to the way in which this program was installed.

    The texts name the commands and recipes of a clone. If pip installed the program, `python scripts/evaluate.py` is
    replaced by `vitamp evaluate`, and `-cfg configs/vit_digits.yaml` by `-cfg vit_digits`.
    """

    def subcommand(match: re.Match[str]) -> str:
        name = match[1]
        is_program = name in ENTRIES or (ROOT / "scripts" / f"{name}.py").is_file()
        return f"vitamp {ENTRIES.get(name, name)}" if is_program else match[0]

    if not installed:
        return text
    with_subcommands = _SCRIPT.sub(subcommand, text)
    return _RECIPE.sub(r"\1", with_subcommands)


def as_typed(argv: Sequence[str]) -> str:
    """The command that started this process, from its sys.argv."""
    script = Path(argv[0]).stem
    start = ["vitamp", ENTRIES.get(script, script)] if INSTALLED else [sys.executable, argv[0]]
    return shlex.join(start + list(argv[1:]))


def as_seen(path: Path) -> Path:
    """Return a path relative to the current folder if it is below, as the user sees it; else the path itself."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def tool(name: str) -> str:
    """Command that starts a tool, from the current folder, also in another tool."""
    if INSTALLED:
        return f"vitamp {name}"
    return f"python {shlex.quote(str(_folder() / 'scripts' / f'{name}.py'))}"


def entry(name: str) -> str:
    """Command that starts an entry script, such as main_single_gpu, from the current folder, also in a tool."""
    if INSTALLED:
        return f"vitamp {ENTRIES[name]}"
    return f"python {shlex.quote(str(_folder() / f'{name}.py'))}"


def _folder() -> Path:
    """Return the folder of the entry scripts, as seen from the current folder."""
    folder = as_seen(Path(sys.argv[0]).absolute()).parent
    return folder.parent if folder.name == "scripts" else folder


def start_again(world: World, flags: str) -> str:
    """Return the command that starts this script again with other flags and as many processes."""
    script = as_seen(Path(sys.argv[0]).absolute())
    if INSTALLED:
        command = f"vitamp {ENTRIES[script.stem]}"
        command_of_one = command
    else:
        command = shlex.quote(str(script))
        command_of_one = f"python {command}"
    if world.size == 1:
        return f"{command_of_one} {flags}"
    if LAUNCHER_PID in os.environ:  # -ngpus started the ranks.
        return f"{command_of_one} -ngpus {world.size} {flags}"
    # Another launcher has its own command in front, such as torchrun, so that `python` is left out.
    how = "by hand, each with its rank" if world.launcher == BY_HAND else f"by {world.launcher}"
    return f"{command} {flags}  # start its {world.size} processes {how}, as before"


LAUNCHER_PID = "VITAMP_LAUNCHER_PID"
"""Environment variable with the process that started the ranks, if that is main_multi_gpu.py itself."""
PARENT = "VITAMP_PARENT_PID"
"""Environment variable of a program that a tool starts: the tool's process."""
FOLDER_FILE = "VITAMP_FOLDER_FILE"
"""Environment variable with the file to which a run that is done writes its folder, for scripts/quickstart.sh."""
PR_SET_PDEATHSIG = 1


def as_child() -> dict[str, str]:
    """Environment of a program of ours that this process starts, and that must not outlive it."""
    return {**os.environ, PARENT: str(os.getpid())}


def die_with_starting_tool() -> None:
    """Die with the tool that started this program, if one did (`as_child`)."""
    if parent := os.environ.pop(PARENT, None):  # not inherited: this program's own children have another parent
        die_with(int(parent), signal.SIGTERM)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let a process of multiprocessing get the signal `number` when the process that started it ends."""
    import multiprocessing

    starter = multiprocessing.parent_process()
    assert starter is not None
    if starter.pid == os.getppid():
        die_with(starter.pid, number)
    else:  # The parent is a fork server, which would end only after this process, or the starter has already ended.

        def end_after_starter() -> None:
            starter.join()  # waits until it has ended
            os.kill(os.getpid(), number)

        threading.Thread(target=end_after_starter, daemon=True).start()


def die_with(parent: int | None, number: signal.Signals) -> None:
    """Let the system send this process the signal `number` when its parent ends.

    parent: process number of the parent; None if it is unknown, so that an earlier end of the parent is not noticed
    """
    if sys.platform != "linux":
        return
    import ctypes  # here, because main scripts import this file, and few need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # The parent ended before the line above.
        os.kill(os.getpid(), number)
