"""DistributedDataParallel with gradients summed, not averaged, over ranks."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hooks with real types.

import torch
import torch.distributed
from torch import nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from utils.config import Config
from utils.errors import UserError


def wrap_ddp(model: nn.Module, device: torch.device, config: Config) -> DistributedDataParallel:
    """Wrap the model so that its backward pass all-reduces gradients. A collective call: every rank must be ready."""
    if config.DIST.STATIC_GRAPH and config.TRAIN.ACCUM_ITER > 1:  # a resume with fewer processes raises ACCUM_ITER
        raise UserError(
            f"DIST.STATIC_GRAPH true works only without gradient accumulation, but TRAIN.ACCUM_ITER is "
            f"{config.TRAIN.ACCUM_ITER}; leave DIST.STATIC_GRAPH out."
        )
    devices = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, static_graph=config.DIST.STATIC_GRAPH
    )
    forward.register_comm_hook(None, _sum_in_bf16 if config.DIST.BF16_GRADIENTS else _sum_gradients)
    return forward


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients over ranks, where DDP would average: losses are already weighted by their fraction of the update.

    So a micro-batch's scaled gradient is the same on one device and on many, and overflows at the same loss scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _sum_in_bf16(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients in bf16, half the bytes. It has fp32's range, so no gradient overflows that fp32 could hold."""
    gradients = bucket.buffer()
    work = torch.distributed.all_reduce(gradients.to(torch.bfloat16), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: gradients.copy_(future.value()[0]))
