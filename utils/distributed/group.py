"""Forms and leaves the process group, and starts the watchdog. `joining` is how ranks find and check each other."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

from utils.config.schema import DistConfig
from utils.distributed.world import World
from utils.errors import AllRanksError, UserError

if TYPE_CHECKING:
    import torch

    from utils.distributed.watchdog import Watchdog

SECONDS_TO_LEAVE = 60
SECONDS_TO_LEAVE_AFTER_ERROR = 5
# The watchdog names the rank to blame; torch's own time-out ends the run only where it cannot.
LONGER = datetime.timedelta(minutes=1)
# All ranks raise these alike, or leave together: no rank needs to report where it began.
_RAISED_BY_ALL = (UserError, AllRanksError, SystemExit)

_watchdog: Watchdog | None = None
_rank_name: str | None = None
_join_begun = False


def join(world: World, dist: DistConfig, device: torch.device, member: dict[str, Any]) -> list[dict[str, Any]]:
    """Form the process group, and return every rank's `member`, by which a process describes itself."""
    global _watchdog, _rank_name, _join_begun
    if world.size == 1:
        return [member]
    import torch.distributed

    from utils.distributed.joining import meet, name_of, on_this_machine
    from utils.distributed.watchdog import Watchdog

    _rank_name, _join_begun = name_of(member), True
    backend = backend_of(dist, device)
    timeout = datetime.timedelta(minutes=dist.TIMEOUT)
    store, members = meet(world, member, timeout)
    names, local = [name_of(other) for other in members], on_this_machine(members, member)
    _watchdog = Watchdog(store.clone(), world, names, timeout.total_seconds(), local)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=group_timeout(dist),
    )
    return members


def group_timeout(dist: DistConfig) -> datetime.timedelta:
    """Time after which torch ends a collective: that of every group of the run, whose default is torch's own."""
    return datetime.timedelta(minutes=dist.TIMEOUT) + LONGER


def report_refusal(world: World, error: Exception) -> None:
    """Tell the waiting ranks that this one cannot take part, for an error before it joined them.

    torchrun and MPI end all processes when one has failed; SLURM and ranks started by hand need this.
    """
    if world.size == 1 or _join_begun or world.served:
        return
    from utils.distributed.joining import refuse

    refuse(world, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".partition("\n")[0])


def backend_of(dist: DistConfig, device: torch.device) -> str:
    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, but this run uses {device.type}; use -backend gloo.")
    return backend


def leave(world: World) -> None:
    """Leave the process group; where an error ends this rank alone, report it to the others first."""
    global _watchdog
    if world.size == 1:
        return
    error = sys.exception()
    if error is not None and caused_by_lost_rank(error):
        return  # the watchdog stays, to find out which
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None and error is not None and not isinstance(error, _RAISED_BY_ALL):
        watchdog.report_failure(error)
        return
    if watchdog is not None:
        watchdog.leave(SECONDS_TO_LEAVE if error is None else SECONDS_TO_LEAVE_AFTER_ERROR)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def caused_by_lost_rank(error: BaseException) -> bool:
    """Whether this rank, one of several, failed only because another rank was lost."""
    text = f"{type(error).__name__} {error}"
    marks = ("Connection closed by peer", "Connection reset", "DistBackendError", "DistNetworkError", "gloo")
    return _watchdog is not None and any(mark in text for mark in marks)


def rank_name() -> str | None:
    """'rank 1 on node7 (process 4711)' in a run of several processes, else None."""
    return _rank_name


def expect_lost_rank() -> None:
    """The connection to another rank is lost: let the watchdog find out soon which one."""
    if _watchdog is not None:
        _watchdog.expect_lost_rank()
