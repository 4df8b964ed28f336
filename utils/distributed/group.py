"""Forms and leaves the process group: checks that the ranks belong together, and starts the watchdog."""

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
from utils.distributed.world import World
from utils.errors import AllRanksError, AllRanksUserError, UserError
from utils.log import log

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from utils.distributed.watchdog import Watchdog

SECONDS_BETWEEN_REMINDERS = 30
SECONDS_TO_LEAVE = 60
SECONDS_TO_READ_VERDICT = 5
SECONDS_TO_REFUSE = 20
# The watchdog names the rank to blame; torch's own time-out ends the run only where it cannot.
LONGER = datetime.timedelta(minutes=1)
MOST_NAMED = 3
# All ranks raise these alike, or leave together: no rank needs to report where it began.
_RAISED_BY_ALL = (UserError, AllRanksError, SystemExit)

_watchdog: Watchdog | None = None
_rank_name: str | None = None
_join_begun = False


def join(
    world: World, dist: DistConfig, device: torch.device, member: dict[str, Any], settings: dict[str, str]
) -> list[dict[str, Any]]:
    """Form the process group, and return every rank's `member`, by which a process describes itself.

    `settings` must be equal on all ranks.
    """
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
        members = _gather_members(store, world, {**member, "rendezvous": address}, settings, timeout)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=group_timeout(dist),
    )
    names, local = [name_of(other) for other in members], _on_this_machine(members, member)
    _watchdog = Watchdog(store.clone(), world, names, timeout.total_seconds(), local)
    return members


def group_timeout(dist: DistConfig) -> datetime.timedelta:
    """Time after which torch ends a collective: that of every group of the run, whose default is torch's own."""
    return datetime.timedelta(minutes=dist.TIMEOUT) + LONGER


def report_refusal(world: World, problem: str) -> None:
    """Tell the waiting ranks that this one cannot take part, for a problem found before it joined them.

    torchrun and MPI end all processes when one has failed; SLURM and ranks started by hand need this.
    """
    if world.size == 1 or _join_begun or world.rendezvous is None:
        return
    me = f"rank {world.rank} on {socket.gethostname()} (process {os.getpid()})"
    timeout = datetime.timedelta(seconds=SECONDS_TO_REFUSE)
    with contextlib.suppress(Exception), contextlib.ExitStack() as announcer:  # no other rank may be there
        store, _ = open_store(world, timeout, announcer)
        if not world.first:
            store.set("refused", f"{me}: {problem}")
            store.wait(["verdict"], timeout)
            store.add("verdict read", 1)
            return
        store.set("verdict", json.dumps(f"{me}: {problem}"))
        _wait_until_read(store, world.size - 1, SECONDS_TO_REFUSE)


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
        watchdog.leave(SECONDS_TO_LEAVE if error is None else SECONDS_TO_READ_VERDICT)
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
    store: Store, world: World, member: dict[str, Any], settings: dict[str, str], timeout: datetime.timedelta
) -> list[dict[str, Any]]:
    """Every rank describes itself; rank 0 checks that they belong together, and all ranks follow its verdict."""
    from torch.distributed import DistStoreError

    # Settings have a key of their own, which only rank 0 reads: a thousand ranks reading a thousand would take minutes.
    store.set(f"settings/{world.rank}", json.dumps(settings))
    mine = json.dumps(member)
    stored = store.compare_set(f"member/{world.rank}", "", mine).decode()
    if stored != mine:
        both = f"{name_of(json.loads(stored))} and {name_of(member)}"
        problem = f"{both} are both rank {world.rank}; give each process its own rank."
        store.set("refused", problem)
        raise UserError(problem)
    if world.first:
        verdict = _verdict(store, world, settings, timeout)
        store.set("verdict", json.dumps(verdict))
        if verdict is not None:
            joined = sum(store.check([f"member/{rank}"]) for rank in range(1, world.size)) + store.check(["refused"])
            _wait_until_read(store, joined, SECONDS_TO_READ_VERDICT)
            raise AllRanksUserError(verdict)
    else:
        try:
            store.wait(["verdict"], timeout + LONGER)
            verdict = json.loads(store.get("verdict"))
        except (DistStoreError, RuntimeError):
            raise UserError(
                f"rank {world.rank} of {world.size}: rank 0 stopped answering; see the output of rank 0 for the reason."
            ) from None
        problem = verdict or _other_size(json.loads(store.get("member/0")), member)
        if problem is not None:
            store.add("verdict read", 1)
            raise (AllRanksUserError if verdict else UserError)(problem)
    return [json.loads(text) for text in store.multi_get([f"member/{rank}" for rank in range(world.size)])]


def _verdict(store: Store, world: World, settings: dict[str, str], timeout: datetime.timedelta) -> str | None:
    """Why these processes cannot form one run; None if they can. Waits for all of them."""
    end, missing = time.monotonic() + timeout.total_seconds(), list(range(world.size))
    first = json.loads(store.get("member/0"))
    reminded = time.monotonic()
    while missing:
        joined = [rank for rank in missing if store.check([f"member/{rank}"])]
        missing = [rank for rank in missing if rank not in joined]
        for rank in joined:
            other = json.loads(store.get(f"member/{rank}"))
            problem = _other_size(first, other) or _other_versions(first, other)
            if problem is None and rank:
                problem = _other_settings(first, other, settings, json.loads(store.get(f"settings/{rank}")))
            if problem:
                return problem
        if missing and store.check(["refused"]):
            return store.get("refused").decode()
        if missing and time.monotonic() > end:
            return (
                f"{world.size - len(missing)} of {world.size} processes joined within {minutes(timeout)} "
                f"(DIST.TIMEOUT); missing: {_ranks(missing)}. See the output of these ranks for the reason."
            )
        if missing and time.monotonic() - reminded > SECONDS_BETWEEN_REMINDERS:
            log.info("Waiting for %s of %d to join", _ranks(missing), world.size)
            reminded = time.monotonic()
        if missing:
            time.sleep(0.02)
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


def _other_versions(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    for package in ("vitamp", "torch"):
        if first[package] != other[package]:
            theirs, ours = f"{package} {other[package]}", f"{package} {first[package]}"
            return f"{name_of(other)} has {theirs}, {name_of(first)} has {ours}; install the same version."
    return None


def _other_size(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    if first["size"] == other["size"]:
        return None
    return (
        f"{name_of(other)} was started as one of {other['size']} processes, {name_of(first)} as one of "
        f"{first['size']}; all ranks must be given the same number, by -world_size or the launcher."
    )


def _wait_until_read(store: Store, ranks: int, seconds: float) -> None:
    """Keep rank 0, which may serve the store, alive until the others have read its verdict."""
    end = time.monotonic() + seconds
    while store.add("verdict read", 0) < ranks and time.monotonic() < end:
        time.sleep(0.02)


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:10]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{f' and {len(ranks) - 10} more' if len(ranks) > 10 else ''}"
