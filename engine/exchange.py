"""How ranks share gradients."""

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with real types.

import torch
import torch.distributed
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from engine.update import Parts
from utils.world import World


def join_gradients(parts: Parts, world: World) -> None:
    """Let ranks exchange gradients in the backward pass; only once every rank is known to be ready.

    Half-precision copies do without: their masters' gradients are summed up once an update, in fp32. And weights that
    are dealt out (DIST.STRATEGY fsdp) exchange gradients by themselves.
    """
    if world.size == 1 or parts.half_copy is not None or parts.sharding is not None:
        return
    device = parts.precision.device
    devices = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(parts.model, device_ids=devices, gradient_as_bucket_view=True)
    forward.register_comm_hook(None, _sum_gradients)
    parts.forward = forward


def _sum_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The sum over ranks, where DDP would take the mean: losses are weighted by their share in the update already.

    So a micro-batch's scaled gradient is the same number on one device and on many, and overflows at the same scale.
    """
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
