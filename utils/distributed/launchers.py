"""Finds the rank that a launcher (torchrun, OpenMPI, SLURM), or -host -port -rank -world_size, gave this process."""

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
"""The launcher of ranks that a user, a script or a Kubernetes operator starts one by one."""
TORCHRUN = "torchrun"
OPENMPI = "OpenMPI"
SLURM = "SLURM"
# The environment variables of each launcher: rank, world size, local rank and local world size.
VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPENMPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # SLURM_NTASKS must not be used: it is also set for a plain python in a batch script, which is one process.
    SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ""),
}
SIZES_OF_OTHER_LAUNCHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables of launchers that tell the number of processes, but too little else to join them."""
SHOW_ONE_GPU = (SLURM, OPENMPI)
"""Launchers under which a process may see its own GPU alone (srun --gpus-per-task=1)."""
NAME_THE_KILLED = (TORCHRUN, OPENMPI)
"""Launchers that print which of their processes was killed, and end the others a moment later."""
MAKE_TERMINALS = (OPENMPI,)
"""Launchers that give each process a terminal, even if their own output is a file."""
DEFAULT_PORT = 29500
PORTS = range(20000, 32000)
"""Ports for jobs that have a number. Linux takes ephemeral ports from a higher range."""


def read_world(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> World | None:
    """Find the rank that a launcher or the flags -host -port -rank -world_size gave this process; None without either.

    The first of these counts:
    1. RANK and WORLD_SIZE, which torchrun sets, or another program or script; -rank and -world_size must agree;
    2. the four flags;
    3. the variables of OpenMPI or SLURM; -host and -port may complete them.

    given: values of those of the four flags that are on the command line, by name
    env: the environment variables
    """
    missing = " ".join(f"-{flag.name}" for flag in RANK_FLAGS if flag.name not in given)
    needed = f"-host, -port, -rank and -world_size are needed together; missing: {missing}"
    # -host and -port may also be given alone.
    flags_give_rank = "rank" in given or "world_size" in given
    if flags_give_rank:
        if missing:
            raise UserError(needed)
        if given["rank"] >= given["world_size"]:
            raise UserError(
                f"-rank {given['rank']} is not below -world_size {given['world_size']}; ranks count from 0."
            )

    world = world_from_launcher(env)
    if world is not None and world.launcher in (BY_HAND, TORCHRUN):
        if flags_give_rank and (world.rank, world.size) != (given["rank"], given["world_size"]):
            raise UserError(
                f"-rank {given['rank']} -world_size {given['world_size']}, but the launcher made this process rank "
                f"{world.rank} of {world.size} (RANK, WORLD_SIZE); leave -host, -port, -rank and -world_size out."
            )
        return _with_master_address(world, env)

    if flags_give_rank:
        # A command line does not contain the number of ranks on this machine, so one per machine is assumed.
        return World(
            rank=given["rank"],
            size=given["world_size"],
            local_rank=_number(env, "LOCAL_RANK", 0),
            local_size=_number(env, "LOCAL_WORLD_SIZE", 1),
            launcher=BY_HAND,
            rendezvous=(given["host"], given["port"]),
        )
    if world is not None:
        return _with_address_of_job(world, given, env)

    # -host or -port alone give no rank. But for a single process they do no harm: a script may give them for any number
    # of machines.
    if given and env.get("WORLD_SIZE") != "1":
        raise UserError(f"Without a launcher, {needed}.")
    _refuse_unknown_launchers(env)
    return None


def _refuse_unknown_launchers(env: Mapping[str, str]) -> None:
    """Raise a UserError if this is one of several processes without a rank: each would train a model of its own."""
    if "SLURM_STEP_NUM_TASKS" in env:  # srun has been read: this is its only task. It may set PMI_SIZE, too.
        return
    for name in SIZES_OF_OTHER_LAUNCHERS:
        size = env.get(name, "1")
        if size.isdigit() and int(size) > 1:
            raise UserError(
                f"this is one of {size} processes ({name}), but its rank or local rank is in no "
                "environment variable that vitamp reads. Use torchrun or srun, or give each process -host, -port, "
                "-rank and -world_size."
            )


def _with_master_address(world: World, env: Mapping[str, str]) -> World:
    """Add the address of rank 0 to `world` from MASTER_ADDR and MASTER_PORT, which torchrun and others set."""
    host = env.get("MASTER_ADDR")
    port = env.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"rank {world.rank} of {world.size} (RANK, WORLD_SIZE): MASTER_ADDR must be the host of rank 0 and "
            f"MASTER_PORT a free port of it, but they are {host!r} and {port!r}; torchrun sets both."
        )
    torchrun_serves_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(world, rendezvous=(host, int(port)), served=torchrun_serves_store)


def world_from_launcher(env: Mapping[str, str] = os.environ) -> World | None:
    """Read this process's rank from its launcher's environment variables, before any setting is known."""
    for launcher, (rank_name, size_name, local_rank_name, local_size_name) in VARIABLES.items():
        if rank_name not in env or size_name not in env:
            continue
        # A Kubernetes operator or a shell script may set RANK, too, without local rank and size. Then one process per
        # machine is assumed.
        is_by_hand = launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" not in env
        launcher_name = BY_HAND if is_by_hand else launcher
        # A size of 1 is one shell, pod or launcher per machine, which may start processes of its own. Only torchrun
        # starts a single rank on purpose.
        size = _number(env, size_name)
        if size == 1 and launcher_name != TORCHRUN:
            continue
        rank = _number(env, rank_name)
        if rank >= size:
            raise UserError(f"{rank_name} {rank} is not below {size_name} {size}; ranks count from 0.")
        if launcher == SLURM:
            return _world_of_slurm(rank, size, env)
        job_number = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
        return World(
            rank=rank,
            size=size,
            local_rank=_number(env, local_rank_name, 0),
            local_size=_number(env, local_size_name, 1),
            launcher=launcher_name,
            job=f"{launcher_name} {job_number}" if launcher_name == OPENMPI and job_number else None,
        )
    return None


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the whole number in an environment variable; `default` if it is not set."""
    text = env.get(name, f"{default}")
    if not text.isdecimal():
        raise UserError(
            f"{name} is {text!r} in the environment: expected a whole number. Without a launcher, unset it."
        )
    return int(text)


def _world_of_slurm(rank: int, size: int, env: Mapping[str, str]) -> World:
    """Read this process's place among the tasks of a SLURM step."""
    # The variable compresses the number of tasks of each node: '4(x2),3' means 4, 4 and 3.
    tasks_per_node: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE") or f"{size}"):
        tasks_per_node += [int(tasks)] * int(nodes or 1)
    node = _number(env, "SLURM_NODEID")
    # By default, srun binds each task to cores of its own, which are then fewer than the job's cores on this machine.
    # Without binding, all tasks of a machine may use all cores of the job, and none are reserved for this task.
    visible_cores = cores()
    is_bound = visible_cores < _number(env, "SLURM_CPUS_ON_NODE")
    bound_cores = visible_cores if is_bound else None
    return World(
        rank=rank,
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=tasks_per_node[node] if node < len(tasks_per_node) else tasks_per_node[0],
        launcher=SLURM,
        job=f"SLURM {env.get('SLURM_CLUSTER_NAME', '')} {env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', '0')}",
        cores=_number(env, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in env else bound_cores,
    )


def first_host(machines: str) -> str:
    """The first machine of SLURM's list: 'gpu03' of 'gpu[03-05,9],cpu1'. SLURM's own tool is missing in containers."""
    first_entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", machines)  # up to the first comma outside brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first_entry[0]) if first_entry else machines


def _with_address_of_job(world: World, given: Mapping[str, Any], env: Mapping[str, str]) -> World:
    """Add the address of rank 0 to the world of an OpenMPI or SLURM job.

    Host and port come from the flags, else from MASTER_ADDR and MASTER_PORT. Otherwise, the port is computed from the
    job's name, and the host is this machine if all ranks are on it, or else the first in SLURM's list of machines.

    given: values of the flags -host and -port, by name
    """
    # All ranks of a job compute the same port. That of another job on the same machine is probably different.
    job_port = PORTS[zlib.crc32(world.job.encode()) % len(PORTS)] if world.job else DEFAULT_PORT
    port = given.get("port") or _number(env, "MASTER_PORT") or job_port
    host = given.get("host") or env.get("MASTER_ADDR")
    if host is None and world.local_size == world.size:
        host = LOOPBACK
    if host is None and world.launcher in (SLURM, OPENMPI):
        # srun starts rank 0 on the first machine of its step, mpirun on the first of the SLURM job that it runs in.
        list_name = "SLURM_STEP_NODELIST" if world.launcher == SLURM else "SLURM_JOB_NODELIST"
        machines = env.get(list_name)
        host = first_host(machines) if machines else None
    if host is None:
        raise UserError(
            f"{world.launcher} started {world.size} processes on several machines and does not say where rank 0 runs: "
            "add -host NAME, the machine of rank 0 (and -port N), or set MASTER_ADDR to it (and MASTER_PORT)."
        )
    return replace(world, rendezvous=(host, port))
