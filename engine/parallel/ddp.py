"""DistributedDataParallel with gradients summed, not averaged, over ranks, and SyncBatchNorm."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hooks with real types.

import gc

import torch
import torch.distributed
from torch import nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from engine.amp.low_precision import BATCH_NORM
from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from utils.config.schema import DistConfig
from utils.distributed.world import World
from utils.log import log


class Ddp(Callback):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forward: DistributedDataParallel | None = None
        self._trained: list[nn.Parameter] = []

    def attach(self, to: Computing) -> None:
        trained = [parameter for parameter in to.model.parameters() if parameter.requires_grad]
        if self._forward is None or list(map(id, trained)) != list(map(id, self._trained)):
            self._forward = None
            gc.collect()  # an earlier DDP takes its hooks off the weights when it is gone
            self._forward, self._trained = wrap_ddp(to.model, self._device), trained
        to.forward = self._forward


def wrap_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap the model so that its backward pass all-reduces gradients. A collective call: every rank must be ready."""
    devices = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    forward.register_comm_hook(None, _sum_gradients)
    return forward


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients over ranks, where DDP would average: losses are already weighted by their fraction of the update.

    So a micro-batch's scaled gradient is the same on one device and on many, and overflows at the same loss scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class SharedBatchNorm(Callback):
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
