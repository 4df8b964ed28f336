"""What several ranks share while they train, put around the parts of an update."""

from __future__ import annotations

from engine.parallel.ddp import with_joined_gradients
from engine.parallel.sync_batch_norm import join_statistics
from engine.update import Parts
from utils.config import Config
from utils.log import log


def wrap(parts: Parts, config: Config) -> None:
    """Let ranks share gradients and the statistics of batch norm. Only once every rank is known to be ready.

    Some do without DDP: half-precision copies sum their masters' gradients once per update, in fp32, and sharded
    weights (DIST.STRATEGY fsdp) reduce gradients by themselves.
    """
    if parts.world.size == 1:
        return
    if join_statistics(parts.model, parts.precision, config, parts.world) and parts.watch is not None:
        parts.watch = None  # a replay is a forward pass of one rank alone, and would wait for the others for ever
        log.info("So skipped updates are not replayed, and no module is named for them.")
    if parts.half_copy is None and parts.sharding is None:
        parts.forward = with_joined_gradients(parts.model, parts.precision.device, config)
