"""Statistics of batch norm where a batch is spread over several processes."""

from __future__ import annotations

from torch import nn

from engine.amp.half_copy import BATCH_NORM
from engine.amp.precision import Precision
from utils.config import Config
from utils.distributed.world import World
from utils.log import log


def join_statistics(model: nn.Module, precision: Precision, config: Config, world: World) -> bool:
    """Let ranks compute the statistics together, if they can; before gradients are joined. Whether they now do.

    From then on a forward pass in training is something that all ranks do together.
    """
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
    if world.size == 1 or not any(norm.training for norm in norms):  # frozen ones keep their statistics
        return False
    if why := _why_not(precision, config):
        log.info(
            "Batch norm takes its statistics from each process's own images (%s); validated and saved are the running "
            "ones of rank 0.",
            why,
        )
        return False
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own would drop activations joined to a norm

    convert_sync_batchnorm(model)
    log.info("Batch norm takes its statistics from the images of all %d processes (DIST.SYNC_BATCHNORM).", world.size)
    return True


def _why_not(precision: Precision, config: Config) -> str | None:
    if not config.DIST.SYNC_BATCHNORM:
        return "DIST.SYNC_BATCHNORM false"
    if precision.device.type != "cuda":
        return "torch joins them on GPUs only"
    if config.DIST.STRATEGY == "fsdp":
        return "DIST.STRATEGY fsdp"
    return f"AMP.LEVEL {precision.level} computes in a copy of the model" if precision.computes_in_copy else None
