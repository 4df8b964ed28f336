"""Who am I among the processes of this run? The one place that reads ranks and talks to the process group."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from utils.config.schema import DistConfig
from utils.distributed.processes import ancestor_without
from utils.errors import CommonUserError, UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

BY_HAND, TORCHRUN, OPENMPI, MPICH, SLURM = "by hand", "torchrun", "OpenMPI", "MPICH", "SLURM"
DEFAULT_PORT = 29500
# For each launcher: rank, number of ranks, rank on this machine, number on this machine. The innermost comes first:
# mpirun within a SLURM job counts, and not the job around it. Beside PMI's own two, MPICH's are asked for: srun may set
# PMI_RANK as well, and knows more than it says there.
_NAMES = {
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
# Launchers that tell a number of processes and not enough besides to join them.
_OTHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` in all, `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    meeting: tuple[str, int | None] | None = None
    """Machine and port of rank 0; no port where `job` leads to one; None where the launcher has a meeting point."""
    job: str | None = None
    """What the launcher calls these processes, alike on all ranks and unlike any other job's."""
    cores: int | None = None
    """How many the launcher gave this process for itself, if it said so."""

    @property
    def first(self) -> bool:
        """True for the one process that writes, prints and decides."""
        return self.rank == 0


ALONE = World()


def read_world(dist: DistConfig, env: Mapping[str, str] = os.environ) -> World | None:
    """The place a launcher (or the -rank flags) gave this process; None where nobody gave one."""
    found = launched(env)
    if found is not None and found.launcher == TORCHRUN:
        if dist.RANK is not None and (found.rank, found.size) != (dist.RANK, dist.WORLD_SIZE):
            raise UserError(
                f"-rank {dist.RANK} -world_size {dist.WORLD_SIZE}, but the launcher made this process rank "
                f"{found.rank} of {found.size} (RANK, WORLD_SIZE); leave -host, -port, -rank and -world_size out."
            )
        return found
    if dist.RANK is not None and dist.WORLD_SIZE is not None and dist.HOST and dist.PORT:
        # One command line each: this machine's share is not told, one a machine is assumed.
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return World(dist.RANK, dist.WORLD_SIZE, *local, BY_HAND, (dist.HOST, dist.PORT))
    if found is None:
        if dist.HOST or dist.PORT:
            missing = "-rank -world_size" if dist.HOST and dist.PORT else "-port -rank -world_size"
            raise UserError(f"-host, but no launcher tells this process its rank; missing: {missing}")
        return None
    host, port, job = _host(found, dist, env), dist.PORT or int(env.get("MASTER_PORT", "0")), _job(found, env)
    return replace(found, meeting=(host, port or (None if job else DEFAULT_PORT)), job=job)


def launched(env: Mapping[str, str] = os.environ) -> World | None:
    """This process's place as its launcher tells it, before any setting is known."""
    for launcher, (rank, size, local_rank, local_size) in _NAMES.items():
        if rank not in env or size not in env or (launcher == MPICH and local_rank not in env):
            continue
        if launcher != TORCHRUN and int(env[size]) == 1:
            continue  # one shell or one launcher a machine, which may start processes of its own
        if launcher == SLURM:
            cores = int(env["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in env else None
            here = _tasks_here(env)
            return World(int(env[rank]), int(env[size]), int(env.get(local_rank, 0)), here, launcher, cores=cores)
        # Without the latter two (a Kubernetes operator, a shell script) one process a machine is assumed.
        local = int(env.get(local_rank, 0)), int(env.get(local_size, 1))
        return World(int(env[rank]), int(env[size]), *local, launcher)
    return None


def check_alone(env: Mapping[str, str] = os.environ) -> None:
    """Stop a process that is one of several, but knows no rank: each would train a model of its own."""
    for name in _OTHERS:
        if env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1 and "SLURM_STEP_NUM_TASKS" not in env:
            raise UserError(
                f"this is one of {env[name]} processes ({name}), of a launcher that does not tell a process its place "
                "on its machine. Start them with torchrun or srun, or with -host, -port, -rank and -world_size each."
            )


def _tasks_here(env: Mapping[str, str]) -> int:
    """'4(x2),3' of the step's tasks a machine, as counts; this machine's."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"])
    counts = [int(many) for many, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    machine = int(env.get("SLURM_NODEID", "0"))
    return counts[machine] if machine < len(counts) else counts[0]


def first_host(machines: str) -> str:
    """'gpu03' of 'gpu[03-05,9],cpu1': SLURM's own tool for it is not there in a container."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", machines)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else machines


def _host(world: World, dist: DistConfig, env: Mapping[str, str]) -> str:
    """The machine of rank 0 of these processes."""
    host = dist.HOST or env.get("MASTER_ADDR")
    if host is None and world.local_size == world.size:
        host = "127.0.0.1"
    if host is None and world.launcher in (SLURM, OPENMPI):  # rank 0 of mpirun in a job is on the job's first machine
        machines = env.get("SLURM_STEP_NODELIST" if world.launcher == SLURM else "SLURM_JOB_NODELIST")
        host = first_host(machines) if machines else None
    if host is None:
        raise UserError(
            f"{world.launcher} started {world.size} processes on several machines and does not say which is rank 0's: "
            "add -host NAME (and -port N), the machine that the first process runs on."
        )
    return host


def _job(world: World, env: Mapping[str, str]) -> str | None:
    if world.launcher == SLURM:
        return f"SLURM {env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    if world.launcher == OPENMPI:
        name = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
        return f"OpenMPI {name}" if name else None
    # MPICH gives its jobs no name; on one machine all ranks descend from the same process of it.
    starter = ancestor_without("PMI_RANK") if world.local_size == world.size else None
    return f"MPICH {starter.pid} {starter.birth}" if starter else None


def sum_over_ranks(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Add `tensor` up over all ranks, in place."""
    if world.size > 1:
        import torch.distributed

        torch.distributed.all_reduce(tensor)
    return tensor


def from_first(value: Any, world: World) -> Any:
    """Rank 0's value of a small Python object, on every rank."""
    if world.size == 1:
        return value
    import torch.distributed

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_of(items: list[Any], world: World) -> list[Any]:
    """The items of every rank, rank by rank, on every rank."""
    if world.size == 1:
        return items
    import torch.distributed

    found: list[list[Any]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(found, items)
    return [item for part in found for item in part]


def buffers_from_first(model: torch.nn.Module, world: World) -> None:
    """Running statistics follow each rank's own samples; before they are used or saved, rank 0's are taken."""
    if world.size > 1:
        import torch.distributed

        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def agree(problem: str | None, world: World) -> None:
    """Raise the first rank's problem on every rank, so that all end alike and one of them tells it."""
    if world.size == 1:
        found: list[str | None] = [problem]
    else:
        import torch.distributed

        found = [None] * world.size
        torch.distributed.all_gather_object(found, problem)
    for rank, text in enumerate(found):
        if text is not None:
            raise CommonUserError(text if rank == 0 else f"on rank {rank}: {text}")


def together(world: World, work: Callable[[], T]) -> T:
    """Do `work` on every rank; if it fails on one, all end with that rank's message."""
    result, problem = None, None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    agree(problem, world)
    return result  # pyright: ignore[reportReturnType]  # `agree` has raised where there is none


def first_does(world: World, work: Callable[[], T]) -> T | None:
    """Do `work` on rank 0 alone, which alone gets its result; if it fails there, all end with its message."""
    return together(world, lambda: work() if world.first else None)
