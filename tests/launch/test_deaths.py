"""A rank is killed under a real launcher: all ranks end soon, and one message names it; or torchrun restarts it."""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.clusters import MPI_AS_ROOT, MULTI, Command, launch, needs, slurm, torchrun
from tests.launch.test_together import ENDLESS, FAULTY
from tests.program import metrics
from tests.waiting import free_port

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def launcher(name: str) -> Iterator[tuple[list[object], dict[str, str], str]]:
    """Command in front of the program, environment, and the pattern of the message that names the killed rank."""
    if name == "torchrun":
        start = torchrun("--nproc_per_node", 2, "--master_port", free_port())
        yield start, {}, r"Signal 9 \(SIGKILL\) received by PID {pid}"
    elif name == "plainly":
        yield [sys.executable], {}, r"rank {rank} on \S+ \(process {pid}\) was killed by SIGKILL"
    elif name == "srun":
        with slurm() as cluster:
            start = ["srun", "-N", 1, "-n", 2, sys.executable]
            yield start, cluster.env, r"rank {rank} on \S+ \(process {pid}\) died without an error message"
    else:
        needs("mpirun.openmpi", package="openmpi-bin")
        # After a death, mpirun gives the others 1 second; on a busy machine that may be too short to write the line.
        patient = ("--mca", "odls_base_sigkill_timeout", 3)
        start = ["mpirun.openmpi", "--oversubscribe", *patient, "-n", 2, sys.executable]
        yield start, MPI_AS_ROOT, r"process rank {rank} with PID \d+ on node \S+ exited on signal 9"


VICTIMS = [
    pytest.param(name, victim, marks=[pytest.mark.every_slice] * ((name, victim) == ("torchrun", 1)))
    for name in ("plainly", "torchrun", "srun", "mpirun")
    for victim in (1, 0)
]


@pytest.mark.parametrize(("name", "victim"), VICTIMS)
def test_killed_rank_ends_all_within_15_seconds_and_log_txt_names_it(name: str, victim: int, tiny: Path) -> None:
    run = tiny.parent / "run"
    lines, log = run / "metrics.jsonl", run / "log.txt"
    with launcher(name) as (start, env, said):
        words = ["-ngpus", 2] * (name == "plainly")
        command = Command(*start, MULTI, "-cfg", tiny, "-output", run, *ENDLESS, *words, env=env)
        try:
            command.wait_until(lambda: lines.exists() and lines.read_text().count('"train"') > 2, 120)
            row = re.search(rf"^  {victim} +\S+ +\d+ +(\d+) ", log.read_text(), re.MULTILINE)
            assert row is not None
            os.kill(int(row[1]), signal.SIGKILL)
            began = time.monotonic()
            done = command.end(60)
        finally:
            command.kill()
    assert time.monotonic() - began < 15
    assert done.code not in (0, 2), done.text
    assert len(re.findall(said.format(pid=row[1], rank=victim), done.text)) == 1, done.text
    assert len(re.findall(rf"error: rank {victim} on \S+ \(process {row[1]}\) died", log.read_text())) == 1


@pytest.mark.parametrize("own_store", ["0", "1"])
def test_ranks_restarted_by_torchrun_resume(tiny: Path, own_store: str) -> None:
    """With --max-restarts, whether or not torchrun keeps its store through a restart, also without -resume auto."""
    script = tiny.parent / "mortal.py"
    script.write_text(FAULTY)
    restarted, quiet = tiny.parent / "restarted", tiny.parent / "quiet"
    env = {"FAULT": "die before any restart", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
    words = ("--nproc_per_node", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts")
    flags = ("-cfg", tiny, "TRAIN.MAX_UPDATES=20", "SAVE_EVERY_UPDATES=2", "REPORT_FREQ=1")
    flags += ("-resume", "auto") if own_store == "0" else ()
    done = launch(*torchrun(*words, 2), script, *flags, "-output", restarted, env=env)
    assert done.code == 0, done.text
    assert done.out.count("resuming from step-000000004") == 1
    assert launch(*torchrun(*words, 0), MULTI, *flags, "-output", quiet, env=env).code == 0
    ours, theirs = ([line for line in metrics(run) if line["event"] != "run"] for run in (restarted, quiet))
    assert ours == theirs
    older = launch(*torchrun(*words, 1), MULTI, *flags[:5], "-output", quiet)
    assert older.err.count("already contains a run") == 2, "that of an earlier job is not resumed, in a restart neither"
