"""Our own and a plain PyTorch training loop, for the table `timm`.

A loop reads values back from the device where it does so in real training. `train_one` is for comparing losses; its
time is not measured.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from datasets import Batch, Share, Window
from engine.compile.choice import NONE, WHOLE, choose_compiling
from engine.compile.compiling import Compiling
from engine.machine.device import set_up_device
from engine.setup import tuned_model, update_parts
from engine.update import train_update
from tools.benchmark_amp.against_timm.start import UPDATES_PER_EPOCH, Loop, Start
from tools.benchmark_amp.against_timm.train_py import Timm, TimmTrain
from tools.benchmark_amp.against_timm.ways import OURS, PLAIN, Way
from tools.benchmark_amp.settings import changed
from utils.config import Config
from utils.distributed.world import ALONE


def loop_of(way: Way, config: Config, device: torch.device) -> Loop:
    if way.kind == OURS:
        return Ours(way, config, device)
    if way.kind == PLAIN:
        return Plain(way, config, device)
    return (TimmTrain if way.train_py else Timm)(way, config, device)


class Ours:
    """The training of main_single_gpu.py."""

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        amp = {"ENABLED": way.precision != "fp32"} | ({"DTYPE": way.precision} if way.precision != "fp32" else {})
        config = changed(way.settings or config, "AMP", **amp)
        config = changed(config, "TRAIN", COMPILE=WHOLE if way.compiled else NONE)
        set_up_device(config, device, ALONE)
        in_precision, tuning = tuned_model(config, device, ALONE, {})
        in_precision[0].train()
        self._parts = update_parts(config, ALONE, device, in_precision, UPDATES_PER_EPOCH)
        compiling = self._parts.ability(Compiling)
        assert compiling is not None  # every training has it
        compiling.choice = choose_compiling(config, self._parts, ALONE, 0, {})
        self.choices = tuning.choices | compiling.noted()
        self._parts.assemble()
        self._done = 0

    def train(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._done += 1
            share = Share(0, batch.indices.numpy(), 1.0)
            train_update(self._parts, Window((share,), iter((batch,))), self._done)

    def train_one(self, batch: Batch) -> float:
        self.train([batch])
        return self._parts.meters.read(self._parts.precision.scale_tensor(), 0.0).update.loss


class Plain:
    """A plain loop of torch's parts."""

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        start = self._start = Start(config, device, way.precision)
        train, model = config.TRAIN, start.model
        no_decay = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # pyright: ignore
        named = list(model.named_parameters())
        plain = [p for name, p in named if p.ndim <= 1 or name in no_decay]
        decayed = [p for name, p in named if p.ndim > 1 and name not in no_decay]
        groups = [{"params": decayed, "weight_decay": train.WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, train.BASE_LR, **train.OPTIMIZER.arguments())
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, partial(_lr_factor, start))
        update_ema = torch.optim.swa_utils.get_ema_multi_avg_fn(train.MODEL_EMA_DECAY)
        self._ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=update_ema)
        self._scaler = torch.amp.GradScaler(device.type, enabled=way.precision == "fp16")
        mean, std = start.mean_and_std()
        self._mean, self._std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (mean, std))

    def train(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.train_one(batch)

    def train_one(self, batch: Batch) -> float:
        start = self._start
        images = (batch.images.float() / 255 - self._mean) / self._std
        with start.autocast():
            loss = start.criterion(start.model(images), batch.labels)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(start.model.parameters(), start.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._schedule.step()
        self._ema.update_parameters(start.model)
        return loss.item()


def _lr_factor(start: Start, update: int) -> float:
    """Learning rate relative to the base: linear warm-up, then a cosine."""
    train = start.config.TRAIN
    if update < start.warmup:
        lowest = train.WARMUP_START_LR / train.BASE_LR
        return lowest + update * (1 - lowest) / start.warmup
    end = train.END_LR / train.BASE_LR
    return end + 0.5 * (1 - end) * (1 + math.cos(math.pi * (update - start.warmup) / (start.total - start.warmup)))
