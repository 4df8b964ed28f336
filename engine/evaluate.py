"""Validation: each sample counts once, with any number of processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import ValLoader
from engine.amp.precision import Precision
from engine.machine.late_compiler import uncompiled
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.measure.meters import Means, correct
from utils.distributed.world import World, sum_over_ranks
from utils.errors import AllRanksError


@torch.no_grad()  # not inference mode: fp8 layers do not run in it
def evaluate(
    model: nn.Module,
    loader: ValLoader,
    samples: int,
    inputs: nn.Module,
    precision: Precision,
    world: World,
    between: Callable[[], None] = lambda: None,
) -> Means:
    """Mean loss and accuracies over the validation split. A collective call.

    `between` is called before each batch, and may raise to end the validation.
    """
    device = precision.device
    sum_type = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(4, dtype=sum_type, device=device)
    training = model.training
    model.eval()
    try:
        for batch in loader:
            between()
            with uncompiled(), precision.autocast(training=False):
                logits = model(inputs(batch.images))
            sums += _batch_sums(logits.float(), batch.labels, batch.indices >= 0, sum_type)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(IN_VALIDATION)
        raise
    finally:
        model.train(training)
    loader.broken.raise_together(world)
    loss, top1, top5, counted = sum_over_ranks(sums, world).tolist()
    if counted != samples:
        raise AllRanksError(f"validation counted {counted:.0f} samples, not {samples}; its metrics are not usable.")
    return Means(loss / samples, 100 * top1 / samples, 100 * top5 / samples)


def _batch_sums(logits: Tensor, labels: Tensor, real: Tensor, sum_type: torch.dtype) -> Tensor:
    """Sums of loss, top-1 and top-5 hits, and samples. `real`: False for samples that only pad the batch."""
    first, five = correct(logits, labels)
    losses = F.cross_entropy(logits, labels, reduction="none").to(sum_type)
    losses = losses.where(real, 0.0)  # not a product: 0 times an infinite loss is NaN
    return torch.stack((losses.sum(), (first & real).sum(), (five & real).sum(), real.sum()))
