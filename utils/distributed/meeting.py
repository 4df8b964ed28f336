"""Open the store where the ranks of a run meet before they form the process group."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
from typing import TYPE_CHECKING

from utils.distributed.signpost import Signpost, find_store, ports_of
from utils.distributed.world import World
from utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS_FOR_TORCH = 5.0


def meet(world: World, timeout: datetime.timedelta, signpost: contextlib.ExitStack) -> tuple[Store, str]:
    """The store where ranks leave word for each other, at rank 0's or at the launcher's, and where that is.

    `signpost`: what leads others there, to be closed when all have come.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, rendezvous

    if world.meeting is None:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    else:
        host, port = world.meeting
    try:
        if world.meeting is None:
            store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
            return PrefixStore(_attempt(), store), f"{host}:{port}"
        if port is not None:
            return _store_at(host, int(port), world, timeout), f"{host}:{port}"
        return _store_of_job(host, str(world.job), world, timeout, signpost)
    except ValueError as error:  # RANK and WORLD_SIZE without MASTER_ADDR or MASTER_PORT
        raise UserError(f"rank {world.rank} of {world.size}: {error}; start the ranks with torchrun.") from None
    except (DistNetworkError, DistStoreError, TimeoutError) as error:
        if world.first and world.meeting is not None:
            raise UserError(
                f"rank 0 cannot listen at port {port}: {_first_line(error)} Is a run there already? Try another -port."
            ) from None
        place = f"{host}:{port}" if port else f"{host}, ports {', '.join(map(str, ports_of(str(world.job))))}"
        raise UserError(
            f"rank {world.rank} of {world.size}: rank 0 does not answer at {place} ({minutes(timeout)}, "
            "DIST.TIMEOUT). Is it running, is that its machine, and does no firewall stand between?"
        ) from None


def _store_of_job(
    host: str, job: str, world: World, timeout: datetime.timedelta, signpost: contextlib.ExitStack
) -> tuple[Store, str]:
    if world.first:
        from torch.distributed import TCPStore

        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        post = signpost.enter_context(contextlib.closing(Signpost(job, store.port)))
        return store, f"{host}:{post.port}"
    port = find_store(host, job, timeout.total_seconds())
    if port is None:
        raise TimeoutError
    return _store_at(host, port, world, timeout), f"{host}:{port}"


def _store_at(host: str, port: int, world: World, timeout: datetime.timedelta) -> Store:
    """In a thread, since torch waits for ever where something else listens that says nothing."""
    found: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()

    def open_store() -> None:
        from torch.distributed import TCPStore

        try:
            found.put(TCPStore(host, port, is_master=world.first, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            found.put(error)

    threading.Thread(target=open_store, daemon=True, name="store").start()
    try:
        answer = found.get(timeout=timeout.total_seconds() + SECONDS_FOR_TORCH)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _attempt() -> str:
    """torchrun may keep one store through restarts; what an earlier start left there must not be taken for ours."""
    shared = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if shared else "start"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(" - ")[0].rstrip(". ") + "."


def minutes(time_given: datetime.timedelta) -> str:
    return f"{time_given.total_seconds() / 60:g} minutes"
