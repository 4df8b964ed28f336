"""This process's rank among those of a run, and collectives over small objects."""

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
    def machines(self) -> int:
        return -(-self.size // self.local_size)

    @property
    def own_cores(self) -> int:
        """CPU cores for this process: those that the launcher reserved, else its share of the machine's."""
        return self.cores or max(1, cores() // self.local_size)


ALONE = World()


def name_of(member: Mapping[str, Any]) -> str:
    """A rank, by what it said of itself when it joined."""
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


def check_machines(world: World, needs: str, least: int = 1) -> None:
    """Refuse machines with unequal numbers of ranks, or ranks that are not numbered machine by machine.

    `needs`: what needs that, in words; `least`: so many machines, and ranks on each.
    """
    equal = len({*all_gather([world.local_size], world)}) == 1 and world.size % world.local_size == 0
    in_order = world.rank % world.local_size == world.local_rank
    problem = (
        f"{needs} equally many processes on each machine, and ranks numbered machine by machine. There are "
        f"{world.size} processes, {world.local_size} of them on this machine. Leave {needs.partition(' ')[0]} out."
    )
    possible = equal and in_order and min(world.machines, world.local_size) >= least
    raise_on_every_rank(None if possible else problem, world)


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Do `work` on every rank; a UserError on one of them is raised on all."""
    result = None
    problem = None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    raise_on_every_rank(problem, world)
    return result  # pyright: ignore[reportReturnType]  # `raise_on_every_rank` has raised if there is none


def on_rank_0(world: World, work: Callable[[], T]) -> T | None:
    """Do `work` on rank 0, which alone gets its result; its UserError is raised on all ranks."""
    return on_every_rank(world, lambda: work() if world.first else None)
