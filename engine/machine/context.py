"""What every step of a run knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.config import Config
from utils.distributed.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Run:
    """The settings of a run, and where this process computes them."""

    config: Config
    world: World
    device: torch.device
    threads: int
    """CPU threads that this process computes with."""
