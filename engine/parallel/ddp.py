"""DistributedDataParallel with gradients summed, not averaged, over ranks."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hooks with real types.

import gc

import torch
import torch.distributed
from torch import nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from engine.callback import Callback, Computing


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
            devices = [self._device.index] if self._device.type == "cuda" else None
            self._forward = DistributedDataParallel(to.model, device_ids=devices, gradient_as_bucket_view=True)
            self._forward.register_comm_hook(None, _sum_gradients)
            self._trained = trained
        to.forward = self._forward


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients over ranks, where DDP would average: losses are already weighted by their fraction of the update.

    So a micro-batch's scaled gradient is the same on one device and on many, and overflows at the same loss scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
