"""Forms the process group of a run's ranks, after checking that they belong together, and leaves it.

The ranks find each other in torch's key-value store, which rank 0 or the launcher serves. There each rank describes
itself before any device communicates. A rank with other settings, or one that cannot take part, ends all ranks, and all
of them report the same reason.
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
"""Time in which a rank that fails before it joins tries to reach the others."""
SECONDS_TO_READ_REFUSAL = 5
SECONDS_TO_LEAVE = 60
SECONDS_TO_LEAVE_AFTER_ERROR = 5
POLL = 0.02
"""Seconds between two requests to the store while a rank waits."""
POLL_PER_RANK = 0.001
"""The same per rank: with many ranks, each sends fewer requests to rank 0."""
# All ranks raise these errors alike, so that no rank needs to report them to the others.
_RAISED_BY_ALL = (UserError, AllRanksError)

watchdog: Watchdog | None = None
rank_name: str | None = None
"""'rank 1 on node7 (process 4711)' in a run of several processes"""


def join(
    world: World, dist: DistConfig, device: torch.device, member: dict[str, Any], settings: dict[str, str]
) -> list[dict[str, Any]]:
    """Form the process group, start the watchdog, and return the descriptions of all ranks in their order.

    member: the description of this process, such as rank, host, pid and versions; the store's address is added
    settings: dotted key -> value in words; a UserError unless they equal those of rank 0
    """
    global watchdog, rank_name
    import torch.distributed

    from utils.distributed.watchdog import Watchdog

    backend = backend_of(dist, device)
    timeout = datetime.timedelta(minutes=dist.TIMEOUT)
    rank_name = name_of(member)
    store, address = _open_store(world, timeout)
    member["rendezvous"] = address
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
    """End all ranks, because this rank has failed with an error before it joined them; rank 0 prints the reason.

    If rank 0 has read the reason, a UserError is raised again as AllRanksUserError, and True is returned for any other
    error. False means that rank 0 has not read it, so that this rank must report its error itself.
    """
    problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".partition("\n")[0]
    this_rank = name_of({"rank": world.rank, "host": socket.gethostname(), "pid": os.getpid()})
    try:
        store, _ = _open_store(world, datetime.timedelta(seconds=SECONDS_TO_REFUSE))
        _end_all(store, world, f"{this_rank}: {problem}", SECONDS_TO_REFUSE)
        read_by_rank_0 = store.check(["read by rank 0"])
    except (UserError, RuntimeError):
        return False
    if read_by_rank_0 and isinstance(error, UserError):
        raise AllRanksUserError(str(error)) from None
    return read_by_rank_0


def _open_store(world: World, timeout: datetime.timedelta) -> tuple[Store, str]:
    """Connect to the store, or serve it; return it and its address as host:port.

    Rank 0 serves the store, unless the launcher does (`world.served`, under torchrun).
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

    assert world.rendezvous is not None
    host, port = world.rendezvous
    try:
        socket.getaddrinfo(host, None)  # For a host without an address, torch would try again until the timeout.
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"rank {world.rank} of {world.size}: the host {host!r} cannot be resolved to an address ({why}). It must "
            "be the machine of rank 0; check -host (MASTER_ADDR)."
        ) from None
    serves = world.first and not world.served
    listener = None
    # While a rank waits for others inside torch, Python runs no signal handler. With the default handlers, Ctrl-C and
    # TERM end it at once.
    old_handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if serves and host in (LOOPBACK, "localhost"):  # torch itself would listen on every network.
            listener = socket.create_server((LOOPBACK, port)).detach()
        store = TCPStore(
            host, port, is_master=serves, timeout=timeout, wait_for_workers=False, master_listen_fd=listener
        )
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
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    # The prefix of all keys has the job, because another job may use the same port. If torchrun serves the store, the
    # prefix also has the number of restarts, because this store keeps the keys of earlier starts. A store that rank 0
    # serves is always new. There the number is 0, because torchrun may count differently on each machine.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if world.served else "0"
    job = world.job or "run"
    return PrefixStore(f"{job}-{restarts}", store), f"{host}:{port}"


def _gather(
    store: Store, world: World, member: dict[str, Any], settings: dict[str, str], timeout: datetime.timedelta
) -> list[dict[str, Any]]:
    """Wait until all ranks have described themselves, and return their descriptions; any problem ends all ranks.

    member: the description of this rank
    settings: the settings of this rank, which must be those of rank 0
    """
    deadline = time.monotonic() + timeout.total_seconds()
    compared_with_rank_0 = False
    problem = None
    try:
        if world.first:
            store.set("first", json.dumps({**member, "settings": settings}))
        description = json.dumps(member)
        # compare_set stores the description only if no process of this rank has stored one, and returns the stored one.
        stored = store.compare_set(f"member/{world.rank}", "", description).decode()
        if stored != description:
            both = f"{name_of(json.loads(stored))} and {name_of(member)}"
            problem = f"{both} are both rank {world.rank}; give each process its own rank."

        while problem is None and (not compared_with_rank_0 or store.add("joined", 0) < world.size):
            if store.check(["refused"]):
                problem = store.get("refused").decode()
            elif not compared_with_rank_0 and store.check(["first"]):
                problem = _why_not_together(json.loads(store.get("first")), member, settings)
                compared_with_rank_0 = True
                store.add("joined", 1 if problem is None else 0)
            elif time.monotonic() > deadline:
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
    """The error that names the ranks that did not join in time."""
    missing = [rank for rank in range(world.size) if not store.check([f"member/{rank}"])]
    noun = "ranks" if len(missing) > 1 else "rank"
    return (
        f"{world.size - len(missing)} of {world.size} processes joined within {_minutes(timeout)} (DIST.TIMEOUT); "
        f"missing: {noun} {some_of(missing, 10)}. See the output of these ranks for the reason."
    )


def _why_not_together(rank_0: dict[str, Any], member: dict[str, Any], settings: dict[str, str]) -> str | None:
    """The error if this rank cannot join rank 0; None if it can.

    rank_0: the description of rank 0, with its settings
    member, settings: the description and the settings of this rank
    """
    if rank_0["size"] != member["size"]:
        return (
            f"{name_of(member)} was started as one of {member['size']} processes, {name_of(rank_0)} as one of "
            f"{rank_0['size']}; all ranks must be given the same number, by -world_size or the launcher."
        )
    for package in ("vitamp", "torch"):
        if rank_0[package] != member[package]:
            version_here = f"{package} {member[package]}"
            version_of_rank_0 = f"{package} {rank_0[package]}"
            names = f"{name_of(member)} has {version_here}, {name_of(rank_0)} has {version_of_rank_0}"
            return f"{names}; install the same version."
    different_keys = [key for key in rank_0["settings"] if rank_0["settings"][key] != settings.get(key)]
    if not different_keys:
        return None
    differences = [
        f"{key} is {settings.get(key)} there and {rank_0['settings'][key]} on rank 0" for key in different_keys
    ]
    return (
        f"{name_of(member)} was started with other settings than {name_of(rank_0)}: {some_of(differences, 3, '; ')}. "
        "Start all ranks with the same settings."
    )


def _end_all(store: Store, world: World, problem: str, seconds: float) -> str:
    """End all ranks that wait, or will wait, for this one, and return the reason that all of them report.

    That is the problem of the first rank that calls this function. It waits at most `seconds`. Rank 0, which may serve
    the store, waits until all ranks have read the reason. The other ranks wait until rank 0 has read it, because their
    exit may let a launcher end rank 0.
    """
    reason = store.compare_set("refused", "", problem).decode()
    if world.first:
        store.set("read by rank 0", "1")
    store.add("read", 1)
    deadline = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # Rank 0 has left, and the store with it.
        while time.monotonic() < deadline:
            if world.first:
                is_read = store.add("read", 0) >= world.size
            else:
                is_read = store.check(["read by rank 0"])
            if is_read:
                break
            time.sleep(POLL)
    return reason


def _minutes(duration: datetime.timedelta) -> str:
    return counted(duration.total_seconds() / 60, "minute")


def backend_of(dist: DistConfig, device: torch.device) -> str:
    """The backend of the process group: DIST.BACKEND, else nccl on GPUs and gloo elsewhere."""
    backend = dist.BACKEND or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"-backend nccl needs GPUs, but this run uses {device.type}; use -backend gloo.")
    return backend


def leave() -> None:
    """Leave the process group at the end, or because of the exception that is being handled.

    If the error ends this rank alone, it is reported to the other ranks instead. If another rank is lost, the watchdog
    continues, to find out which one it is.
    """
    global watchdog
    error = sys.exception()
    if error is not None and caused_by_lost_rank(error):
        return
    stopping_watchdog = watchdog
    watchdog = None
    if stopping_watchdog is not None and error is not None and not isinstance(error, _RAISED_BY_ALL):
        stopping_watchdog.report_failure(error)
        return
    if stopping_watchdog is not None:
        stopping_watchdog.leave(SECONDS_TO_LEAVE if error is None else SECONDS_TO_LEAVE_AFTER_ERROR)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def caused_by_lost_rank(error: BaseException) -> bool:
    """Whether this rank, one of several, failed only because another rank was lost."""
    text = f"{type(error).__name__} {error}"
    signs = ("Connection closed by peer", "Connection reset", "DistBackendError", "DistNetworkError", "gloo")
    return watchdog is not None and any(sign in text for sign in signs)
