"""The processes of torchrun, srun or mpirun share the work of a tool: each does its part, and rank 0 reports."""

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
"""How long the ranks wait for the slowest. A rank that dies is found by its heartbeat."""
SECONDS_TO_FIND_LOST_RANK = 12
MISSING = object()


@contextlib.contextmanager
def ranks_of_launcher(argv: Sequence[str], given: Mapping[str, Any]) -> Iterator[World]:
    """This process among those that a launcher started with these words. An error of one of them ends them all.

    `given`: the flags -host, -port, -rank and -world_size.
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
    same = {} if "rank" in given else {"the command": " ".join(argv)}
    group.join(world, DistConfig(TIMEOUT=MINUTES), torch.device("cpu"), member, same)
    if not world.first:
        log.setLevel("ERROR")  # rank 0 warns for all
    try:
        yield world
    except (AllRanksUserError, AllRanksError):
        raise
    except Exception as error:
        if group.watchdog is not None and group.caused_by_lost_rank(error):
            group.watchdog.expect_lost_rank()
            time.sleep(SECONDS_TO_FIND_LOST_RANK)  # in which the watchdog ends this process with the reason
        elif group.watchdog is not None:
            group.watchdog.report_failure(error)
            group.watchdog = None
        raise
    finally:
        group.leave()


def gather(items: Sequence[T], world: World) -> list[T]:
    """On rank 0 the items of all ranks, which were dealt to them in turn, in their order; none on the others."""
    if world.size == 1:
        return list(items)
    import torch.distributed

    parts: list[Sequence[T]] = [() for _ in range(world.size)]
    torch.distributed.gather_object(items, parts if world.first else None, dst=0)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*parts, fillvalue=MISSING))
    return [item for item in turns if item is not MISSING]  # pyright: ignore[reportReturnType]
