"""Model FLOPs utilisation (MFU): the operations of the model per second, in percent of the device's peak.

The peaks of GPUs are listed here; other devices have no MFU. FLOPs are counted for the forward and backward pass of an
image; a multiplication and an addition are two. Operations that activation checkpointing repeats count once, and masked
ones count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from engine.amp.precision import Precision
from engine.inputs.shortcuts import TokenDrop, shortcuts_of
from engine.measure.progress import Position
from models import build_without_weights
from utils.config import Config
from utils.log import log

# Dense peaks in TFLOP/s with fp32 accumulation, from the vendor's data sheets (sparse values halved). The names are
# regular expressions for the driver's names.
H100_SXM = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
LISTED: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA T4, V100, A10 and A100 Tensor Core GPU, data sheets
    (r"(Tesla )?T4", {"fp32": 8.1, "fp16": 65.0}),
    (r"(Tesla )?V100-SXM2-\d+GB", {"fp32": 15.7, "fp16": 125.0}),
    (r"(Tesla )?V100-PCIE-\d+GB", {"fp32": 14.0, "fp16": 112.0}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0}),
    (r"A100(-SXM4|-PCIE)-\d+GB|A100 80GB PCIe", {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}),
    # NVIDIA L4 and L40S, data sheets
    (r"L4", {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5}),
    (r"L40S", {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0}),
    # NVIDIA Ampere GA102 and Ada GPU architecture, white papers
    (r"GeForce RTX 3090", {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0}),
    (r"GeForce RTX 4090", {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}),
    # NVIDIA H100 and H200 Tensor Core GPU, data sheets
    (r"H100 PCIe", {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0}),
    (r"H100 80GB HBM3", H100_SXM),
    (r"H200", H100_SXM),
    # NVIDIA HGX B200, data sheet, an eighth
    (r"B200", {"fp32": 75.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0}),
)
DATA_SHEET = "its data sheet"
IMAGES = 2
"""Batch size for counting: batch norm cannot train on one image."""


def training_flops(model: nn.Module, channels: int, image_size: int) -> float | None:
    """FLOPs of one image in training; None if they cannot be counted. `model` is on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    images = torch.empty(IMAGES, channels, image_size, image_size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            model.train()(images).sum().backward()
    except Exception as error:  # a model that reads values fails on the meta device, in any way
        log.debug("The model's operations cannot be counted: %s", error)
        return None
    return counter.get_total_flops() / IMAGES or None


@dataclass(frozen=True)
class Peak:
    """Peak of a device in TFLOP/s, from its data sheet."""

    tflops: float
    kind: str
    device: str

    def words(self) -> str:
        return f"MFU is relative to a peak of {self.tflops:.3g} TFLOP/s in {self.kind} for each device ({DATA_SHEET})."


def listed_tflops(name: str, kind: str) -> float | None:
    """Peak by the driver's name of a GPU; None for one that is not listed, such as a MIG slice."""
    name = name.removeprefix("NVIDIA ").strip()
    return next((peaks.get(kind) for pattern, peaks in LISTED if re.fullmatch(pattern, name)), None)


def peak_of(precision: Precision) -> Peak | None:
    """The listed peak of this device; None if it is not listed."""
    if precision.device.type != "cuda":
        return None
    name, kind = torch.cuda.get_device_name(precision.device), precision.name.split("-")[-1]
    tflops = listed_tflops(name, kind)
    return None if tflops is None else Peak(tflops, kind, name)


class Utilisation:
    """Computes MFU from images per second."""

    def __init__(self, config: Config, peak: Peak, devices: int, position: Position) -> None:
        """`position`: that of the run. With TRAIN.SIZE_SCHEDULE, TRAIN.TOKEN_DROP or MODEL.UNFREEZE_EPOCH, FLOPs per
        image depend on the epoch.
        """
        self._config, self._tflops, self._position = config, peak.tflops * devices, position
        self._flops: dict[tuple[int, bool, bool], float | None] = {}

    @property
    def counted(self) -> bool:
        """Whether the FLOPs for this epoch are known; counting them takes up to two seconds."""
        return self._image_kind() in self._flops

    def percent(self, images_per_second: float) -> float | None:
        """MFU in percent. Counts FLOPs first, if those per image have changed since the last report."""
        kind = self._image_kind()
        if kind not in self._flops:
            self._flops[kind] = self._count(kind[0])
            if self._flops[kind] is None:
                log.info("MFU is not shown: the FLOPs of this model cannot be counted.")
        flops = self._flops[kind]
        return None if flops is None else 100 * images_per_second * flops / 1e12 / self._tflops

    def _image_kind(self) -> tuple[int, bool, bool]:
        """Size of this epoch's images, whether tokens are dropped, and whether weights are frozen."""
        train, epoch = self._config.TRAIN, self._position.epoch
        drops = train.TOKEN_DROP > 0 and epoch <= train.NUM_EPOCHS - train.TOKEN_DROP_TAIL
        return train.size_in(epoch, self._config.DATA.IMAGE_SIZE), drops, bool(self._config.MODEL.frozen_in(epoch))

    def _count(self, size: int) -> float | None:
        config, data, epoch = self._config, self._config.DATA, self._position.epoch
        settings = config.MODEL.model_copy(update={"FREEZE": config.MODEL.frozen_in(epoch)})
        model = build_without_weights(settings, data.IMAGE_SIZE, data.IMAGE_CHANNELS, shortcuts_of(config))
        TokenDrop(config.TRAIN).enter(epoch, model)
        return training_flops(model, data.IMAGE_CHANNELS, size)
