"""EMA: an exponential moving average of the weights.

The lists of tensors are made once: walking two state dicts at every update costs more than the arithmetic.
"""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from engine.callback import Callback
from engine.parallel.shards import local_shard
from models.parts import base_weights
from utils.config.train import TrainConfig
from vitamp.metrics import AVERAGE, WeightSet


class Ema(Callback):
    """Averages the weights of a model after each update (TRAIN.MODEL_EMA). `module` is a model with the averages."""

    def __init__(self, model: nn.Module, train: TrainConfig, device: torch.device) -> None:
        """Copy the model in fp32, to the CPU if MODEL_EMA_FORCE_CPU is set, else to `device`."""
        self.device = torch.device("cpu") if train.MODEL_EMA_FORCE_CPU else device
        # Weights that are frozen for good (MODEL.LORA; none otherwise) are shared with the model, if they are on the
        # EMA's device and in fp32. For that they are put into the memo of deepcopy, which copies nothing in it.
        numbered_device = torch.empty(0, device=self.device).device  # cuda:0 where `device` is cuda
        frozen = [model.get_parameter(name) for name in base_weights(model)]
        can_share = all(w.device == numbered_device and w.dtype == torch.float32 for w in frozen)
        memo = {id(weight): weight for weight in frozen} if can_share else {}
        # Always in fp32: half precision rounds the average's small steps away.
        self.module = copy.deepcopy(model, memo).to(self.device).float().eval().requires_grad_(False)
        self.decay = train.MODEL_EMA_DECAY
        self.warmup = train.MODEL_EMA_WARMUP
        self.updates: int | Tensor = 0
        """Steps of the average so far; on the device if only that knows which updates were skipped"""
        self._model = model
        self._averages: list[Tensor] = []
        """The weights of `module`, or this rank's shards of them; empty until the first update lists them"""

    def weights(self) -> dict[WeightSet, nn.Module]:
        return {AVERAGE: self.module}

    def state(self) -> dict[str, Any]:
        return {"ema_updates": int(self.updates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.updates = state.get("ema_updates", 0)  # 0: the checkpoint is of a run without an EMA

    def rows(self) -> dict[str, str]:
        return {"training": f"EMA {self.decay:g}"}

    @torch.no_grad()
    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Move the average one step towards the weights, unless the update was skipped.

        `stepped`: whether the weights moved; a tensor of 0 or 1 where only the device knows. Buffers, such as running
        statistics, are copied.
        """
        if stepped is False:
            return
        if not self._averages:  # the first update
            self._list_tensors()
        averages = self._averages
        weights = self._weights
        if weights[0].device != self.device or weights[0].dtype != averages[0].dtype:
            weights = [weight.to(self.device, torch.float32) for weight in weights]
        if isinstance(stepped, Tensor):
            self._update_on_device(stepped, averages, weights)
            return
        # The warm-up begins at 0.1 and approaches 1, so that the average forgets the random initial weights.
        count = int(self.updates)
        decay = min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay
        torch._foreach_lerp_(averages, weights, 1 - decay)
        self.updates += 1
        for ema_buffers, model_buffers in self._buffers:
            torch._foreach_copy_(ema_buffers, model_buffers)

    def _list_tensors(self) -> None:
        """List the tensors of both models. Called late, when both are sharded: each rank averages its shard."""
        self._weights: list[Tensor] = []
        for weight, average in zip(self._model.parameters(), self.module.parameters(), strict=True):
            is_shared = weight is average  # frozen for good
            if not is_shared:
                self._weights.append(local_shard(weight.detach()))
                self._averages.append(local_shard(average.detach()))
        # Running statistics are averages already, so they are copied. One copy is for all buffers of the same dtypes:
        # (dtype in the EMA, dtype in the model) -> (buffers of the EMA, buffers of the model)
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for ema_buffer, model_buffer in zip(self.module.buffers(), self._model.buffers(), strict=True):
            ema_buffers, model_buffers = groups.setdefault((ema_buffer.dtype, model_buffer.dtype), ([], []))
            ema_buffers.append(ema_buffer)
            model_buffers.append(model_buffer)
        self._buffers = list(groups.values())

    def _update_on_device(self, stepped: Tensor, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Update the average without asking the device whether the weights moved.

        `stepped`: 1 if the optimiser has stepped, else 0. The average's step towards the weights is multiplied by it.
        """
        stepped = stepped.to(self.device).reshape(())
        self.updates = torch.as_tensor(self.updates, device=self.device)
        # The same warm-up as in `after_update`; Apple GPUs have no float64.
        count = self.updates.double() if self.device.type != "mps" else self.updates.float()
        decay = torch.clamp((1 + count) / (10 + count), max=self.decay) if self.warmup else self.decay
        fraction = ((1 - decay) * stepped).float()
        ema_steps = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(ema_steps, fraction)
        torch._foreach_add_(averages, ema_steps)
        self.updates = self.updates + stepped.long()
        for ema_buffers, model_buffers in self._buffers:
            new = _flatten_dense_tensors(model_buffers).to(self.device)
            old = _flatten_dense_tensors(ema_buffers)
            chosen = torch.where(stepped.bool(), new, old)
            torch._foreach_copy_(ema_buffers, list(_unflatten_dense_tensors(chosen, ema_buffers)))
