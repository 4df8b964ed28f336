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


def with_batch(config: Config, batch: int, accumulated: int) -> Config:
    """The settings with these numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER."""
    data = config.DATA.model_copy(update={"BATCH_SIZE": batch})
    train = config.TRAIN.model_copy(update={"ACCUM_ITER": accumulated})
    return config.model_copy(update={"DATA": data, "TRAIN": train})


def multiples_near(number: int, unit: int, times: int = 1) -> str:
    """The two multiples of `unit` around `number`, each times `times`, for messages."""
    below = number // unit * unit
    return f"{below * times} or {(below + unit) * times}" if below else str(unit * times)
