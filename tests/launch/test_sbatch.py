"""scripts/slurm/train.sbatch: a job warned by SIGUSR1 saves, requeues and resumes; a cancelled one does not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.clusters import Command, Slurm, marked, slurm
from tests.program import ROOT, metrics
from tests.waiting import free_port, until

pytestmark = pytest.mark.slow
# Two nodes without GPUs, one task each, instead of the resources that the script asks for.
HERE = ("--nodes=2", "--ntasks-per-node=1", "--gres=none", "--cpus-per-task=1")
WORDS = ("TRAIN.NUM_EPOCHS=20", "REPORT_FREQ=1", "SAVE_FREQ=100", "DATA.NUM_WORKERS=0", "TRAIN.MAX_UPDATES=400")


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


class Job:
    """The submitted script; `run` is its run folder."""

    def __init__(self, cluster: Slurm, tiny: Path, name: str) -> None:
        self.cluster, self.run, self.log = cluster, tiny.parent / name, tiny.parent / f"{name}.log"
        host = ("-host", "127.0.0.1", "-port", free_port())  # both nodes are this machine, and neither has a name
        script = ROOT / "scripts" / "slurm" / "train.sbatch"
        sbatch = ("sbatch", "--parsable", f"--chdir={ROOT}", "-o", self.log, *HERE, script)
        words = ("-cfg", tiny, "-output", self.run, *host, *WORDS)
        self.command = Command(*sbatch, *words, env={**cluster.env, "PYTHON": sys.executable}, cwd=ROOT)
        out, err = self.command.process.communicate(timeout=30)
        assert self.command.process.returncode == 0, err
        self.number = out.strip()

    def state(self) -> str:
        return self.cluster.ask("squeue", "-h", "-j", self.number, "-o", "%T")

    def wait_for_updates(self) -> None:
        lines = self.run / "metrics.jsonl"
        until(lambda: not self.state() or (lines.exists() and lines.read_text().count('"train"') > 3), 240)
        assert self.state(), f"the job ended early: {self.log.read_text()}"


@pytest.mark.every_slice
def test_warned_job_requeues_and_resumes(cluster: Slurm, tiny: Path) -> None:
    quiet = Job(cluster, tiny, "quiet")
    until(lambda: not quiet.state(), 200)
    job = Job(cluster, tiny, "warned")
    job.wait_for_updates()
    cluster.ask("scancel", "--signal=USR1", job.number)
    until(lambda: job.state() == "PENDING" and not marked(job.command.mark), 60)
    assert "requeueing job" in job.log.read_text()
    saved = metrics(job.run, "train")[-1]["update"]
    assert saved < 400
    cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now+5")  # SLURM would wait two minutes
    until(lambda: not job.state(), 200)
    assert f"resuming from step-{saved:09d}" in job.log.read_text()
    ours, theirs = ([line for line in metrics(run) if line["event"] != "run"] for run in (job.run, quiet.run))
    assert ours == theirs


def test_cancelled_job_is_not_requeued(cluster: Slurm, tiny: Path) -> None:
    job = Job(cluster, tiny, "cancelled")
    job.wait_for_updates()
    cluster.ask("scancel", job.number)
    until(lambda: not job.state() and not marked(job.command.mark), 60)
    assert "requeueing job" not in job.log.read_text()
    assert metrics(job.run, "run")[-1]["what"] == "paused", "it was saved all the same"
