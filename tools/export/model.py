"""timm's model with the trained weights, as it is exported, and the metadata in the file.

A trained model may compute attention or patches by vitamp's own code, which leaves weights and their names alone. The
weights are loaded into timm's plain model, so that the exported graph needs none of that code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from datasets.decoding.background import background_of
from datasets.given import crop_of, squeezes
from engine.checkpoint.restore import load_weights
from engine.inputs.normalize import Inputs, per_channel
from engine.saved.trained import Trained
from models import timm_call
from tools.export.outputs import outputs_of
from utils.record.weights_file import MADE_BY

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """Options of the export: -dtype, -with_preprocess, -with_resize, -opset, -tolerance."""

    dtype: str
    with_preprocess: bool
    with_resize: bool
    opset: int | None
    tolerance: float


@dataclass(frozen=True)
class TimmModel:
    """timm's plain model with the trained weights, in fp32, on the CPU, and the call that creates it."""

    timm_name: str
    arguments: dict[str, Any]
    module: nn.Module

    @classmethod
    def of(cls, trained: Trained) -> TimmModel:
        config = trained.config
        name, arguments = timm_call(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
        module = timm.create_model(name, **arguments)
        load_weights(module, trained.model.state_dict(), f"{trained.chosen.place}")
        return cls(name, arguments, module.eval().requires_grad_(False))

    def create_call(self, file: str) -> str:
        """Line of Python that creates the model from `file`."""
        given = "".join(f"{name}={value!r}, " for name, value in self.arguments.items())
        return f'timm.create_model("{self.timm_name}", {given}checkpoint_path="{file}")'


class ExportModule(nn.Module):
    """Module that is exported: pixels or normalised images in, fp32 logits out, calibrated if the model is.

    With -with_resize, one image in and its probabilities out.
    """

    def __init__(self, trained: Trained, module: nn.Module, options: Options) -> None:
        super().__init__()
        self.dtype = DTYPES[options.dtype]
        takes_pixels = options.with_preprocess or options.with_resize
        self.inputs = Inputs(trained.config.DATA) if takes_pixels else nn.Identity()
        self.probabilities = outputs_of(trained).probabilities if options.with_resize else None
        self.module, self.temperature = module.to(self.dtype), trained.temperature
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        logits = self.module(self.inputs(images).to(self.dtype)).float()
        logits = logits * (1 / self.temperature) if self.temperature != 1 else logits
        return logits if self.probabilities is None else self.probabilities(logits)[0]


def metadata(trained: Trained, model: TimmModel, options: Options, program: bool) -> dict[str, Any]:
    """Metadata of the file, without anything about the machine that wrote it. `program`: not weights alone."""
    data, channels = trained.config.DATA, trained.config.DATA.IMAGE_CHANNELS
    crop_mode, crop_pct = crop_of(data)
    return {
        "made_by": MADE_BY,
        "model": trained.config.MODEL.NAME,
        "checkpoint": trained.chosen.place.name,
        "weights": trained.chosen.which.name,
        **({"averaged": [one.folder.name for one in averaged]} if (averaged := trained.chosen.averaged) else {}),
        "timm_name": model.timm_name,
        "timm_arguments": model.arguments,
        "classes": trained.chosen.classes,
        "num_classes": trained.config.MODEL.NUM_CLASSES,
        "input": "pixels" if options.with_preprocess else "normalised",
        "dtype": options.dtype,
        "image_size": data.IMAGE_SIZE,
        "channels": channels,
        "mean": per_channel(data.IMAGENET_MEAN, channels),
        "std": per_channel(data.IMAGENET_STD, channels),
        "crop": "none" if squeezes(data) else "middle",
        "crop_mode": crop_mode,
        "crop_pct": crop_pct,
        "interpolation": data.INTERPOLATION,
        "exif_rotate": data.EXIF_ROTATE,
        "background": background_of(data),
        **_calibration(trained, applied=program),
        **outputs_of(trained).metadata(trained),
    }


def _calibration(trained: Trained, applied: bool) -> dict[str, Any]:
    """`applied`: whether the outputs of the file are divided by the temperature already."""
    kept = trained.chosen.calibration if trained.calibrated else None
    if kept is None:
        return {}
    return {"calibration": {"temperature": kept.temperature, "images": kept.images, "applied": applied}}
