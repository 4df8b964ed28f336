"""`Run`: the settings and the process that every step of a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.config import Config
from utils.distributed.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Run:
    """Settings of a run, and the rank, device and threads of this process."""

    config: Config
    world: World
    device: torch.device
    threads: int
    """CPU threads of this process."""
    auto_batch_size: bool = False
    """Whether DATA.BATCH_SIZE was found by `auto`."""
    asked_accumulation: int | None = None
    """TRAIN.ACCUM_ITER of the settings; the run may have chosen another to keep its global batch."""


def global_batch(config: Config, world: World) -> int:
    """Images per update."""
    return config.DATA.BATCH_SIZE * world.size * config.TRAIN.ACCUM_ITER
