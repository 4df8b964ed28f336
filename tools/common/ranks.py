"""Share the work of a tool among the processes of torchrun, srun or mpirun: each does its part, and rank 0 reports."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from utils.cli import version_text
from utils.config.schema import DistConfig
from utils.distributed.launchers import read_world
from utils.distributed.world import ALONE, World
from utils.errors import AllRanksError, AllRanksUserError
from utils.log import log

T = TypeVar("T")

MINUTES = 7 * 24 * 60.0
"""Timeout for the slowest rank. It can be long, because a rank that dies is detected by its heartbeat."""
SECONDS_TO_FIND_LOST_RANK = 12
MISSING = object()


@contextlib.contextmanager
def ranks_of_launcher(argv: Sequence[str], given: Mapping[str, Any]) -> Iterator[World]:
    """Join the processes that a launcher started, and give this process's rank among them; leave them at the end.

    Without a launcher, this process is alone. An error in one process ends all of them. `argv`: words of the command,
    which must be equal on all ranks. `given`: the flags -host, -port, -rank and -world_size.
    """
    world = read_world(given) or ALONE
    if world.size == 1:
        yield world
        return
    import torch

    from utils.distributed import group
    from utils.distributed.watchdog import start_time_of

    member = {
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "vitamp": version_text().splitlines()[0].split()[-1],
        "torch": torch.__version__,
        "started": start_time_of(os.getpid()),
    }
    # With -rank, the commands differ by it.
    must_be_equal = {} if "rank" in given else {"the command": " ".join(argv)}
    group.join(world, DistConfig(TIMEOUT=MINUTES), torch.device("cpu"), member, must_be_equal)
    if not world.first:
        log.setLevel("ERROR")  # rank 0 warns for all
    try:
        yield world
    except (AllRanksUserError, AllRanksError):
        raise
    except Exception as error:
        if group.watchdog is not None and group.caused_by_lost_rank(error):
            # Communication failed because another process died. While this one sleeps, the watchdog finds out which one
            # it was, logs that and ends this process; if it finds none, the error is raised below.
            group.watchdog.expect_lost_rank()
            time.sleep(SECONDS_TO_FIND_LOST_RANK)
        elif group.watchdog is not None:
            group.watchdog.report_failure(error)
            group.watchdog = None
        raise
    finally:
        group.leave()


def gather(items: Sequence[T], world: World) -> list[T]:
    """Collect the items of all ranks on rank 0, in their original order; the other ranks get an empty list.

    It assumes that the items were dealt to the ranks in turn: rank r of n has the items r, r + n, r + 2n, and so on.
    """
    if world.size == 1:
        return list(items)
    import torch.distributed

    items_by_rank: list[Sequence[T]] = [() for _ in range(world.size)]  # filled on rank 0
    torch.distributed.gather_object(items, items_by_rank if world.first else None, dst=0)
    # First the first item of each rank, then the second of each; some ranks have one item less than others.
    rounds = itertools.zip_longest(*items_by_rank, fillvalue=MISSING)
    in_order = itertools.chain.from_iterable(rounds)
    return [item for item in in_order if item is not MISSING]  # pyright: ignore[reportReturnType]
