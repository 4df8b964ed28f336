"""Statistics of batch norm where a batch is spread over several processes."""

from __future__ import annotations

from engine.amp.half_copy import BATCH_NORM
from engine.update import Parts
from utils.config import Config
from utils.distributed.world import World
from utils.log import log


def join_statistics(parts: Parts, world: World, config: Config) -> None:
    """Let ranks compute them together, if they can; before gradients are joined, and once nothing is tried any more.

    From then on a forward pass in training is something all ranks do together. Replaying a skipped update is not, so
    that is left out.
    """
    norms = [module for module in parts.model.modules() if isinstance(module, BATCH_NORM)]
    if world.size == 1 or not any(norm.training for norm in norms):  # frozen ones stand still
        return
    if why := _why_not(parts, config):
        log.info(
            "Batch norm takes its statistics from each process's own images (%s); validated and saved are the running "
            "ones of rank 0.",
            why,
        )
        return
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own would drop activations joined to a norm

    convert_sync_batchnorm(parts.model)
    log.info("Batch norm takes its statistics from the images of all %d processes (DIST.SYNC_BATCHNORM).", world.size)
    if parts.watch is not None:
        parts.watch = None
        log.info("So skipped updates are not replayed, and no module is named for them.")


def _why_not(parts: Parts, config: Config) -> str | None:
    if not config.DIST.SYNC_BATCHNORM:
        return "DIST.SYNC_BATCHNORM false"
    if parts.precision.device.type != "cuda":
        return "torch joins them on GPUs only"
    if parts.half_copy is not None:
        return f"AMP.LEVEL {parts.precision.level} computes in a copy of the model"
    if parts.sharding is not None:
        return "DIST.STRATEGY fsdp"
    return "TRAIN.OOM split: ranks may take different numbers of steps" if config.TRAIN.OOM == "split" else None
