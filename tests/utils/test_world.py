"""A process reads its rank from its launcher's environment variables."""

from typing import Any

import pytest

from utils.distributed import launchers
from utils.distributed import world as world_of_ranks
from utils.distributed.launchers import first_host, read_world, world_from_launcher
from utils.distributed.world import ALONE, World
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
ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29501"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "1"}
NO_FLAGS: dict[str, Any] = {}


def world_of(env: dict[str, str], **flags: object) -> World:
    world = read_world(flags, env)
    assert world is not None
    return world


@pytest.mark.parametrize("served", [True, False])
def test_torchrun_may_serve_the_store(served: bool) -> None:
    world = read_world(NO_FLAGS, {**TORCHRUN, **ADDRESS, "TORCHELASTIC_USE_AGENT_STORE": str(served)})
    assert world == World(9, 16, 1, 8, "torchrun", ("node0", 29501), served=served)


def test_srun_gives_the_first_node_and_the_step() -> None:
    world = world_of(SRUN)
    assert world == World(5, 6, 1, 2, "SLURM", ("gpu03", 25227), "SLURM  4711.0")
    first = world_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (first.rendezvous, first.local_size, first.job) == (world.rendezvous, 4, world.job)
    # Jobs and steps whose numbers once led to the same port.
    others = ({"SLURM_JOB_ID": "4710", "SLURM_STEP_ID": "7"}, {"SLURM_STEP_ID": "1"}, {"SLURM_CLUSTER_NAME": "b"})
    found = [world_of({**SRUN, **other}) for other in others]
    assert len({(each.job, each.rendezvous) for each in (world, *found)}) == 4


@pytest.mark.parametrize(("bound", "on_node", "own"), [(16, 128, 16), (128, 128, 16), (16, None, 2)])
def test_cores_that_srun_divided_are_not_divided_again(
    monkeypatch: pytest.MonkeyPatch, bound: int, on_node: int | None, own: int
) -> None:
    for module in (launchers, world_of_ranks):
        monkeypatch.setattr(module, "cores", lambda: bound)
    slurm = {**SRUN, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    world = world_of(slurm | ({} if on_node is None else {"SLURM_CPUS_ON_NODE": str(on_node)}))
    assert (world.local_size, world.own_cores) == (8, own)


def test_srun_on_one_node_uses_localhost_and_reports_its_cores() -> None:
    world = world_of({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "7"})
    assert (world.local_size, world.cores, world.own_cores) == (6, 7, 7)
    assert world.rendezvous == ("127.0.0.1", 25227)


def test_flags_and_environment_can_name_the_host_of_rank_0() -> None:
    for env in (SRUN, OPENMPI):
        assert world_of(env, host="login", port=4000).rendezvous == ("login", 4000)
        assert world_of({**env, **ADDRESS}).rendezvous == ("node0", 29501)


def test_process_alone_needs_no_rank() -> None:
    assert read_world(NO_FLAGS, {"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    assert read_world(NO_FLAGS, {"RANK": "0", "WORLD_SIZE": "1"}) is None, "a pod may start processes of its own"
    assert read_world({"host": "a", "port": 1}, {"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch = {key: text for key, text in SRUN.items() if "STEP" not in key} | {"SLURM_PROCID": "0"}
    assert read_world(NO_FLAGS, batch) is None, "a batch script, whatever the job has"
    one_task = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert read_world(NO_FLAGS, one_task) is None, "srun --pty bash, or one task per node that starts its own processes"


def test_openmpi_needs_the_host_of_rank_0_on_several_machines_only() -> None:
    with pytest.raises(UserError, match=r"4 processes on several machines .* -host NAME"):
        read_world(NO_FLAGS, OPENMPI)
    assert (world_of({**OPENMPI, "SLURM_JOB_NODELIST": "a1,b2"}).rendezvous or ("",))[0] == "a1"
    world = world_of({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    port = world.rendezvous[1] if world.rendezvous else 0
    assert world == World(3, 4, 3, 4, "OpenMPI", ("127.0.0.1", port), "OpenMPI 1234567")
    assert 20000 <= port < 32000, "below Linux's ephemeral ports"


def test_innermost_launcher_counts() -> None:
    for inner, name in ((TORCHRUN, "torchrun"), (OPENMPI, "OpenMPI")):
        assert (world_from_launcher({**SRUN, **inner}) or ALONE).launcher == name


def test_ranks_by_hand_are_one_per_machine_unless_said() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", **ADDRESS}
    assert read_world(NO_FLAGS, env) == World(1, 4, 0, 1, "by hand", ("node0", 29501))
    flags = {"host": "a", "port": 1, "rank": 1, "world_size": 2}
    assert read_world(flags, {}) == World(1, 2, 0, 1, "by hand", ("a", 1))
    assert read_world(flags, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == World(1, 2, 1, 2, "by hand", ("a", 1))
    with pytest.raises(UserError, match="-rank 1 -world_size 2, but the launcher made this process rank 9 of 16"):
        read_world(flags, TORCHRUN)


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
def test_first_host_of_a_node_list(machines: str, first: str) -> None:
    assert first_host(machines) == first
