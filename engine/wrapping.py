"""Wrapping for several ranks: DDP, and shared statistics of batch norm."""

from __future__ import annotations

from engine.parallel.ddp import wrap_ddp
from engine.parallel.sync_batch_norm import sync_batch_norm
from engine.update import Parts
from utils.config import Config
from utils.log import log


def wrap(parts: Parts, config: Config) -> None:
    """Synchronise gradients and batch norm statistics between ranks. Call it once every rank is known to be ready.

    Two cases need no DDP: a half-precision copy sums its masters' gradients once per update, in fp32, and sharded
    weights (DIST.STRATEGY fsdp) reduce gradients themselves.
    """
    if parts.world.size == 1:
        return
    if sync_batch_norm(parts.model, parts.precision, config, parts.world) and parts.watch is not None:
        parts.watch = None  # a replay is a forward pass of one rank alone, which would wait for the others for ever
        log.info(
            "With DIST.SYNC_BATCHNORM, skipped updates are not replayed, and the log names no module that overflowed."
        )
    if parts.half_copy is None and parts.sharding is None:
        parts.forward = wrap_ddp(parts.model, parts.precision.device)
