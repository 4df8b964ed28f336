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
    """A text of -h, which names commands and recipes of a clone, with those of the installed program if it is one."""

    def subcommand(found: re.Match[str]) -> str:
        name = found[1]
        known = name in ENTRIES or (ROOT / "scripts" / f"{name}.py").is_file()
        return f"vitamp {ENTRIES.get(name, name)}" if known else found[0]

    return _RECIPE.sub(r"\1", _SCRIPT.sub(subcommand, text)) if installed else text


def as_typed(argv: Sequence[str]) -> str:
    """The command that started this process, from its sys.argv."""
    script = Path(argv[0]).stem
    start = ["vitamp", ENTRIES.get(script, script)] if INSTALLED else [sys.executable, argv[0]]
    return shlex.join(start + list(argv[1:]))


def as_seen(path: Path) -> Path:
    """Relative to the current folder, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def tool(name: str) -> str:
    """Command that starts a tool, from the current folder, also in another tool."""
    if INSTALLED:
        return f"vitamp {name}"
    folder = as_seen(Path(sys.argv[0]).absolute()).parent
    folder = folder if folder.name == "scripts" else folder / "scripts"
    return f"python {shlex.quote(str(folder / f'{name}.py'))}"


def start_again(world: World, flags: str) -> str:
    """Command that starts this script again with `flags` and as many processes."""
    script = as_seen(Path(sys.argv[0]).absolute())
    by_hand = f"vitamp {ENTRIES[script.stem]}" if INSTALLED else shlex.quote(str(script))
    start = by_hand if INSTALLED else f"python {by_hand}"
    if world.size == 1:
        return f"{start} {flags}"
    if LAUNCHER_PID in os.environ:
        return f"{start} -ngpus {world.size} {flags}"
    how = "by hand, each with its rank" if world.launcher == BY_HAND else f"by {world.launcher}"
    return f"{by_hand} {flags}  # start its {world.size} processes {how}, as before"


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
    """In a process of multiprocessing: get signal `number` when the process that started it ends."""
    import multiprocessing

    starter = multiprocessing.parent_process()
    assert starter is not None
    if starter.pid == os.getppid():
        die_with(starter.pid, number)
    else:  # between them is a fork server, which ends only after this process; or the starter has ended already

        def follow() -> None:
            starter.join()
            os.kill(os.getpid(), number)

        threading.Thread(target=follow, daemon=True).start()


def die_with(parent: int | None, number: signal.Signals) -> None:
    """Let the system send this process signal `number` when its parent ends. None: the parent's number is unknown."""
    if sys.platform != "linux":
        return
    import ctypes  # here, because main scripts import this file, and few need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)
