"""Common start of the loops that `timm` compares: first weights, loss, schedule and clipping."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from datasets import Batch
from engine.amp.precision import switch_tf32
from engine.inputs.normalize import per_channel
from models import build_model
from utils.config import Config
from utils.machine.cpus import cores
from utils.seeding import seed_all

UPDATES_PER_EPOCH = 100
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Loop(Protocol):
    def train(self, batches: list[Batch]) -> None:
        """Train one update per batch."""

    def train_one(self, batch: Batch) -> float:
        """Train one update and return its loss."""
        ...


@dataclass
class Start:
    """Model with the same first weights as ours, and the hyperparameters, for every loop but ours."""

    config: Config
    device: torch.device
    precision: str

    def __post_init__(self) -> None:
        data, train = self.config.DATA, self.config.TRAIN
        # The same number of threads for all; our own loop alone makes other process-wide settings.
        torch.set_num_threads(self.config.THREADS or cores())
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # as in timm's train.py
            switch_tf32(self.config.AMP.TF32)  # as in ours: torch's default for convolutions is TF32
        seed_all(self.config.SEED, "init")
        self.model = build_model(self.config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS).to(self.device).train()
        self.criterion = nn.CrossEntropyLoss()
        self.total = train.NUM_EPOCHS * UPDATES_PER_EPOCH
        self.clip = train.GRAD_CLIP or math.inf
        self.warmup = min(round(train.WARMUP_EPOCHS * UPDATES_PER_EPOCH), self.total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = HALF.get(self.precision)
        return contextlib.nullcontext() if half is None else torch.autocast(self.device.type, half)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        data = self.config.DATA
        mean, std = (per_channel(values, data.IMAGE_CHANNELS) for values in (data.IMAGENET_MEAN, data.IMAGENET_STD))
        return tuple(mean), tuple(std)
