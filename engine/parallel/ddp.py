"""Runs DistributedDataParallel with gradients summed, not averaged, over ranks, and synchronises batch norms."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hooks with real types.

import torch
import torch.distributed
from timm.layers.norm_act import convert_sync_batchnorm  # torch's own drops activations that timm fuses with a norm
from torch import nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from engine.callback import Callback, Computing
from models.parts import BATCH_NORM
from utils.config import Config
from utils.log import log


class Ddp(Callback):
    """Wraps the model in torch's DDP, so that its backward pass all-reduces gradients."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forward: DistributedDataParallel | None = None

    def attach(self, to: Computing) -> None:
        if self._forward is None:
            devices = [self._device.index] if self._device.type == "cuda" else None
            self._forward = DistributedDataParallel(to.model, device_ids=devices, gradient_as_bucket_view=True)
            self._forward.register_comm_hook(None, _sum_gradients)
        to.forward = self._forward


def synchronise_batch_norms(model: nn.Module, config: Config, device: torch.device) -> None:
    """Make batch norms compute their statistics over all processes if DIST.SYNC_BATCHNORM is set.

    Logs over which images they normalise, or a warning where the setting has no effect. Nothing is done without batch
    norms, or if they are frozen: then they do not change their statistics.
    """
    has_training_norm = any(module.training for module in model.modules() if isinstance(module, BATCH_NORM))
    if not has_training_norm:
        return
    words = "each process normalises its own images"
    if config.DIST.SYNC_BATCHNORM and device.type == "cuda":
        convert_sync_batchnorm(model)
        words = "all processes together normalise their images"
    elif config.DIST.SYNC_BATCHNORM:
        log.warning("DIST.SYNC_BATCHNORM has no effect on %s: torch's SyncBatchNorm needs GPUs.", device.type)
    words += f" ({config.DATA.BATCH_SIZE} per process and micro-batch)"
    log.info("Batch norm: %s; validation and checkpoints use the running statistics of rank 0.", words)


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket of gradients as a sum over ranks, not as DDP's mean.

    The loss of each micro-batch is already multiplied by its fraction of the update, so the sum over all micro-batches
    is the mean. The scaled gradients are then the same on one device and on many, and overflow at the same loss scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
