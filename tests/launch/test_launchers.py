"""Two processes have one voice, and give the same losses as one, bit for bit, under every launcher."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import clusters
from tests.launch.clusters import (
    MPI_AS_ROOT,
    MULTI,
    SINGLE,
    Command,
    Slurm,
    launch,
    marked,
    needs,
    torchrun,
    two_machines,
)
from tests.program import ROOT, Result, Started, Vitamp, metrics, run_program, save_image
from tests.waiting import free_port
from utils.cli import parse

# Mixed precision, dropout, EMA: whatever could differ from rank to rank.
WORDS = [
    *("-amp", "bf16", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "MODEL.DEPTH=2", "TRAIN.MODEL_EMA=true"),
    *("REPORT_FREQ=1", "-batch_size_eval", "77"),
]


def program(run: Path) -> list[str]:
    return [MULTI, "-cfg", str(run.parent / "tiny.yaml"), "-output", str(run), *WORDS]


def begin(run: Path, rank: object, *words: str, env: dict[str, str]) -> Started:
    streams = run.with_name(f"{run.name}_streams{rank}")
    streams.mkdir()
    return Started(MULTI, [*program(run)[1:], *words], ROOT, env, streams)


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    last = max((run / "checkpoints").glob("step-*"))
    figures = metrics(run)
    assert sum(line["event"] == "train" for line in figures) == 44
    return figures, (last / "model.safetensors").read_bytes(), (last / "ema.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(place: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """The reference: one process with two micro-batches per update, without a launcher."""
    run = place / "alone"
    run_program(*program(run)[1:], "-accum_iter", 2, streams=place, code=0)
    return outcome(run)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with clusters.slurm() as running:
        yield running


def well(done: Result, *said: str) -> None:
    assert done.code == 0, done.text
    for text in (*said, "Done: best"):
        assert done.out.count(text) == 1, done.text


def test_main_multi_gpu_starts_its_own_ranks(alone: object, place: Path) -> None:
    run = place / "plain"
    done = run_program(*program(run)[1:], "-ngpus", 2, script="main_multi_gpu.py", streams=place)
    batch = "32 per device x 2 devices x 1 accumulated = 64; 22 updates per epoch"
    well(done, "main_multi_gpu.py itself, 2 processes on 1 machine", batch, "precision  bf16")
    assert done.out.count("Step[0022/0022]") == 2
    assert (run / "log.txt").read_text() == (run / "ranks" / "0.log").read_text()
    assert batch in (run / "ranks" / "1.log").read_text()
    assert outcome(run) == alone


@pytest.mark.parametrize("by", ["itself", "hand"])
def test_local_ranks_listen_on_this_machine_only(place: Path, by: str) -> None:
    words = ["-ngpus", 2] if by == "itself" else ["-host=127.0.0.1", f"-port={free_port()}", "-rank=0", "-world_size=2"]
    seen: list[str] = []
    started = Command(sys.executable, *program(place / f"ports_{by}"), *words, "TRAIN.NUM_EPOCHS=10000")
    try:
        started.wait_until(lambda: seen.extend(listening(marked(started.mark))) or seen, 60)
    finally:
        started.kill()
    assert {address.partition(":")[0] for address in seen} == {"0100007F"}


def listening(pids: list[int]) -> list[str]:
    """Addresses and ports, as /proc has them, that these processes listen on."""
    opened = set()
    for pid in pids:
        for link in Path("/proc", str(pid), "fd").glob("*"):
            with contextlib.suppress(OSError):  # closed by now
                opened.add(os.readlink(link))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in opened]


def test_windows_that_do_not_come_out_even(vitamp: Vitamp, place: Path) -> None:
    """Ten micro-batches in windows of four leave a last one of two; 101 images are an odd one out for two ranks."""
    data = ("DATA.DATASET=synthetic", "DATA.SYNTHETIC_TRAIN=330", "DATA.SYNTHETIC_VAL=101", "TRAIN.NUM_EPOCHS=1")
    words = ("-cfg", place / "tiny.yaml", *data, "REPORT_FREQ=1", "-batch_size_eval", 16, "TRAIN.GRAD_CLIP=null")
    for ranks in (1, 2):
        spread = ("-ngpus", ranks, "-accum_iter", 4 // ranks)
        vitamp(*words, *spread, "-output", place / f"uneven{ranks}", script="main_multi_gpu.py", code=0)
    one, many = metrics(place / "uneven1"), metrics(place / "uneven2")
    assert [line["update"] for line in many if line["event"] == "train"] == [1, 2, 3]
    for ours, theirs in zip(one, many, strict=True):
        numbers = {key: value for key, value in ours.items() if not isinstance(value, str)}
        assert numbers == pytest.approx({key: theirs[key] for key in numbers}, rel=1e-5), (ours, theirs)
    (validated,) = (line for line in many if line["event"] == "val")
    hits = validated["acc1"] * 101 / 100
    assert hits == pytest.approx(round(hits), abs=1e-9), "of 101 images, each once"


def test_without_a_gpu_and_without_ngpus_one_process_and_it_says_so(vitamp: Vitamp, place: Path) -> None:
    run = place / "one"
    words = ("-cfg", place / "tiny.yaml", "-output", run, "TRAIN.MAX_UPDATES=1")
    done = vitamp(*words, script="main_multi_gpu.py", code=0)
    assert "One process" in done.out
    assert "-ngpus N" in done.out
    assert [path.name for path in (run / "ranks").iterdir()] == ["0.log"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["TRAIN.BASELR=1"], "Did you mean TRAIN.BASE_LR"),
        (["-batch_size", 2000], "1437 images"),
        (["DIST.BACKEND=nccl"], "-backend nccl needs GPUs"),
    ],
)
def test_what_is_wrong_is_said_once(vitamp: Vitamp, place: Path, words: list[object], said: str) -> None:
    run = place / "refused"
    done = vitamp("-cfg", place / "tiny.yaml", "-output", run, "-ngpus", 2, *words, script="main_multi_gpu.py", code=2)
    assert done.text.count(said) == 1
    assert done.err.count("error:") == 1
    assert not run.exists()


PREDECESSOR = (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch")
"""Of torchrun, which may add a flag of its own"""


@pytest.mark.parametrize(
    "start", [torchrun(), pytest.param(PREDECESSOR, marks=pytest.mark.slow)], ids=["run", "launch"]
)
def test_torchrun(alone: object, place: Path, start: tuple[object, ...]) -> None:
    run = place / f"torchrun{len(start)}"
    done = launch(*start, "--nproc_per_node", 2, "--master_port", free_port(), *program(run))
    well(done, "torchrun, 2 processes on 1 machine")
    assert outcome(run) == alone


@pytest.mark.parametrize("by", ["flags", "environment variables"])
def test_ranks_by_hand(alone: object, place: Path, by: str) -> None:
    """One command line per process, or one pod, as a Kubernetes operator starts them; only rank 0 prints."""
    run, port, ranks = place / by, str(free_port()), []
    for rank in ("0", "1"):
        flags = ["-host", "localhost", "-port", port, "-world_size", "2", "-rank", rank] * (by == "flags")
        env = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        env["TORCHELASTIC_RESTART_COUNT"] = rank  # torchrun does not count restarts that another machine caused
        ranks.append(begin(run, rank, *flags, env={} if flags else env))
    first, other = (rank.end(120) for rank in ranks)
    well(first, "by hand, 2 processes on 1 machine")
    assert (other.code, other.text) == (0, "")
    assert outcome(run) == alone


@pytest.mark.parametrize(("split", "more"), [("train", []), ("val", []), ("val", ["-eval"])])
def test_machines_with_other_images_are_refused(tmp_path: Path, place: Path, split: str, more: list[str]) -> None:
    """The copy of the second one is not complete."""
    run, ranks = place / "others", []
    by_hand = ["-host", "localhost", "-port", str(free_port()), "-world_size", "2", "-data_path", "data", *more]
    for rank in (0, 1):
        (machine := tmp_path / f"machine{rank}").mkdir()
        for part in ("train", "val"):
            for number in range(9 - rank * (part == split)):
                save_image(machine / "data" / part / f"class{number % 2}" / f"{number}.png", seed=number)
        words = [*program(run)[1:], "DATA.DATASET=imagefolder", "-num_classes", "2", "-batch_size", "2", *by_hand]
        ranks.append(Started(MULTI, [*words, "-rank", str(rank)], machine, {}, machine))
    first, other = (rank.end(120) for rank in ranks)
    assert (first.code, other.code) == (2, 2)
    assert re.search(rf"rank 1 has other {split}\w+ images than rank 0, .* names and labels \(8 and 9\)", first.err)


def mpirun() -> list[object]:
    name = "mpirun.openmpi" if shutil.which("mpirun.openmpi") else "mpirun"
    needs(name, package="openmpi-bin")
    return [name, "--oversubscribe", "--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"]


@pytest.mark.slow
def test_mpirun(alone: object, place: Path) -> None:
    run = place / "openmpi"
    done = launch(*mpirun(), "-n", 2, sys.executable, *program(run), env=MPI_AS_ROOT)
    well(done, "OpenMPI, 2 processes on 1 machine")
    assert "\x1b" not in done.text, "mpirun gives its ranks a terminal, though its own output is a pipe"
    assert outcome(run) == alone


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_srun(alone: object, place: Path, cluster: Slurm, nodes: int) -> None:
    """Two nodes need the host of rank 0 by a flag, as older scripts, `HOST=... srun bash script.sh`, give it."""
    run = place / f"srun{nodes}"
    flags = ("-host", "127.0.0.1", "-port", free_port()) if nodes == 2 else ()
    start = ("srun", "-N", nodes, "-n", 2, *["-c", 1] * (nodes == 1), sys.executable)
    well(launch(*start, *program(run), *flags, env=cluster.env), "SLURM, 2 processes on 1 machine")
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
    with two_machines() as on, clusters.slurm(on) as cluster:
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
    four, five = {"OMPI_MCA_ess_base_jobid": f"{job}"}, {"PMIX_NAMESPACE": f"prterun-node07-{job}@1"}
    name = four if kind == "openmpi 4" else five
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
            ranks[job, rank] = begin(run, rank, *short, env=of_job(kind, job, rank))
    ended = {key: process.end(120) for key, process in ranks.items()}
    for job in (4711, 4712):
        well(ended[job, 0], f"{launcher}, 2 processes on 1 machine")
        assert (ended[job, 1].code, ended[job, 1].out) == (0, ""), ended[job, 1].text
    met = {re.search(r"rendezvous at 127\.0\.0\.1:(\d+)", ended[job, 0].out)[1] for job in (4711, 4712)}  # pyright: ignore[reportOptionalSubscript]
    assert len(met) == 2


def test_kubernetes_manifest_starts_an_existing_script_and_recipe() -> None:
    text = (ROOT / "scripts" / "kubernetes" / "pytorchjob.yaml").read_text(encoding="utf-8")
    replicas: dict[str, Any] = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1, "the operator allows one"
    for pods in replicas.values():
        (container,) = pods["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        script, *words = container["args"]
        assert (container["command"], (ROOT / script).is_file()) == (["torchrun"], True)
        command = parse(words, script)
        assert command.cfg is not None
        assert (ROOT / command.cfg).is_file()
        assert command.flags["MODEL.RESUME"][0] == "auto", "or a restarted pod is refused its own run folder"
        assert command.flags["OUTPUT"][0].startswith("/runs")
