"""Who am I among the processes of this run? The one place that reads ranks and talks to the process group."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.config.schema import DistConfig
from utils.errors import UserError

if TYPE_CHECKING:
    import torch

# A rank that waits longer than this for the others has lost them.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` in all, `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"

    @property
    def first(self) -> bool:
        """True for the one process that writes, prints and decides."""
        return self.rank == 0


ALONE = World()


def read_world(dist: DistConfig, env: Mapping[str, str] = os.environ) -> World | None:
    """The place a launcher (or the -rank flags) gave this process; None where nobody gave one."""
    if dist.RANK is not None and dist.WORLD_SIZE is not None:
        # Ranks started by hand, one command line each: this machine's share is not told, a GPU each is assumed.
        local = int(env.get("LOCAL_RANK", "0"))
        return World(dist.RANK, dist.WORLD_SIZE, local, int(env.get("LOCAL_WORLD_SIZE", "1")), "by hand")
    if "RANK" in env and "WORLD_SIZE" in env:
        return World(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            int(env.get("LOCAL_RANK", env["RANK"])),
            int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            "torchrun",
        )
    return None


def cores() -> int:
    """Those of this machine that this process may use: a batch system, or `taskset`, may leave it only some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_by_environment(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process should speak before the group exists: one voice, not one a rank."""
    return env.get("RANK", "0") == "0"


def join(world: World, dist: DistConfig, device: torch.device) -> None:
    """Form the process group, by the launcher's meeting point or by -host and -port."""
    if world.size == 1:
        return
    import torch.distributed

    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, and this run is on {device.type}; use -backend gloo.")
    meeting = f"tcp://{dist.HOST}:{dist.PORT}" if dist.HOST else "env://"
    torch.distributed.init_process_group(
        backend, init_method=meeting, rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )


def leave(world: World) -> None:
    if world.size > 1:
        import torch.distributed

        torch.distributed.destroy_process_group()


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
            raise UserError(text if rank == 0 else f"on rank {rank}: {text}")
