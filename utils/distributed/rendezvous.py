"""The store through which the ranks of a run find each other before they form the process group."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import threading
from typing import TYPE_CHECKING

from utils.distributed.port_discovery import PortAnnouncer, candidate_ports, find_store
from utils.distributed.world import World
from utils.errors import UserError
from utils.text import counted

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS_FOR_TORCH = 5.0


def open_store(world: World, timeout: datetime.timedelta, announcer: contextlib.ExitStack) -> tuple[Store, str]:
    """The store, which rank 0 or the launcher serves, and its address.

    `announcer` receives what tells other ranks the store's port, to be closed when all have joined.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

    assert world.rendezvous is not None
    host, port = world.rendezvous
    _check_host(host, world)
    try:
        if port is not None:
            store = _store_at(host, port, world, timeout)
            if world.served:  # torchrun keeps its store through restarts, with the keys of an earlier start
                store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            return store, f"{host}:{port}"
        return _store_of_job(host, str(world.job), world, timeout, announcer)
    except (DistNetworkError, DistStoreError, TimeoutError) as error:
        if world.first and not world.served:
            raise UserError(
                f"rank 0 cannot listen on port {port}: {_first_line(error)} "
                "Another run may be using the port. Try another -port."
            ) from None
        place = f"{host}:{port}" if port else f"{host}, ports {', '.join(map(str, candidate_ports(str(world.job))))}"
        raise UserError(
            f"rank {world.rank} of {world.size}: rank 0 does not answer at {place} ({minutes(timeout)}, "
            "DIST.TIMEOUT). Check that rank 0 is running there and that no firewall blocks the connection."
        ) from None


def _check_host(host: str, world: World) -> None:
    """Raise UserError if no address is known for the name: torch would try again until DIST.TIMEOUT."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"rank {world.rank} of {world.size}: the host {host!r} cannot be resolved to an address ({why}). It must "
            "be the machine of rank 0; check -host (DIST.HOST, MASTER_ADDR)."
        ) from None


def _store_of_job(
    host: str, job: str, world: World, timeout: datetime.timedelta, announcer: contextlib.ExitStack
) -> tuple[Store, str]:
    """The store of a job that has a name and no port."""
    if world.first:
        from torch.distributed import TCPStore

        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        announced = announcer.enter_context(contextlib.closing(PortAnnouncer(job, store.port)))
        return store, f"{host}:{announced.port}"
    port = find_store(host, job, timeout.total_seconds())
    if port is None:
        raise TimeoutError
    return _store_at(host, port, world, timeout), f"{host}:{port}"


def _store_at(host: str, port: int, world: World, timeout: datetime.timedelta) -> Store:
    """The store at a known port. Opened in a thread: torch waits for ever for a program there that never answers."""
    opened: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()

    def connect() -> None:
        from torch.distributed import TCPStore

        serves = world.first and not world.served
        try:
            opened.put(TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            opened.put(error)

    threading.Thread(target=connect, daemon=True, name="store").start()
    try:
        store = opened.get(timeout=timeout.total_seconds() + SECONDS_FOR_TORCH)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(store, Exception):
        raise store
    return store


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(" - ")[0].rstrip(". ") + "."


def minutes(duration: datetime.timedelta) -> str:
    return counted(duration.total_seconds() / 60, "minute")
