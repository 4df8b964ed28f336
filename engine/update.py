"""One update. There is no other place that performs one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from utils.seeding import seed_all

from datasets import Window
from engine.ema import Ema
from engine.meters import TrainMeters
from engine.precision import Precision
from engine.schedule import Schedule


@dataclass
class Parts:
    """What an update touches. `forward` is the model as it is called: itself, or wrapped for many devices."""

    model: nn.Module
    forward: nn.Module
    inputs: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    meters: TrainMeters
    ema: Ema | None
    grad_clip: float | None
    seed: int


def train_update(parts: Parts, window: Window, update: int) -> None:
    """Move the weights once, by the micro-batches of `window`. `update` counts from 1 through the run."""
    precision, optimizer = parts.precision, parts.optimizer
    for nth, (share, batch) in enumerate(window, start=1):
        # Dropout and stochastic depth depend on where a micro-batch stands in the run, not on who computes it.
        seed_all(parts.seed, "micro", update, share.number)
        with _gradients_meet(parts.forward, last=nth == len(window)):
            with precision.autocast():
                logits = parts.forward(parts.inputs(batch.images))
            loss = parts.criterion(logits.float(), batch.labels)
            precision.backward(loss * share.weight)
        parts.meters.add(loss.detach(), logits.detach(), batch.labels, share.weight)

    precision.unscale(optimizer)
    norm = _clip(parts.model, parts.grad_clip)
    moved = precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    parts.schedule.advance(moved)
    if parts.ema is not None:
        parts.ema.update(moved)
    parts.meters.close_update(update, norm, moved, precision.scaler.is_enabled())


def _gradients_meet(forward: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Ranks exchange gradients once an update, in the last micro-batch's backward pass."""
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    return nullcontext()


def _clip(model: nn.Module, limit: float | None) -> Tensor:
    """The norm of the unscaled gradients, before clipping."""
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    if limit is not None:
        clip_grads_with_norm_(with_gradient, limit, norm)
    return torch.as_tensor(norm)
