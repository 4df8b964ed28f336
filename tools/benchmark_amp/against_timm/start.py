"""What the loops of `timm` start from: the same weights, batches, optimiser, schedule, average and clipping."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from datasets import Batch
from engine.amp.precision import switch_tf32
from engine.inputs.normalize import per_channel
from models import build_model
from utils.config import Config
from utils.cpus import cores
from utils.seeding import seed_all

OURS, STOCK, BEST, PLAIN = "ours", "stock", "best", "plain"
UPDATES_AN_EPOCH = 100
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Way:
    """One loop, in one precision."""

    kind: str
    precision: str
    compiled: bool = False
    train_py: Path | None = None
    """timm's train.py, whose own loop is to run."""
    settings: Config | None = None
    """Of our own loop, where they are not those of all."""


class Loop(Protocol):
    def train(self, batches: list[Batch]) -> None:
        """As many updates as there are batches."""

    def train_one(self, batch: Batch) -> float:
        """One update, and its loss."""
        ...


@dataclass
class Made:
    """What every other loop starts from: timm's model with the same first weights, and what it is trained with."""

    config: Config
    device: torch.device
    precision: str

    def __post_init__(self) -> None:
        data, train = self.config.DATA, self.config.TRAIN
        # As many threads for all; what else is set for a whole process, only our own run sets.
        torch.set_num_threads(self.config.THREADS or cores())
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # as timm's train.py has it
            switch_tf32(self.config.AMP.TF32)  # as ours has it: torch's own convolutions would take TF32
        seed_all(self.config.SEED, "init")
        self.model = build_model(self.config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS).to(self.device).train()
        self.criterion = nn.CrossEntropyLoss()
        self.total = train.NUM_EPOCHS * UPDATES_AN_EPOCH
        self.clip = train.GRAD_CLIP or math.inf
        self.warmup = min(round(train.WARMUP_EPOCHS * UPDATES_AN_EPOCH), self.total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = HALF.get(self.precision)
        return contextlib.nullcontext() if half is None else torch.autocast(self.device.type, half)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        data = self.config.DATA
        mean, std = (per_channel(values, data.IMAGE_CHANNELS) for values in (data.IMAGENET_MEAN, data.IMAGENET_STD))
        return tuple(mean), tuple(std)
