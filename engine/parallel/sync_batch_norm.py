"""SyncBatchNorm: batch norm's statistics over the images of all processes."""

from __future__ import annotations

from engine.ability import Ability, Computing
from engine.amp.half_copy import BATCH_NORM
from engine.amp.precision import Precision
from utils.config.schema import DistConfig
from utils.distributed.world import World
from utils.log import log


class SharedBatchNorm(Ability):
    """Converts batch norms to SyncBatchNorm where possible. Each forward pass in training is then a collective call."""

    def __init__(self, precision: Precision, dist: DistConfig, world: World) -> None:
        self._precision, self._dist, self._world = precision, dist, world
        self._said = ""

    def attach(self, to: Computing) -> None:
        if not any(module.training for module in to.model.modules() if isinstance(module, BATCH_NORM)):
            return  # frozen norms keep their statistics
        if why := self._why_not():
            words = (
                f"Batch norm computes its statistics on each process's own images ({why}). Validation and checkpoints "
                "use the running statistics of rank 0."
            )
        else:
            from timm.layers.norm_act import convert_sync_batchnorm  # torch's would drop activations fused with a norm

            convert_sync_batchnorm(to.model)
            words = (
                f"Batch norm computes its statistics on the images of all {self._world.size} processes "
                "(DIST.SYNC_BATCHNORM)."
            )
        if words != self._said:
            log.info(words)
        self._said = words

    def _why_not(self) -> str | None:
        if not self._dist.SYNC_BATCHNORM:
            return "DIST.SYNC_BATCHNORM false"
        if self._precision.device.type != "cuda":
            return "torch's SyncBatchNorm works on GPUs only"
        if self._dist.STRATEGY == "fsdp":
            return "DIST.STRATEGY fsdp"
        level = self._precision.level
        return f"AMP.LEVEL {level} computes in a copy of the model" if self._precision.computes_in_copy else None
