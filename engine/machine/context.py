"""Settings and device of a run, which every step of it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.config import Config
from utils.distributed.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Run:
    """Settings of a run, and where this process computes."""

    config: Config
    world: World
    device: torch.device
    threads: int
    """CPU threads that this process computes with."""
    batch_found: bool = False
    """Whether DATA.BATCH_SIZE was `auto`, and this is the number that was found."""
