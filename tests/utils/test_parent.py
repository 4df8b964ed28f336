"""Processes that die with the one that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets.processes import children, gone
from tests.waiting import until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

POOL = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from utils.program import die_with_parent

def work(file):
    open(file, "w").close()
    while True:
        pass

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent) as pool:
        pool.submit(work, {file!r}).result()
"""
PROGRAM = """
import subprocess, sys
from utils.program import as_child
child = "import time; from utils.program import die_with_starting_tool as die; die(); open({file!r}, 'w').close()"
child += "; time.sleep(99)"
subprocess.run([sys.executable, "-c", child], env=as_child())
"""
TOOL = """
import time
from tools.common.sessions import own_process
from pathlib import Path

if __name__ == "__main__":
    with own_process() as pool:
        pool.submit(Path({file!r}).touch).result()
        pool.submit(time.sleep, 99).result()
"""
PROGRAMS = {
    **{method: POOL.replace("{method!r}", repr(method)) for method in ("fork", "spawn", "forkserver")},
    "subprocess": PROGRAM,
    "a benchmark": TOOL,
}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow if name == "a benchmark" else ()) for name in PROGRAMS]
)
def test_child_that_computes_dies_with_its_parent(tmp_path: Path, program: str, end: signal.Signals) -> None:
    script, begun = tmp_path / "parent.py", tmp_path / "begun"
    script.write_text(PROGRAMS[program].replace("{file!r}", repr(str(begun))), encoding="utf-8")
    with subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}) as parent:
        try:
            until(begun.exists)
            started = _descendants(parent.pid)
            assert started
        finally:
            parent.send_signal(end)
    assert gone(started, seconds=20)


def _descendants(pid: int) -> set[int]:
    below = set(children(pid))
    return below.union(*map(_descendants, below))
