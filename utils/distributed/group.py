"""Forms and leaves the process group, checks that the ranks belong together, and starts the watchdog."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from utils.config.schema import DistConfig
from utils.distributed.processes import Process, start_time_of
from utils.distributed.rendezvous import minutes, open_store
from utils.distributed.world import World, all_gather, broadcast
from utils.errors import AllRanksError, AllRanksUserError, UserError
from utils.log import log

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from utils.distributed.watchdog import Watchdog

SECONDS_BETWEEN_REMINDERS = 30
SECONDS_TO_LEAVE = 60
SECONDS_TO_LEAVE_AFTER_ERROR = 5
SECONDS_TO_READ_REFUSAL = 5
SECONDS_TO_REFUSE = 20
"""How long a rank that fails before it joins tries to reach the others."""
POLL = 0.02
POLL_PER_RANK = 0.001
"""With many ranks, each asks rank 0 less often."""
# The watchdog names the rank to blame; torch's own time-out ends the run only where it cannot.
LONGER = datetime.timedelta(minutes=1)
MOST_NAMED = 3
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
    _rank_name, _join_begun = name_of(member), True
    import torch.distributed

    from utils.distributed.watchdog import Watchdog

    backend = backend_of(dist, device)
    timeout = datetime.timedelta(minutes=dist.TIMEOUT)
    with contextlib.ExitStack() as announcer:
        store, address = open_store(world, timeout, announcer)
        members = _gather_members(store, world, {**member, "rendezvous": address}, timeout)
    names, local = [name_of(other) for other in members], _on_this_machine(members, member)
    _watchdog = Watchdog(store.clone(), world, names, timeout.total_seconds(), local)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=group_timeout(dist),
    )
    return members


def check_agreement(world: World, members: list[dict[str, Any]], settings: dict[str, str]) -> None:
    """Raise AllRanksUserError if a rank has another version or other settings than rank 0."""
    for other in members:
        if problem := _other_versions(members[0], other):
            raise AllRanksUserError(problem)
    problem = _other_settings(members[0], members[world.rank], broadcast(settings, world), settings)
    for text in all_gather([problem], world):
        if text is not None:
            raise AllRanksUserError(text)


def group_timeout(dist: DistConfig) -> datetime.timedelta:
    """Time after which torch ends a collective: that of every group of the run, whose default is torch's own."""
    return datetime.timedelta(minutes=dist.TIMEOUT) + LONGER


def report_refusal(world: World, error: Exception) -> None:
    """Tell the waiting ranks that this one cannot take part, for an error before it joined them.

    torchrun and MPI end all processes when one has failed; SLURM and ranks started by hand need this.
    """
    if world.size == 1 or _join_begun or world.served:
        return
    problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".partition("\n")[0]
    me = f"rank {world.rank} on {socket.gethostname()} (process {os.getpid()})"
    with contextlib.suppress(Exception), contextlib.ExitStack() as announcer:  # no other rank may be there
        store, _ = open_store(world, datetime.timedelta(seconds=SECONDS_TO_REFUSE), announcer)
        _refuse(store, world, f"{me}: {problem}", SECONDS_TO_REFUSE)


def backend_of(dist: DistConfig, device: torch.device) -> str:
    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, but this run uses {device.type}; use -backend gloo.")
    return backend


def name_of(member: dict[str, Any]) -> str:
    return f"rank {member['rank']} on {member['host']} (process {member['pid']})"


def _on_this_machine(members: list[dict[str, Any]], member: dict[str, Any]) -> dict[int, Process]:
    """Ranks whose processes this one can see; containers may share a host name, but not their processes."""
    same_host = [other for other in members if other["host"] == member["host"] and other["started"] is not None]
    processes = {other["rank"]: Process(other["pid"], other["started"]) for other in same_host}
    return {rank: process for rank, process in processes.items() if start_time_of(process.pid) == process.started}


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


def _gather_members(
    store: Store, world: World, member: dict[str, Any], timeout: datetime.timedelta
) -> list[dict[str, Any]]:
    """Wait until every rank has described itself. A rank that cannot take part ends all others with its reason."""
    from torch.distributed import DistStoreError

    try:
        problem = _add_member(store, world, member) or _wait_for_all(store, world, timeout)
        if problem is None:
            return [json.loads(text) for text in store.multi_get([f"member/{rank}" for rank in range(world.size)])]
        raise AllRanksUserError(_refuse(store, world, problem, SECONDS_TO_READ_REFUSAL))
    except (DistStoreError, RuntimeError):
        raise UserError(
            f"rank {world.rank} of {world.size}: rank 0 stopped answering; see the output of rank 0 for the reason."
        ) from None


def _add_member(store: Store, world: World, member: dict[str, Any]) -> str | None:
    """Describe this rank to the others. Returns what is wrong with its rank or world size."""
    mine = json.dumps(member)
    stored = store.compare_set(f"member/{world.rank}", "", mine).decode()
    if stored != mine:
        both = f"{name_of(json.loads(stored))} and {name_of(member)}"
        return f"{both} are both rank {world.rank}; give each process its own rank."
    first = json.loads(store.compare_set("first to join", "", mine))
    if first["size"] != member["size"]:
        low, high = sorted((first, member), key=lambda process: process["rank"])
        return (
            f"{name_of(high)} was started as one of {high['size']} processes, {name_of(low)} as one of "
            f"{low['size']}; all ranks must be given the same number, by -world_size or the launcher."
        )
    store.add("joined", 1)
    return None


def _wait_for_all(store: Store, world: World, timeout: datetime.timedelta) -> str | None:
    """Wait for the other ranks. Returns why they cannot form a group: a rank's reason, or which ranks are missing."""
    begun = reminded = time.monotonic()
    while store.add("joined", 0) < world.size:
        if store.check(["refused"]):
            return store.get("refused").decode()
        now = time.monotonic()
        if now - begun > timeout.total_seconds():
            missing = _missing(store, world)
            return (
                f"{world.size - len(missing)} of {world.size} processes joined within {minutes(timeout)} "
                f"(DIST.TIMEOUT); missing: {_ranks(missing)}. See the output of these ranks for the reason."
            )
        if world.first and now - reminded > SECONDS_BETWEEN_REMINDERS:
            log.info("Waiting for %s of %d to join", _ranks(_missing(store, world)), world.size)
            reminded = now
        time.sleep(max(POLL, POLL_PER_RANK * world.size))
    return None


def _missing(store: Store, world: World) -> list[int]:
    return [rank for rank in range(world.size) if not store.check([f"member/{rank}"])]


def _refuse(store: Store, world: World, problem: str, seconds: float) -> str:
    """End the ranks that wait, or will wait, for this one. Returns the reason: that of the first rank to refuse.

    Rank 0, which may serve the store, waits until the others have read it, at most `seconds`.
    """
    reason = store.compare_set("refused", "", problem).decode()
    store.add("read", 1)
    end = time.monotonic() + seconds
    while world.first and store.add("read", 0) < world.size and time.monotonic() < end:
        time.sleep(POLL)
    return reason


def _other_versions(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    for package in ("vitamp", "torch"):
        if first[package] != other[package]:
            theirs, ours = f"{package} {other[package]}", f"{package} {first[package]}"
            return f"{name_of(other)} has {theirs}, {name_of(first)} has {ours}; install the same version."
    return None


def _other_settings(
    first: dict[str, Any], other: dict[str, Any], ours: dict[str, str], theirs: dict[str, str]
) -> str | None:
    different = [key for key in ours if ours[key] != theirs.get(key)]
    if not different:
        return None
    listed = "; ".join(f"{key} is {theirs.get(key)} there and {ours[key]} on rank 0" for key in different[:MOST_NAMED])
    more = f"; and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
    return (
        f"{name_of(other)} was started with other settings than {name_of(first)}: {listed}{more}. "
        "Start all ranks with the same settings."
    )


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:10]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{f' and {len(ranks) - 10} more' if len(ranks) > 10 else ''}"
