"""How the ranks of a run find each other, describe themselves, and check that they belong together."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from utils.distributed.processes import Process, start_time_of
from utils.distributed.rendezvous import minutes, open_store
from utils.distributed.world import World, all_gather, broadcast
from utils.errors import AllRanksUserError, UserError
from utils.log import log

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS_BETWEEN_REMINDERS = 30
SECONDS_TO_READ_REFUSAL = 5
SECONDS_TO_REFUSE = 20
"""How long a rank that fails before it joins tries to reach the others."""
POLL = 0.02
POLL_PER_RANK = 0.001
"""With many ranks, each asks rank 0 less often."""
MOST_NAMED = 3


def meet(world: World, member: dict[str, Any], timeout: datetime.timedelta) -> tuple[Store, list[dict[str, Any]]]:
    """The store at which the ranks meet, and every rank's `member`."""
    with contextlib.ExitStack() as announcer:
        store, address = open_store(world, timeout, announcer)
        return store, _gather_members(store, world, {**member, "rendezvous": address}, timeout)


def refuse(world: World, problem: str) -> None:
    """Give the waiting ranks the reason why this one cannot take part."""
    me = f"rank {world.rank} on {socket.gethostname()} (process {os.getpid()})"
    with contextlib.suppress(Exception), contextlib.ExitStack() as announcer:  # no other rank may be there
        store, _ = open_store(world, datetime.timedelta(seconds=SECONDS_TO_REFUSE), announcer)
        _refuse(store, world, f"{me}: {problem}", SECONDS_TO_REFUSE)


def check_agreement(world: World, members: list[dict[str, Any]], settings: dict[str, str]) -> None:
    """Raise AllRanksUserError if a rank has another version or other settings than rank 0."""
    for other in members:
        if problem := _other_versions(members[0], other):
            raise AllRanksUserError(problem)
    problem = _other_settings(members[0], members[world.rank], broadcast(settings, world), settings)
    for text in all_gather([problem], world):
        if text is not None:
            raise AllRanksUserError(text)


def name_of(member: dict[str, Any]) -> str:
    return f"rank {member['rank']} on {member['host']} (process {member['pid']})"


def on_this_machine(members: list[dict[str, Any]], member: dict[str, Any]) -> dict[int, Process]:
    """Ranks whose processes this one can see; containers may share a host name, but not their processes."""
    same_host = [other for other in members if other["host"] == member["host"] and other["started"] is not None]
    processes = {other["rank"]: Process(other["pid"], other["started"]) for other in same_host}
    return {rank: process for rank, process in processes.items() if start_time_of(process.pid) == process.started}


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
