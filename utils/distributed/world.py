"""This process's rank, as its launcher gives it, and collectives over small objects. The one place that reads ranks."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from utils.errors import AllRanksUserError, UserError
from utils.machine.cpus import cores

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

BY_HAND, TORCHRUN, OPENMPI, MPICH, SLURM = "by hand", "torchrun", "OpenMPI", "MPICH", "SLURM"
DEFAULT_PORT = 29500
RANK_FLAGS = ("host", "port", "rank", "world_size")
PORTS = range(20000, 32000)
"""Of jobs that have a number: below the range from which Linux takes ephemeral ports."""
# For each launcher: rank, world size, local rank, local world size. The innermost launcher comes first: mpirun within a
# SLURM job counts, not the job. MPICH must have set its own two variables beside PMI's: srun may set PMI_RANK too, and
# SLURM's variables say more.
_VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPENMPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    MPICH: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Never SLURM_NTASKS: a plain python in a batch script finds it set, and is one process all the same.
    SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
# Set by launchers that give a number of processes, but too little else to join them.
_SIZES_OF_OTHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """This process is `rank` of `size` in all, and `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    rendezvous: tuple[str, int] | None = None
    """Host and port of the store in which the ranks find each other."""
    job: str | None = None
    """The launcher's name for these processes: equal on all ranks, different from any other job's."""
    cores: int | None = None
    """CPU cores the launcher reserved for this process, if it says so."""
    served: bool = False
    """True where the launcher serves the store; else rank 0 does."""

    @property
    def first(self) -> bool:
        """True on rank 0, which writes, prints and decides."""
        return self.rank == 0

    @property
    def own_cores(self) -> int:
        """CPU cores for this process: those that the launcher reserved, else its share of the machine's."""
        return self.cores or max(1, cores() // self.local_size)


ALONE = World()


def name_of(member: Mapping[str, Any]) -> str:
    """A rank, by what it said of itself when it joined."""
    return f"rank {member['rank']} on {member['host']} (process {member['pid']})"


def read_world(given: Mapping[str, Any] | None = None, env: Mapping[str, str] = os.environ) -> World | None:
    """The rank that a launcher gave this process, or the flags -host -port -rank -world_size; None without either."""
    given = given or {}
    by_name: dict[str, Any] = {**dict.fromkeys(RANK_FLAGS), **given}
    host, port, rank, size = by_name.values()
    missing = " ".join(f"-{name}" for name in RANK_FLAGS if name not in given)
    needed = f"-host, -port, -rank and -world_size are needed together; missing: {missing}"
    if missing and (rank is not None or size is not None):  # host and port alone may complete what a launcher says
        raise UserError(needed)
    if rank is not None and rank >= size:
        raise UserError(f"-rank {rank} is not below -world_size {size}; ranks count from 0.")
    world = world_from_launcher(env)
    if world is not None and "RANK" in env and "WORLD_SIZE" in env:
        if rank is not None and (world.rank, world.size) != (rank, size):
            raise UserError(
                f"-rank {rank} -world_size {size}, but the launcher made this process rank "
                f"{world.rank} of {world.size} (RANK, WORLD_SIZE); leave -host, -port, -rank and -world_size out."
            )
        return _at_master(world, env)
    if rank is not None:
        # A command line does not say how many ranks are on this machine: one per machine is assumed.
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return World(rank, by_name["world_size"], *local, BY_HAND, (host, port))
    if world is None:
        if given:
            raise UserError(f"Without a launcher, {needed}.")
        return None
    job = _job(world, env)
    by_job = PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else DEFAULT_PORT
    port = port or int(env.get("MASTER_PORT", "0")) or by_job
    return replace(world, rendezvous=(host or _host(world, env), port), job=job)


def _at_master(world: World, env: Mapping[str, str]) -> World:
    """The rank with the address in the environment, as torchrun and others that set RANK give it."""
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if world.size == 1:
        return world
    if not host or not port.isdigit():
        raise UserError(
            f"rank {world.rank} of {world.size} (RANK, WORLD_SIZE): MASTER_ADDR must be the host of rank 0 and "
            f"MASTER_PORT a free port of it, but they are {host!r} and {port!r}; torchrun sets both."
        )
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(world, rendezvous=(host, int(port)), served=served)


def world_from_launcher(env: Mapping[str, str] = os.environ) -> World | None:
    """This process's rank from its launcher's environment variables, before any setting is known."""
    for launcher, (rank, size, local_rank, local_size) in _VARIABLES.items():
        if rank not in env or size not in env or (launcher == MPICH and local_rank not in env):
            continue
        if launcher != TORCHRUN and int(env[size]) == 1:
            continue  # one shell or launcher per machine, which may start processes of its own
        if launcher == SLURM:
            local = int(env.get(local_rank, 0)), _tasks_on_this_node(env)
            return World(int(env[rank]), int(env[size]), *local, launcher, cores=_cores_of_task(env))
        # A Kubernetes operator or a shell script may set RANK, too, without local rank and size: one process per
        # machine is assumed.
        name = BY_HAND if launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" not in env else launcher
        local = int(env.get(local_rank, 0)), int(env.get(local_size, 1))
        return World(int(env[rank]), int(env[size]), *local, name)
    return None


def check_rank_is_known(env: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as one of several processes without a rank: each would train a model of its own."""
    for name in _SIZES_OF_OTHERS:
        if env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1 and "SLURM_STEP_NUM_TASKS" not in env:
            raise UserError(
                f"this is one of {env[name]} processes ({name}), but its rank or local rank is in no "
                "environment variable that vitamp reads. Use torchrun or srun, or give each process -host, -port, "
                "-rank and -world_size."
            )


def _cores_of_task(env: Mapping[str, str]) -> int | None:
    """Cores that SLURM reserved for this task; None if it lets all tasks of a node use all of the job's cores."""
    if "SLURM_CPUS_PER_TASK" in env:
        return int(env["SLURM_CPUS_PER_TASK"])
    visible = cores()  # by default, srun binds each task to cores of its own
    return visible if visible < int(env.get("SLURM_CPUS_ON_NODE", "0")) else None


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """This node's number of tasks, from the list of all nodes, such as '4(x2),3' for 4, 4 and 3."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"])
    counts = [int(many) for many, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    machine = int(env.get("SLURM_NODEID", "0"))
    return counts[machine] if machine < len(counts) else counts[0]


def first_host(machines: str) -> str:
    """'gpu03' of 'gpu[03-05,9],cpu1'; SLURM's own tool for this is missing in containers."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", machines)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else machines


def _host(world: World, env: Mapping[str, str]) -> str:
    """The host of rank 0."""
    host = env.get("MASTER_ADDR")
    if host is None and world.local_size == world.size:
        host = "127.0.0.1"
    if host is None and world.launcher in (SLURM, OPENMPI):  # rank 0 of mpirun in a job is on the job's first machine
        machines = env.get("SLURM_STEP_NODELIST" if world.launcher == SLURM else "SLURM_JOB_NODELIST")
        host = first_host(machines) if machines else None
    if host is None:
        raise UserError(
            f"{world.launcher} started {world.size} processes on several machines and does not say where rank 0 runs: "
            "add -host NAME, the machine of rank 0 (and -port N)."
        )
    return host


def _job(world: World, env: Mapping[str, str]) -> str | None:
    """A name for the launcher's job that no other job has; None if there is none."""
    if world.launcher == SLURM:
        return f"SLURM {env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    if world.launcher == OPENMPI:
        name = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
        return f"OpenMPI {name}" if name else None
    return None  # MPICH gives its jobs no name


def sum_over_ranks(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """All-reduce `tensor` in place, by addition."""
    if world.size > 1:
        import torch.distributed

        torch.distributed.all_reduce(tensor)
    return tensor


def broadcast(value: Any, world: World) -> Any:
    """Rank 0's `value`, a small Python object, on every rank."""
    if world.size == 1:
        return value
    import torch.distributed

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_gather(items: list[Any], world: World) -> list[Any]:
    """The items of all ranks in one list, in the order of the ranks."""
    if world.size == 1:
        return items
    import torch.distributed

    by_rank: list[list[Any]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(by_rank, items)
    return [item for items in by_rank for item in items]


def broadcast_buffers(model: torch.nn.Module, world: World) -> None:
    """Take rank 0's buffers: running statistics follow each rank's own samples, and must agree before use or saving."""
    if world.size > 1:
        import torch.distributed

        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def raise_on_every_rank(problem: str | None, world: World) -> None:
    """Raise the problem of the lowest rank that has one on all ranks, so that all end alike and one reports it."""
    for rank, text in enumerate(all_gather([problem], world)):
        if text is not None:
            raise AllRanksUserError(text if rank == 0 else f"on rank {rank}: {text}")


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Do `work` on every rank; a UserError on one of them is raised on all."""
    result, problem = None, None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    raise_on_every_rank(problem, world)
    return result  # pyright: ignore[reportReturnType]  # `raise_on_every_rank` has raised if there is none


def on_rank_0(world: World, work: Callable[[], T]) -> T | None:
    """Do `work` on rank 0, which alone gets its result; its UserError is raised on all ranks."""
    return on_every_rank(world, lambda: work() if world.first else None)
