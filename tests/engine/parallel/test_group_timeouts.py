"""DIST.TIMEOUT holds for every process group of a run."""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed

from engine.machine.stopping import Stopping
from engine.parallel.fsdp import Sharding
from utils.config.schema import DistConfig
from utils.distributed.world import World

CPU = torch.device("cpu")
DIST = DistConfig(TIMEOUT=90, STRATEGY="fsdp", HSDP=True)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process, whose own time-out is short."""
    store = torch.distributed.HashStore()
    timeout = datetime.timedelta(seconds=7)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    yield
    torch.distributed.destroy_process_group()


def seconds(group: object) -> float:
    assert isinstance(group, torch.distributed.ProcessGroup)
    return group._get_backend(CPU).options._timeout.total_seconds()


@pytest.mark.usefixtures("alone")
def test_groups_for_stop_flags_and_for_hsdp_have_the_timeout_of_the_run() -> None:
    stopping = Stopping(World(0, 2, 0, 2, "torchrun"), lambda: False, DIST.group_timeout)
    mesh = Sharding(World(0, 1, 0, 1, "torchrun"), CPU, DIST)._mesh
    groups = [stopping._group, *map(mesh.get_group, mesh.mesh_dim_names or ())]
    assert [round(seconds(group)) for group in groups] == [91 * 60] * 3, "a minute more than the watchdog waits"
