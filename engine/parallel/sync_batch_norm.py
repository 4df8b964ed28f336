"""SyncBatchNorm: batch norm's statistics over the images of all processes."""

from __future__ import annotations

from torch import nn

from engine.amp.half_copy import BATCH_NORM
from engine.amp.precision import Precision
from utils.config import Config
from utils.distributed.world import World
from utils.log import log


def sync_batch_norm(model: nn.Module, precision: Precision, config: Config, world: World) -> bool:
    """Convert batch norms to SyncBatchNorm where possible, before DDP wraps the model. Returns whether it did.

    Afterwards every forward pass in training is a collective call.
    """
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
    if world.size == 1 or not any(norm.training for norm in norms):  # frozen norms keep their statistics
        return False
    if why := _why_not(precision, config):
        log.info(
            "Batch norm computes its statistics on each process's own images (%s). Validation and checkpoints use the "
            "running statistics of rank 0.",
            why,
        )
        return False
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own would drop activations fused with a norm

    convert_sync_batchnorm(model)
    log.info("Batch norm computes its statistics on the images of all %d processes (DIST.SYNC_BATCHNORM).", world.size)
    return True


def _why_not(precision: Precision, config: Config) -> str | None:
    if not config.DIST.SYNC_BATCHNORM:
        return "DIST.SYNC_BATCHNORM false"
    if precision.device.type != "cuda":
        return "torch's SyncBatchNorm works on GPUs only"
    if config.DIST.STRATEGY == "fsdp":
        return "DIST.STRATEGY fsdp"
    return f"AMP.LEVEL {precision.level} computes in a copy of the model" if precision.computes_in_copy else None
