"""The launchers: how each gives a process its rank, as the flags -host -port -rank -world_size do, and what it does."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from utils.distributed.world import LOOPBACK, World
from utils.errors import UserError
from utils.flags import RANK_FLAGS
from utils.machine.cpus import cores

BY_HAND = "by hand"
TORCHRUN = "torchrun"
OPENMPI = "OpenMPI"
SLURM = "SLURM"
VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPENMPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Never SLURM_NTASKS: a plain python in a batch script finds it set, and is one process all the same.
    SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ""),
}
SIZES_OF_OTHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Set by launchers that give a number of processes, but too little else to join them."""
SHOW_ONE_GPU = (SLURM, OPENMPI)
"""Those under which a process may see its own GPU alone (srun --gpus-per-task=1)"""
NAME_THE_KILLED = (TORCHRUN, OPENMPI)
"""Those that print which of their processes was killed, and end the others a moment later"""
MAKE_TERMINALS = (OPENMPI,)
"""Those that give each process a terminal, even where their own output is a file"""
DEFAULT_PORT = 29500
PORTS = range(20000, 32000)
"""Of jobs that have a number: below the range from which Linux takes ephemeral ports."""


def read_world(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> World | None:
    """The rank that a launcher gave this process, or the flags -host -port -rank -world_size; None without either."""
    missing = " ".join(f"-{flag.name}" for flag in RANK_FLAGS if flag.name not in given)
    needed = f"-host, -port, -rank and -world_size are needed together; missing: {missing}"
    has_rank = "rank" in given or "world_size" in given  # host and port alone may complete what a launcher says
    if has_rank:
        if missing:
            raise UserError(needed)
        if given["rank"] >= given["world_size"]:
            raise UserError(
                f"-rank {given['rank']} is not below -world_size {given['world_size']}; ranks count from 0."
            )
    world = world_from_launcher(env)
    if world is not None and world.launcher in (BY_HAND, TORCHRUN):
        if has_rank and (world.rank, world.size) != (given["rank"], given["world_size"]):
            raise UserError(
                f"-rank {given['rank']} -world_size {given['world_size']}, but the launcher made this process rank "
                f"{world.rank} of {world.size} (RANK, WORLD_SIZE); leave -host, -port, -rank and -world_size out."
            )
        return _at_address(world, env)
    if has_rank:
        # A command line does not say how many ranks are on this machine: one per machine is assumed.
        return World(
            rank=given["rank"],
            size=given["world_size"],
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            launcher=BY_HAND,
            rendezvous=(given["host"], given["port"]),
        )
    if world is not None:
        return _at_job(world, given, env)
    if given and env.get("WORLD_SIZE") != "1":  # a script may give host and port to any number of machines
        raise UserError(f"Without a launcher, {needed}.")
    _refuse_unknown_launchers(env)
    return None


def _refuse_unknown_launchers(env: Mapping[str, str]) -> None:
    """Refuse to be one of several processes without a rank: each would train a model of its own."""
    if "SLURM_STEP_NUM_TASKS" in env:
        return
    for name in SIZES_OF_OTHERS:
        size = env.get(name, "1")
        if size.isdigit() and int(size) > 1:
            raise UserError(
                f"this is one of {size} processes ({name}), but its rank or local rank is in no "
                "environment variable that vitamp reads. Use torchrun or srun, or give each process -host, -port, "
                "-rank and -world_size."
            )


def _at_address(world: World, env: Mapping[str, str]) -> World:
    """With the address in the environment, as torchrun and others that set RANK give it."""
    host = env.get("MASTER_ADDR")
    port = env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise UserError(
            f"rank {world.rank} of {world.size} (RANK, WORLD_SIZE): MASTER_ADDR must be the host of rank 0 and "
            f"MASTER_PORT a free port of it, but they are {host!r} and {port!r}; torchrun sets both."
        )
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(world, rendezvous=(host, int(port)), served=served)


def world_from_launcher(env: Mapping[str, str] = os.environ) -> World | None:
    """This process's rank from its launcher's environment variables, before any setting is known."""
    for launcher, (rank, size, local_rank, local_size) in VARIABLES.items():
        if rank not in env or size not in env:
            continue
        # A Kubernetes operator or a shell script may set RANK, too, without local rank and size: one process per
        # machine is assumed.
        name = BY_HAND if launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" not in env else launcher
        if name != TORCHRUN and int(env[size]) == 1:
            continue  # one shell, pod or launcher per machine, which may start processes of its own
        if launcher == SLURM:
            return _of_slurm(env)
        number = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
        return World(
            rank=int(env[rank]),
            size=int(env[size]),
            local_rank=int(env.get(local_rank, 0)),
            local_size=int(env.get(local_size, 1)),
            launcher=name,
            job=f"{name} {number}" if name == OPENMPI and number else None,
        )
    return None


def _of_slurm(env: Mapping[str, str]) -> World:
    size = env["SLURM_STEP_NUM_TASKS"]
    # The tasks of each node, such as '4(x2),3' for 4, 4 and 3
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", size)):
        counts += [int(tasks)] * int(nodes or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    # By default, srun binds each task to cores of its own; else all tasks of a node may use all of the job's cores.
    visible = cores()
    reserved = visible if visible < int(env.get("SLURM_CPUS_ON_NODE", "0")) else None
    return World(
        rank=int(env["SLURM_PROCID"]),
        size=int(size),
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        local_size=counts[node] if node < len(counts) else counts[0],
        launcher=SLURM,
        job=f"SLURM {env.get('SLURM_CLUSTER_NAME', '')} {env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', '0')}",
        cores=int(env["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in env else reserved,
    )


def first_host(machines: str) -> str:
    """'gpu03' of 'gpu[03-05,9],cpu1'; SLURM's own tool for this is missing in containers."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", machines)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else machines


def _at_job(world: World, given: Mapping[str, Any], env: Mapping[str, str]) -> World:
    """With the address that the flags, the environment or the launcher's job give."""
    by_job = PORTS[zlib.crc32(world.job.encode()) % len(PORTS)] if world.job else DEFAULT_PORT
    port = given.get("port") or int(env.get("MASTER_PORT", "0")) or by_job
    host = given.get("host") or env.get("MASTER_ADDR")
    if host is None and world.local_size == world.size:
        host = LOOPBACK
    if host is None and world.launcher in (SLURM, OPENMPI):  # rank 0 of mpirun in a job is on the job's first machine
        machines = env.get("SLURM_STEP_NODELIST" if world.launcher == SLURM else "SLURM_JOB_NODELIST")
        host = first_host(machines) if machines else None
    if host is None:
        raise UserError(
            f"{world.launcher} started {world.size} processes on several machines and does not say where rank 0 runs: "
            "add -host NAME, the machine of rank 0 (and -port N), or set MASTER_ADDR to it (and MASTER_PORT)."
        )
    return replace(world, rendezvous=(host, port))
