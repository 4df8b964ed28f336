"""Describes this process's rank among those of a run, and offers collectives for small objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from utils.errors import AllRanksUserError, UserError
from utils.machine.cpus import cores

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


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
    """The launcher's name for these processes: equal on all ranks, different from that of any other job."""
    cores: int | None = None
    """CPU cores that the launcher reserved for this process; None if it reserved none."""
    served: bool = False
    """Whether the launcher serves the store; otherwise rank 0 serves it."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes, prints and decides."""
        return self.rank == 0

    @property
    def machines(self) -> int:
        """Number of machines, rounded up if their numbers of ranks differ."""
        return -(-self.size // self.local_size)

    @property
    def own_cores(self) -> int:
        """CPU cores for this process: those that the launcher reserved, else an equal part of the machine's cores."""
        return self.cores or max(1, cores() // self.local_size)


ALONE = World()


def name_of(member: Mapping[str, Any]) -> str:
    """The name of a rank in messages, from its description: 'rank 1 on node7 (process 4711)'."""
    return f"rank {member['rank']} on {member['host']} (process {member['pid']})"


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
    """Replace the buffers of a model by those of rank 0.

    Running statistics follow each rank's own samples, and must be equal before they are used or saved.
    """
    if world.size > 1:
        import torch.distributed

        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def raise_on_every_rank(problem: str | None, world: World) -> None:
    """Raise the problem of the lowest rank that has one on all ranks, so that all end alike and one reports it."""
    for rank, text in enumerate(all_gather([problem], world)):
        if text is not None:
            raise AllRanksUserError(text if rank == 0 else f"on rank {rank}: {text}")


def check_machines(world: World, needs: str, least: int = 1) -> None:
    """Raise a UserError unless all machines have equally many ranks, which are numbered machine by machine.

    needs: the beginning of the message: the setting that needs this, and "needs", such as 'DIST.HSDP needs'
    least: smallest number of machines, and of ranks on each
    """
    local_sizes = set(all_gather([world.local_size], world))
    equal_sizes = len(local_sizes) == 1 and world.size % world.local_size == 0
    in_order = world.rank % world.local_size == world.local_rank
    setting = needs.partition(" ")[0]  # DIST.HSDP
    problem = (
        f"{needs} equally many processes on each machine, and ranks numbered machine by machine. There are "
        f"{world.size} processes, {world.local_size} of them on this machine. Leave {setting} out."
    )
    is_suitable = equal_sizes and in_order and min(world.machines, world.local_size) >= least
    raise_on_every_rank(None if is_suitable else problem, world)


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Call `work` on every rank and return its result; a UserError on one rank is raised on all ranks."""
    result = None
    problem = None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    raise_on_every_rank(problem, world)
    # Without a result, `raise_on_every_rank` has raised.
    return result  # pyright: ignore[reportReturnType]


def on_rank_0(world: World, work: Callable[[], T]) -> T | None:
    """Call `work` on rank 0, and return its result there, None on other ranks; its UserError is raised on all ranks."""
    return on_every_rank(world, lambda: work() if world.first else None)
