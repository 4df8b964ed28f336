"""Processes of the program, forked from a server that has imported torch, timm and the program already.

Importing these takes four seconds of CPU time. Everything else is as in `python script ...`: environment, folder,
streams, signals, exit code, and loading processes that are forked. The ranks of `-ngpus N` are forked too, from the
launcher; where a variable of Python's own is set they are started for real, since only a new Python reads it.
"""

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"engine", "datasets", "models", "utils", "tools", "bench", "vitamp"}
STAND_INS = {"engine.machine.late_compiler"}
"""Modules that have already put a stand-in in place; imported again they would not know it."""
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])
_starting = threading.Lock()


def start_process(
    script: str, argv: list[str], cwd: str, env: dict[str, str], streams: tuple[str, str]
) -> multiprocessing.process.BaseProcess:
    """Start `python script argv...` in the background; `streams`: the files of its output and its errors."""
    with _starting, contextlib.chdir(ROOT):  # where the server, started with the first process, finds what it imports
        multiprocessing.forkserver.ensure_running()
    process = _server.Process(target=become, args=(script, argv, cwd, env, streams))
    process.start()
    return process


def become(script: str, argv: list[str], cwd: str, env: dict[str, str], streams: tuple[str, str]) -> None:
    """In a process that the server forked: be `python script argv...`."""
    # As in a python of its own on Linux: from here, loading processes would be started by another server, in seconds.
    multiprocessing.set_start_method("fork", force=True)
    for number, path in enumerate(streams, start=1):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(cwd)
    os.environ.update(env)
    if not any(name.startswith("PYTHON") for name in env):
        _fork_ranks(script)
    from engine.machine import stopping

    stopping.BEGAN = time.monotonic()
    _run(script, argv)


def _run(script: str, argv: list[str]) -> None:
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = [script, *argv]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _fork_ranks(script: str) -> None:
    """Let torch's launcher fork this process where it would start a Python for `script`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args: tuple[str, ...], env: dict[str, str], **options: Any) -> Any:
        if args[:3] != (sys.executable, "-u", script):
            return subprocess.Popen(args, env=env, **options)
        # Called in the forked process in place of exec. It never returns, and needs no lock of the launcher's threads.
        become_rank = functools.partial(_be_rank, script, list(args[3:]), env)
        return subprocess.Popen(args, preexec_fn=become_rank, **options)  # noqa: PLW1509

    setattr(subprocess_handler, "Popen", start)  # noqa: B010 - the module does not export the name


def _be_rank(script: str, argv: list[str], env: dict[str, str]) -> None:
    """What exec and a new Python would do; then the script."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    log = logging.getLogger("vitamp")
    for handler in list(log.handlers):
        log.removeHandler(handler)
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOMS and name not in STAND_INS]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(env)
    try:
        _run(script, argv)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
