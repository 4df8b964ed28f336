"""The ranks of a run find and check each other, form the process group, and leave it.

They meet in a store, which rank 0 or the launcher serves. There each describes itself, before a device communicates: a
rank with other settings, or one that cannot take part, ends all ranks with one reason.
"""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from utils.config.schema import DistConfig
from utils.distributed.world import LOOPBACK, World, name_of
from utils.errors import AllRanksError, AllRanksUserError, UserError
from utils.text import counted, some_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from utils.distributed.watchdog import Watchdog

SECONDS_TO_REFUSE = 20
"""How long a rank that fails before it joins tries to reach the others."""
SECONDS_TO_READ_REFUSAL = 5
SECONDS_TO_LEAVE = 60
SECONDS_TO_LEAVE_AFTER_ERROR = 5
POLL = 0.02
POLL_PER_RANK = 0.001
"""With many ranks, each asks rank 0 less often."""
# All ranks raise these alike: no rank needs to report where it began.
_RAISED_BY_ALL = (UserError, AllRanksError)

watchdog: Watchdog | None = None
rank_name: str | None = None
"""'rank 1 on node7 (process 4711)' in a run of several processes"""


def join(
    world: World, dist: DistConfig, device: torch.device, member: dict[str, Any], settings: dict[str, str]
) -> list[dict[str, Any]]:
    """Form the process group, and return every rank's `member`, by which a process describes itself.

    `settings` must be those of rank 0.
    """
    global watchdog, rank_name
    import torch.distributed

    from utils.distributed.watchdog import Watchdog

    backend = backend_of(dist, device)
    timeout = datetime.timedelta(minutes=dist.TIMEOUT)
    rank_name = name_of(member)
    store, member["rendezvous"] = _open_store(world, timeout)
    members = _gather(store, world, member, settings, timeout)
    watchdog = Watchdog(store.clone(), world, members, timeout.total_seconds())
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=dist.group_timeout,
    )
    return members


def refuse(world: World, error: Exception) -> bool:
    """This rank has failed before it joined: end all ranks with its reason. False if rank 0, which prints it, is lost.

    A UserError is then raised on all ranks.
    """
    problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".partition("\n")[0]
    me = name_of({"rank": world.rank, "host": socket.gethostname(), "pid": os.getpid()})
    try:
        store, _ = _open_store(world, datetime.timedelta(seconds=SECONDS_TO_REFUSE))
        _end_all(store, world, f"{me}: {problem}", SECONDS_TO_REFUSE)
        reached = store.check(["read by rank 0"])
    except (UserError, RuntimeError):
        return False
    if reached and isinstance(error, UserError):
        raise AllRanksUserError(str(error)) from None
    return reached


def _open_store(world: World, timeout: datetime.timedelta) -> tuple[Store, str]:
    """The store, and its address."""
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

    assert world.rendezvous is not None
    host, port = world.rendezvous
    try:
        socket.getaddrinfo(host, None)  # torch would try again until the timeout
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"rank {world.rank} of {world.size}: the host {host!r} cannot be resolved to an address ({why}). It must "
            "be the machine of rank 0; check -host (MASTER_ADDR)."
        ) from None
    serves = world.first and not world.served
    fd = None
    # A rank that waits for others inside torch would run no handler of ours.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if serves and host in (LOOPBACK, "localhost"):  # torch itself would listen on every network
            fd = socket.create_server((LOOPBACK, port)).detach()
        store = TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)
    except (DistNetworkError, DistStoreError, OSError) as error:
        if serves:
            why = str(error).partition("\n")[0].partition(" - ")[0].rstrip(". ")
            raise UserError(
                f"rank 0 cannot listen on port {port}: {why}. Another run may be using the port. Try another -port."
            ) from None
        raise UserError(
            f"rank {world.rank} of {world.size}: rank 0 does not answer at {host}:{port} "
            f"({_minutes(timeout)}, DIST.TIMEOUT). Check that rank 0 is running there "
            "and that no firewall blocks the connection."
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # Another job may have a port that follows from the same number. And torchrun keeps its store through restarts, with
    # the keys of an earlier start. Rank 0's store is always new, and torchrun may count differently on each machine.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if world.served else "0"
    job = world.job or "run"
    return PrefixStore(f"{job}-{start}", store), f"{host}:{port}"


def _gather(
    store: Store, world: World, member: dict[str, Any], settings: dict[str, str], timeout: datetime.timedelta
) -> list[dict[str, Any]]:
    """Every rank's `member`, once all have described themselves. Any problem is raised on all ranks."""
    end = time.monotonic() + timeout.total_seconds()
    checked = False
    problem = None
    try:
        if world.first:
            store.set("first", json.dumps({**member, "settings": settings}))
        mine = json.dumps(member)
        stored = store.compare_set(f"member/{world.rank}", "", mine).decode()
        if stored != mine:
            both = f"{name_of(json.loads(stored))} and {name_of(member)}"
            problem = f"{both} are both rank {world.rank}; give each process its own rank."
        while problem is None and (not checked or store.add("joined", 0) < world.size):
            if store.check(["refused"]):
                problem = store.get("refused").decode()
            elif not checked and store.check(["first"]):
                problem = _why_not_together(json.loads(store.get("first")), member, settings)
                checked = True
                store.add("joined", int(problem is None))
            elif time.monotonic() > end:
                problem = _who_is_missing(store, world, timeout)
            else:
                time.sleep(max(POLL, POLL_PER_RANK * world.size))
        if problem is None:
            keys = [f"member/{rank}" for rank in range(world.size)]
            return [json.loads(text) for text in store.multi_get(keys)]
        raise AllRanksUserError(_end_all(store, world, problem, SECONDS_TO_READ_REFUSAL))
    except RuntimeError:
        raise UserError(
            f"rank {world.rank} of {world.size}: rank 0 stopped answering; see the output of rank 0 for the reason."
        ) from None


def _who_is_missing(store: Store, world: World, timeout: datetime.timedelta) -> str:
    missing = [rank for rank in range(world.size) if not store.check([f"member/{rank}"])]
    noun = "ranks" if len(missing) > 1 else "rank"
    return (
        f"{world.size - len(missing)} of {world.size} processes joined within {_minutes(timeout)} (DIST.TIMEOUT); "
        f"missing: {noun} {some_of(missing, 10)}. See the output of these ranks for the reason."
    )


def _why_not_together(first: dict[str, Any], member: dict[str, Any], settings: dict[str, str]) -> str | None:
    """Why this rank cannot join rank 0; None if it can."""
    if first["size"] != member["size"]:
        return (
            f"{name_of(member)} was started as one of {member['size']} processes, {name_of(first)} as one of "
            f"{first['size']}; all ranks must be given the same number, by -world_size or the launcher."
        )
    for package in ("vitamp", "torch"):
        if first[package] != member[package]:
            theirs = f"{package} {member[package]}"
            ours = f"{package} {first[package]}"
            return f"{name_of(member)} has {theirs}, {name_of(first)} has {ours}; install the same version."
    different = [key for key in first["settings"] if first["settings"][key] != settings.get(key)]
    if not different:
        return None
    listed = [f"{key} is {settings.get(key)} there and {first['settings'][key]} on rank 0" for key in different]
    return (
        f"{name_of(member)} was started with other settings than {name_of(first)}: {some_of(listed, 3, '; ')}. "
        "Start all ranks with the same settings."
    )


def _end_all(store: Store, world: World, problem: str, seconds: float) -> str:
    """End the ranks that wait, or will wait, for this one. Returns the reason: that of the first rank to refuse.

    Waits at most `seconds`: rank 0, which may serve the store, until all have read the reason; the others, whose exit
    may let a launcher end rank 0, until rank 0 has read it.
    """
    reason = store.compare_set("refused", "", problem).decode()
    if world.first:
        store.set("read by rank 0", "1")
    store.add("read", 1)
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # rank 0 has left
        while time.monotonic() < end:
            if store.add("read", 0) >= world.size if world.first else store.check(["read by rank 0"]):
                break
            time.sleep(POLL)
    return reason


def _minutes(duration: datetime.timedelta) -> str:
    return counted(duration.total_seconds() / 60, "minute")


def backend_of(dist: DistConfig, device: torch.device) -> str:
    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, but this run uses {device.type}; use -backend gloo.")
    return backend


def leave() -> None:
    """Leave the process group; where an error ends this rank alone, report it to the others first."""
    global watchdog
    error = sys.exception()
    if error is not None and caused_by_lost_rank(error):
        return  # the watchdog stays, to find out which
    watching = watchdog
    watchdog = None
    if watching is not None and error is not None and not isinstance(error, _RAISED_BY_ALL):
        watching.report_failure(error)
        return
    if watching is not None:
        watching.leave(SECONDS_TO_LEAVE if error is None else SECONDS_TO_LEAVE_AFTER_ERROR)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def caused_by_lost_rank(error: BaseException) -> bool:
    """Whether this rank, one of several, failed only because another rank was lost."""
    text = f"{type(error).__name__} {error}"
    marks = ("Connection closed by peer", "Connection reset", "DistBackendError", "DistNetworkError", "gloo")
    return watchdog is not None and any(mark in text for mark in marks)
