"""Which rank a process is, by what its launcher put into the environment."""

from __future__ import annotations

import os

import pytest

from utils.config.schema import DistConfig
from utils.distributed.processes import birth_of
from utils.distributed.signpost import ports_of
from utils.distributed.world import World, check_alone, first_host, launched, read_world
from utils.errors import UserError

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1234567",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
NO_FLAGS = DistConfig()


def test_torchrun_brings_its_own_meeting_point() -> None:
    assert read_world(NO_FLAGS, TORCHRUN) == World(9, 16, 1, 8, "torchrun", None)


def test_a_rank_and_a_world_alone_are_one_process_a_machine() -> None:
    assert read_world(NO_FLAGS, {"RANK": "1", "WORLD_SIZE": "4"}) == World(1, 4, 0, 1, "torchrun", None)


def test_srun_names_the_first_machine_and_the_step() -> None:
    world = read_world(NO_FLAGS, SRUN)
    assert world == World(5, 6, 1, 2, "SLURM", ("gpu03", None), "SLURM  4711.0")
    assert world is not None
    first = read_world(NO_FLAGS, {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert first.meeting == world.meeting
    assert first.local_size == 4
    assert first.job == world.job
    # Their numbers fell onto one port: 7 times the job's and the step's, added up.
    others = ({"SLURM_JOB_ID": "4710", "SLURM_STEP_ID": "7"}, {"SLURM_STEP_ID": "1"}, {"SLURM_CLUSTER_NAME": "b"})
    names = [found.job for other in others if (found := read_world(NO_FLAGS, {**SRUN, **other}))]
    assert len({world.job, *names}) == 4


def test_srun_on_one_machine_meets_there_and_has_its_cores() -> None:
    here = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "7"}
    world = read_world(NO_FLAGS, here)
    assert world is not None
    assert (world.local_size, world.cores) == (6, 7)
    assert world.meeting is not None
    assert world.meeting[0] == "127.0.0.1"


def test_where_rank_0_is_can_be_said() -> None:
    flags = DistConfig(HOST="login", PORT=4000)
    for env in (SRUN, OPENMPI):
        told = read_world(flags, env)
        assert told is not None
        assert told.meeting == ("login", 4000)
        by_environment = read_world(NO_FLAGS, {**env, "MASTER_ADDR": "node", "MASTER_PORT": "4001"})
        assert by_environment is not None
        assert by_environment.meeting == ("node", 4001)


def test_a_batch_script_is_one_process_whatever_the_job_has() -> None:
    batch = {key: text for key, text in SRUN.items() if "STEP" not in key} | {"SLURM_PROCID": "0"}
    assert read_world(NO_FLAGS, batch) is None
    one_task = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert read_world(NO_FLAGS, one_task) is None, "srun --pty bash, or a task a node that starts its own processes"


def test_openmpi_on_several_machines_has_to_be_told_where_rank_0_is() -> None:
    with pytest.raises(UserError, match=r"4 processes on several machines .* -host NAME"):
        read_world(NO_FLAGS, OPENMPI)
    in_a_job = read_world(NO_FLAGS, {**OPENMPI, "SLURM_JOB_NODELIST": "a1,b2"})
    assert in_a_job is not None
    assert in_a_job.meeting is not None
    assert in_a_job.meeting[0] == "a1"


def test_mpi_on_one_machine() -> None:
    world = read_world(NO_FLAGS, {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    assert world == World(3, 4, 3, 4, "OpenMPI", ("127.0.0.1", None), "OpenMPI 1234567")


def test_two_jobs_of_openmpi_5_on_a_machine_with_digits_in_its_name_differ() -> None:
    def job(number: int) -> str | None:
        env = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": f"prterun-node07-{number}@1"}
        del env["OMPI_MCA_ess_base_jobid"]
        world = read_world(NO_FLAGS, env)
        assert world is not None
        assert world.meeting == ("127.0.0.1", None)
        return world.job

    assert job(4711) != job(4712)
    assert ports_of(f"{job(4711)}") != ports_of(f"{job(4712)}")


def test_mpich_has_no_name_for_a_job_but_that_of_the_process_that_started_all() -> None:
    world = read_world(NO_FLAGS, MPICH)
    assert world is not None
    parent = birth_of(os.getppid())
    assert (world.meeting, world.job) == (("127.0.0.1", None), f"MPICH {os.getppid()} {parent}")
    elsewhere = read_world(DistConfig(HOST="node0"), {**MPICH, "MPI_LOCALNRANKS": "1"})
    assert elsewhere is not None
    assert (elsewhere.meeting, elsewhere.job) == (("node0", 29500), None)


def test_the_innermost_launcher_counts() -> None:
    for inner, name in ((TORCHRUN, "torchrun"), (OPENMPI, "OpenMPI"), (MPICH, "MPICH")):
        found = launched({**SRUN, **inner})
        assert found is not None
        assert found.launcher == name
    srun_with_pmi = launched({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"})
    assert srun_with_pmi is not None
    assert srun_with_pmi.launcher == "SLURM", "it knows the local rank"


def test_flags_by_hand() -> None:
    flags = DistConfig(HOST="a", PORT=1, RANK=1, WORLD_SIZE=2)
    assert read_world(flags, {}) == World(1, 2, 0, 1, "by hand", ("a", 1))
    assert read_world(flags, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == World(1, 2, 1, 2, "by hand", ("a", 1))
    with pytest.raises(UserError, match="-rank 1 -world_size 2, but the launcher made this process rank 9 of 16"):
        read_world(flags, TORCHRUN)


def test_a_host_without_any_rank_is_not_enough() -> None:
    with pytest.raises(UserError, match="missing: -port -rank -world_size"):
        read_world(DistConfig(HOST="a"), {})


def test_one_of_many_that_knows_no_rank_is_stopped() -> None:
    with pytest.raises(UserError, match=r"one of 8 processes \(PMI_SIZE\)"):
        check_alone({"PMI_RANK": "3", "PMI_SIZE": "8"})
    check_alone({"PMI_RANK": "0", "PMI_SIZE": "1"})
    check_alone({})


@pytest.mark.parametrize(
    ("machines", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("cpu1,gpu[03-05]", "cpu1"),
        ("rack[1-2]n[007,009]-ib,x", "rack1n007-ib"),
        ("a-1.cluster,b", "a-1.cluster"),
    ],
)
def test_the_first_of_a_list_of_machines(machines: str, first: str) -> None:
    assert first_host(machines) == first
