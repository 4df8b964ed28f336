"""Twenty updates give the same losses, bit for bit, under every launcher."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launch.clusters import (
    MPI_AS_ROOT,
    MULTI,
    SINGLE,
    Command,
    Slurm,
    launch,
    needs,
    slurm,
    torchrun,
    two_machines,
)
from tests.program import TINY_DIGITS, Result, Started, metrics, run_program
from tests.waiting import free_port

# Mixed precision, dropout, EMA: whatever could differ from rank to rank.
WORDS = [
    *("-amp", "bf16", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "MODEL.DEPTH=2", "TRAIN.MODEL_EMA=true"),
    *("REPORT_FREQ=1", "-batch_size_eval", "77", "TRAIN.MAX_UPDATES=20"),
    "LOG_STYLE=paddlevit",  # mpirun gives its ranks a terminal
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "tiny.yaml").write_text(TINY_DIGITS)
    return folder


def program(run: Path) -> list[str]:
    return [MULTI, "-cfg", str(run.parent / "tiny.yaml"), "-output", str(run), *WORDS]


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """All metrics, and the final weights."""
    last = max((run / "checkpoints").glob("step-*"))
    figures = metrics(run)
    assert sum(line["event"] == "train" for line in figures) == 20
    return figures, (last / "model.safetensors").read_bytes(), (last / "ema.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(place: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """The reference: one process with two micro-batches per update, without a launcher."""
    run = place / "alone"
    done = run_program(*program(run)[1:], "-accum_iter", 2, streams=place)
    assert done.code == 0, done.text
    return outcome(run)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


def well(done: Result, *said: str) -> None:
    assert done.code == 0, done.text
    for text in (*said, "Done: best"):
        assert done.out.count(text) == 1, done.text


def test_main_multi_gpu_starts_its_own_ranks(alone: object, place: Path) -> None:
    run = place / "plain"
    done = run_program(*program(run)[1:], "-ngpus", 2, script="main_multi_gpu.py", streams=place)
    well(done, "main_multi_gpu.py itself, 2 processes on 1 machine")
    assert outcome(run) == alone


def test_torchrun(alone: object, place: Path) -> None:
    run = place / "torchrun"
    start = torchrun("--nproc_per_node", 2, "--master_port", free_port())
    well(launch(*start, *program(run)), "torchrun, 2 processes on 1 machine")
    assert outcome(run) == alone


@pytest.mark.slow
def test_torch_distributed_launch(alone: object, place: Path) -> None:
    """torchrun's predecessor, which may add a flag of its own."""
    run = place / "launch"
    start = (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node", 2)
    well(launch(*start, "--master_port", free_port(), *program(run)))
    assert outcome(run) == alone


def test_ranks_by_flags(alone: object, place: Path) -> None:
    """-host, -port, -rank and -world_size, one command line per process; only rank 0 prints."""
    run, words = place / "hand", ("-host", "localhost", "-port", free_port(), "-world_size", 2)

    def rank(number: int) -> Result:
        streams = place / f"streams{number}"
        streams.mkdir()
        flags = (*program(run)[1:], *words, "-rank", number)
        return run_program(*flags, script="main_multi_gpu.py", streams=streams)

    with ThreadPoolExecutor() as pool:
        first, other = pool.map(rank, (0, 1))
    well(first, "by hand, 2 processes on 1 machine")
    assert (other.code, other.text) == (0, "")
    assert outcome(run) == alone


def test_ranks_by_environment_variables(alone: object, place: Path) -> None:
    """As a Kubernetes operator starts one process per pod: no launcher, and no local rank."""
    run, port = place / "environment", str(free_port())

    def rank(number: int) -> Result:
        streams = place / f"pod{number}"
        streams.mkdir()
        env = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        return run_program(*program(run)[1:], script="main_multi_gpu.py", streams=streams, env=env)

    with ThreadPoolExecutor() as pool:
        first, other = pool.map(rank, (0, 1))
    well(first)
    assert (other.code, other.text) == (0, "")
    assert outcome(run) == alone


def mpirun() -> list[object]:
    name = "mpirun.openmpi" if shutil.which("mpirun.openmpi") else "mpirun"
    needs(name, package="openmpi-bin")
    return [name, "--oversubscribe", "--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"]


@pytest.mark.slow
def test_mpirun(alone: object, place: Path) -> None:
    run = place / "openmpi"
    done = launch(*mpirun(), "-n", 2, sys.executable, *program(run), env=MPI_AS_ROOT)
    well(done, "OpenMPI, 2 processes on 1 machine")
    assert outcome(run) == alone


@pytest.mark.slow
def test_srun(alone: object, place: Path, cluster: Slurm) -> None:
    """Two nodes with one task each; older scripts, `HOST=... srun bash script.sh`, give the host by a flag."""
    run = place / "srun"
    flags = ("-host", "127.0.0.1", "-port", free_port())
    done = launch("srun", "-N", 2, "-n", 2, sys.executable, *program(run), *flags, env=cluster.env)
    well(done, "SLURM, 2 processes on 1 machine")  # both nodes are this machine
    assert outcome(run) == alone


@pytest.mark.slow
def test_srun_on_one_node_needs_no_host(alone: object, place: Path, cluster: Slurm) -> None:
    run = place / "srun_one"
    done = launch("srun", "-N", 1, "-n", 2, "-c", 1, sys.executable, *program(run), env=cluster.env)
    well(done, "SLURM, 2 processes on 1 machine")
    assert outcome(run) == alone


@pytest.mark.slow
def test_batch_script_of_two_tasks_without_srun_trains_one_process(place: Path, cluster: Slurm) -> None:
    """SLURM_NTASKS is 2 in it, but the script is one process, which starts no second one."""
    run, script = place / "batch", place / "batch.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} {' '.join(program(run))}\n")
    done = launch("sbatch", "-W", "-N", 1, "-n", 2, "-o", place / "batch.log", script, env=cluster.env)
    log = (place / "batch.log").read_text()
    assert done.code == 0, done.text + log
    assert "One process" in log
    assert [path.name for path in (run / "ranks").iterdir()] == ["0.log"]


@pytest.mark.slow
def test_torchrun_on_two_machines(alone: object, place: Path) -> None:
    run = place / "machines"
    with two_machines() as on:
        words = ("--nnodes", 2, "--nproc_per_node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:29400")
        both = [Command(*on(machine), *torchrun(*words), *program(run)) for machine in (0, 1)]
        try:
            first, second = (command.end(240) for command in both)
        finally:
            for command in both:
                command.kill()
    ours, theirs = (first, second) if "Done: best" in first.out else (second, first)  # the agents agree who is rank 0
    well(ours, "torchrun, 2 processes on 2 machines")
    assert theirs.code == 0, theirs.text
    assert outcome(run) == alone


@pytest.mark.slow
def test_srun_on_two_machines_resolves_the_first_by_name(alone: object, place: Path) -> None:
    run = place / "srun_machines"
    with two_machines() as on, slurm(on) as cluster:
        start = [*on(0), "srun", "-N", 2, "-n", 2, sys.executable]
        done = launch(*start, *program(run), env=cluster.env)
    well(done, "SLURM, 2 processes on 2 machines", "rendezvous at n0:")
    assert outcome(run) == alone


@pytest.mark.parametrize("how", ["torchrun", "openmpi", pytest.param("srun", marks=pytest.mark.slow)])
def test_main_single_gpu_started_twice_names_main_multi_gpu(
    place: Path, how: str, request: pytest.FixtureRequest
) -> None:
    start, env = torchrun("--nproc_per_node", 2, "--master_port", free_port()), MPI_AS_ROOT
    if how == "openmpi":
        start = [*mpirun(), "-n", 2, sys.executable]
    elif how == "srun":
        env = request.getfixturevalue("cluster").env
        start = ["srun", "-N", 1, "-n", 2, sys.executable]
    run = place / f"single_{how}"
    done = launch(*start, SINGLE, *program(run)[1:], env=env)
    if how != "torchrun":  # which makes a 1 of every failure
        assert done.code == 2, done.text
    assert done.err.count("main_single_gpu.py was started 2 times") == 1, done.text
    assert "Start main_multi_gpu.py" in done.err
    assert "Traceback" not in done.err.partition("main_single_gpu.py was started")[0]
    assert not run.exists()


def of_job(kind: str, job: int, rank: int) -> dict[str, str]:
    """The launcher's environment of one of two processes, on a machine with digits in its name."""
    if kind == "srun":  # the second job is another step of the same allocation
        step = {"SLURM_JOB_ID": 4711, "SLURM_STEP_ID": job, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
        place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}
        return {name: str(value) for name, value in {**step, **place}.items()}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
    name = (
        {"OMPI_MCA_ess_base_jobid": f"{job}"} if kind == "openmpi 4" else {"PMIX_NAMESPACE": f"prterun-node07-{job}@1"}
    )
    return {**{f"OMPI_COMM_WORLD_{key}": str(number) for key, number in numbers.items()}, **name}


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("openmpi 5", "OpenMPI"),
        pytest.param("openmpi 4", "OpenMPI", marks=pytest.mark.slow),
        pytest.param("srun", "SLURM", marks=pytest.mark.slow),
    ],
)
def test_concurrent_jobs_do_not_join_each_other(place: Path, kind: str, launcher: str) -> None:
    short = ("TRAIN.MAX_UPDATES=2", "DIST.TIMEOUT=1")
    ranks: dict[tuple[int, int], Started] = {}
    for job in (4711, 4712):
        run = place / f"{kind.replace(' ', '_')}_{job}"
        for rank in (0, 1):
            streams = place / f"{run.name}_streams{rank}"
            streams.mkdir()
            argv = [*program(run)[1:], *short]
            ranks[job, rank] = Started(MULTI, argv, place, of_job(kind, job, rank), streams)
    ended = {key: process.end(120) for key, process in ranks.items()}
    for job in (4711, 4712):
        well(ended[job, 0], f"{launcher}, 2 processes on 1 machine")
        assert (ended[job, 1].code, ended[job, 1].out) == (0, ""), ended[job, 1].text
    met = {re.search(r"rendezvous at 127\.0\.0\.1:(\d+)", ended[job, 0].out)[1] for job in (4711, 4712)}  # pyright: ignore[reportOptionalSubscript]
    assert len(met) == 2
