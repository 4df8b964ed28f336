"""Forming the process group: the ranks meet, show that they belong together, and are watched until they part."""

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
from utils.distributed.meeting import meet, minutes
from utils.distributed.processes import Process, birth_of
from utils.distributed.world import World
from utils.errors import CommonError, CommonUserError, UserError
from utils.log import log

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from utils.distributed.watchdog import Watch

SECONDS_BETWEEN_REMINDERS = 30
SECONDS_TO_PART = 60
SECONDS_TO_HEAR = 5
SECONDS_TO_REFUSE = 20
# The watch names who is to blame; only where it cannot, torch's own limit ends the run.
LONGER = datetime.timedelta(minutes=1)
MOST_NAMED = 3
# The same on all ranks because they raise it together, or leave together: nobody needs to be told who began.
_TOGETHER = (UserError, CommonError, SystemExit)

_watch: Watch | None = None
_name: str | None = None
_begun = False


def join(
    world: World, dist: DistConfig, device: torch.device, member: dict[str, Any], settings: dict[str, str]
) -> list[dict[str, Any]]:
    """Form the process group. `member` is what this process tells of itself; gives what all of them told.

    The settings must be the same on all ranks.
    """
    global _watch, _name, _begun
    if world.size == 1:
        return [member]
    _name, _begun = name_of(member), True
    import torch.distributed

    from utils.distributed.watchdog import Watch

    backend = backend_of(dist, device)
    timeout = datetime.timedelta(minutes=dist.TIMEOUT)
    with contextlib.ExitStack() as signpost:
        store, place = meet(world, timeout, signpost)
        members = _roll_call(store, world, {**member, "meeting": place}, settings, timeout)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout + LONGER,
    )
    names, near = [name_of(other) for other in members], _on_this_machine(members, member)
    _watch = Watch(store.clone(), world, names, timeout.total_seconds(), near)
    return members


def refuse(world: World, problem: str) -> None:
    """This rank cannot take part, as it found before it met the others: tell those that wait for it.

    torchrun and MPI end all processes when one has failed; SLURM and hands do not.
    """
    if world.size == 1 or _begun or world.meeting is None:
        return
    me = f"rank {world.rank} on {socket.gethostname()} (process {os.getpid()})"
    timeout = datetime.timedelta(seconds=SECONDS_TO_REFUSE)
    with contextlib.suppress(Exception), contextlib.ExitStack() as signpost:  # nobody there to tell
        store, _ = meet(world, timeout, signpost)
        if not world.first:
            store.set("refused", f"{me}: {problem}")
            store.wait(["verdict"], timeout)
            store.add("heard", 1)
            return
        store.set("verdict", json.dumps(f"{me}: {problem}"))
        _wait_until_heard(store, world.size - 1, SECONDS_TO_REFUSE)


def backend_of(dist: DistConfig, device: torch.device) -> str:
    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, and this run is on {device.type}; use -backend gloo.")
    return backend


def name_of(member: dict[str, Any]) -> str:
    return f"rank {member['rank']} on {member['host']} (process {member['pid']})"


def _on_this_machine(members: list[dict[str, Any]], member: dict[str, Any]) -> dict[int, Process]:
    """Ranks whose processes this one can see by their numbers; in containers of one name it may not."""
    near = [other for other in members if other["host"] == member["host"] and other["birth"] is not None]
    seen = {other["rank"]: Process(other["pid"], other["birth"]) for other in near}
    return {rank: process for rank, process in seen.items() if birth_of(process.pid) == process.birth}


def leave(world: World) -> None:
    """Part from the others; where an error ends this rank alone, tell them why first."""
    global _watch
    if world.size == 1:
        return
    error = sys.exception()
    if error is not None and lost_another(error):
        return  # the watch stays, to find out which
    watch, _watch = _watch, None
    if watch is not None and error is not None and not isinstance(error, _TOGETHER):
        watch.tell_failure(error)
        return
    if watch is not None:
        watch.part(SECONDS_TO_PART if error is None else SECONDS_TO_HEAR)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether this rank, one of several, only failed because another had gone."""
    text = f"{type(error).__name__} {error}"
    marks = ("Connection closed by peer", "Connection reset", "DistBackendError", "DistNetworkError", "gloo")
    return _watch is not None and any(mark in text for mark in marks)


def this_rank() -> str | None:
    """'rank 1 on node7 (process 4711)' in a run of several, else None."""
    return _name


def find_out_who_is_gone() -> None:
    """The connection to another rank is lost: the watch may be quick about who it was."""
    if _watch is not None:
        _watch.hurry()


def _roll_call(
    store: Store, world: World, member: dict[str, Any], settings: dict[str, str], timeout: datetime.timedelta
) -> list[dict[str, Any]]:
    """Every rank tells of itself; rank 0 looks whether they belong together, and its verdict counts for all."""
    from torch.distributed import DistStoreError

    # The settings apart, for rank 0 alone to read: a thousand ranks that read those of a thousand would take minutes.
    store.set(f"settings/{world.rank}", json.dumps(settings))
    mine = json.dumps(member)
    there = store.compare_set(f"member/{world.rank}", "", mine).decode()
    if there != mine:
        problem = f"{name_of(json.loads(there))} and {name_of(member)} are both rank {world.rank}; give each its own."
        store.set("refused", problem)
        raise UserError(problem)
    if world.first:
        verdict = _verdict(store, world, settings, timeout)
        store.set("verdict", json.dumps(verdict))
        if verdict is not None:
            there = sum(store.check([f"member/{rank}"]) for rank in range(1, world.size)) + store.check(["refused"])
            _wait_until_heard(store, there, SECONDS_TO_HEAR)
            raise CommonUserError(verdict)
    else:
        try:
            store.wait(["verdict"], timeout + LONGER)
            verdict = json.loads(store.get("verdict"))
        except (DistStoreError, RuntimeError):
            raise UserError(f"rank {world.rank} of {world.size}: rank 0 was there, and then was gone.") from None
        problem = verdict or _other_size(json.loads(store.get("member/0")), member)
        if problem is not None:
            store.add("heard", 1)
            raise (CommonUserError if verdict else UserError)(problem)
    return [json.loads(text) for text in store.multi_get([f"member/{rank}" for rank in range(world.size)])]


def _verdict(store: Store, world: World, settings: dict[str, str], timeout: datetime.timedelta) -> str | None:
    """What keeps these processes from being one run, or None. Waits for all of them."""
    end, missing = time.monotonic() + timeout.total_seconds(), list(range(world.size))
    first = json.loads(store.get("member/0"))
    reminded = time.monotonic()
    while missing:
        come = [rank for rank in missing if store.check([f"member/{rank}"])]
        missing = [rank for rank in missing if rank not in come]
        for rank in come:
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
                f"of {world.size} processes {world.size - len(missing)} came within {minutes(timeout)} "
                f"(DIST.TIMEOUT), not {_ranks(missing)}. What they say themselves tells why."
            )
        if missing and time.monotonic() - reminded > SECONDS_BETWEEN_REMINDERS:
            log.info("Waiting for %s of %d to come", _ranks(missing), world.size)
            reminded = time.monotonic()
        if missing:
            time.sleep(0.02)
    return None


def _other_settings(
    first: dict[str, Any], other: dict[str, Any], ours: dict[str, str], theirs: dict[str, str]
) -> str | None:
    unlike = [key for key in ours if ours[key] != theirs.get(key)]
    if not unlike:
        return None
    told = "; ".join(f"{key} is {theirs.get(key)} there and {ours[key]} on rank 0" for key in unlike[:MOST_NAMED])
    more = f"; and {len(unlike) - MOST_NAMED} more" if len(unlike) > MOST_NAMED else ""
    return (
        f"{name_of(other)} was started with other settings than {name_of(first)}: {told}{more}. "
        "Start all ranks with the same."
    )


def _other_versions(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    for what in ("vitamp", "torch"):
        if first[what] != other[what]:
            return f"{name_of(other)} has {what} {other[what]}, {name_of(first)} has {first[what]}; install the same."
    return None


def _other_size(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    if first["size"] == other["size"]:
        return None
    return (
        f"{name_of(other)} was started as one of {other['size']} processes, {name_of(first)} as one of "
        f"{first['size']}; -world_size, and the launcher's numbers, must be the same for all."
    )


def _wait_until_heard(store: Store, ranks: int, seconds: float) -> None:
    """Rank 0 may be the one that keeps the store: it stays until those that came know why it goes."""
    end = time.monotonic() + seconds
    while store.add("heard", 0) < ranks and time.monotonic() < end:
        time.sleep(0.02)


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:10]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{f' and {len(ranks) - 10} more' if len(ranks) > 10 else ''}"
