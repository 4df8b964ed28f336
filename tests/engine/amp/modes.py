"""The modes of mixed precision as words of a run, and what one update does in them."""

from typing import Any

import torch
from torch import Tensor

from datasets import Window
from engine.setup import ReadyToTrain
from engine.update import train_update
from utils.config import AmpConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

MODES = {
    "O1 bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16"},
    "O2 bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": "O2"},
    "NAIVE bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": "NAIVE"},
    "O3 bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": "O3"},
    "fp8": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp8"},
    "O1 fp16": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024},
    "O2 fp16": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__LEVEL": "O2", "AMP__INIT_LOSS_SCALING": 1024},
    "NAIVE fp16": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__LEVEL": "NAIVE", "AMP__INIT_LOSS_SCALING": 1024},
}
WITH_MASTERS = [name for name in MODES if not name.startswith(("O3", "fp8"))]
SCALED = [name for name in MODES if name.endswith("fp16")]

# One update changes the weights by minus the gradient.
PLAIN_STEPS = {
    "TRAIN__OPTIMIZER__NAME": "SGD",
    "TRAIN__OPTIMIZER__MOMENTUM": 0,
    "TRAIN__WEIGHT_DECAY": 0,
    "TRAIN__BASE_LR": 1,
    "TRAIN__WARMUP_EPOCHS": 0,
    "TRAIN__GRAD_CLIP": "null",
}


def change(ready: ReadyToTrain, window: Window) -> Tensor:
    """What one update does to the weights, as one vector."""
    before = [p.detach().clone().float() for p in ready.parts.model.parameters()]
    train_update(ready.parts, window, 1)
    after = [p.detach().float() for p in ready.parts.model.parameters()]
    return torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)])


def amp(**keys: Any) -> AmpConfig:
    return AmpConfig(ENABLED=True, **keys)
