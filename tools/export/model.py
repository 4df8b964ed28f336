"""scripts/export.py: the model as timm alone builds it, and what its user must know.

The model that was trained may compute by ways of our own. They leave its weights and their names alone, so these go
into a plain model, whose graph is timm's: it needs none of our code, and the check compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from datasets.given import squeezes
from engine.checkpoint.state import load_weights
from engine.checkpoint.weights_file import MADE_BY
from engine.inputs.normalize import Inputs, per_channel
from engine.saved.trained import Trained
from models import timm_call

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Wishes:
    """How it is to be written."""

    dtype: str
    with_preprocess: bool
    opset: int | None


@dataclass(frozen=True)
class Plain:
    """timm's own model with the trained weights, in fp32, on the CPU."""

    timm_name: str
    arguments: dict[str, Any]
    module: nn.Module

    def call(self, file: str) -> str:
        """The line of Python that builds it again."""
        given = "".join(f"{name}={value!r}, " for name, value in self.arguments.items())
        return f'timm.create_model("{self.timm_name}", {given}checkpoint_path="{file}")'


def plain_model(trained: Trained) -> Plain:
    config = trained.config
    name, arguments = timm_call(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    module = timm.create_model(name, **arguments)
    load_weights(module, trained.model.state_dict(), f"{trained.source}")
    return Plain(name, arguments, module.eval().requires_grad_(False))


class Whole(nn.Module):
    """From what the file takes, pixels or normalised numbers, to logits in fp32."""

    def __init__(self, trained: Trained, module: nn.Module, wishes: Wishes) -> None:
        super().__init__()
        self.dtype = DTYPES[wishes.dtype]
        self.inputs = Inputs(trained.config.DATA) if wishes.with_preprocess else nn.Identity()
        self.module = module.to(self.dtype)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.module(self.inputs(images).to(self.dtype)).float()


def about(trained: Trained, plain: Plain, wishes: Wishes) -> dict[str, Any]:
    """What goes into the file beside the weights. It tells nothing of the machine it was made on."""
    data, channels = trained.config.DATA, trained.config.DATA.IMAGE_CHANNELS
    return {
        "made_by": MADE_BY,
        "model": trained.config.MODEL.NAME,
        "checkpoint": trained.source.name,
        "weights": trained.weights,
        "timm_name": plain.timm_name,
        "timm_arguments": plain.arguments,
        "classes": trained.classes,
        "num_classes": trained.config.MODEL.NUM_CLASSES,
        "input": "pixels" if wishes.with_preprocess else "normalised",
        "dtype": wishes.dtype,
        "image_size": data.IMAGE_SIZE,
        "channels": channels,
        "mean": per_channel(data.IMAGENET_MEAN, channels),
        "std": per_channel(data.IMAGENET_STD, channels),
        "crop": "none" if squeezes(data) else "middle",
        "crop_pct": data.CROP_PCT,
        "interpolation": data.INTERPOLATION,
    }
