"""How ranks share gradients."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hooks with real types.

import torch
import torch.distributed
from torch import nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from utils.config import Config
from utils.errors import UserError


def with_joined_gradients(model: nn.Module, device: torch.device, config: Config) -> DistributedDataParallel:
    """The model as it is called from now on: its backward pass all-reduces gradients. Every rank must be ready."""
    if config.DIST.STATIC_GRAPH and config.TRAIN.ACCUM_ITER > 1:  # fewer processes than before, say
        raise UserError(
            f"DIST.STATIC_GRAPH: true works only without accumulation, and here are {config.TRAIN.ACCUM_ITER} "
            "micro-batches an update (TRAIN.ACCUM_ITER); leave it out."
        )
    devices = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, static_graph=config.DIST.STATIC_GRAPH
    )
    forward.register_comm_hook(None, _sum_in_bf16 if config.DIST.BF16_GRADIENTS else _sum_gradients)
    return forward


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The sum over ranks, where DDP would take the mean: losses are weighted by their share in the update already.

    So a micro-batch's scaled gradient is the same number on one device and on many, and overflows at the same scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _sum_in_bf16(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The same in half the bytes. bf16 has fp32's range: what overflows in it had overflowed before."""
    gradients = bucket.buffer()
    work = torch.distributed.all_reduce(gradients.to(torch.bfloat16), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: gradients.copy_(future.value()[0]))
