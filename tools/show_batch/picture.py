"""The pictures of show_batch.py: the first images of a training, and a sheet of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from engine.inputs.mixup import batch_change
from engine.inputs.normalize import Inputs
from engine.machine.device import pick_device, prepare
from engine.setup import training_data
from utils.config import Config
from utils.distributed.world import ALONE
from utils.output_file import writing
from utils.seeding import seed_all

SIDE_INCHES = 1.7
SMALLEST_SHARE = 0.005
"""A label with less of an image than this rounds to 0 % and is not told."""
LONGEST_NAME = 18


@dataclass(frozen=True)
class Shown:
    """One image as the model sees it, but not normalised any more."""

    pixels: np.ndarray
    """uint8, height x width x channels"""
    labels: tuple[tuple[str, float], ...]
    """(class, its share of the image), the greater share first."""


def first_images(config: Config, count: int) -> list[Shown]:
    """The first `count` training images of the run, changed with the very random numbers of training."""
    device = pick_device(config.DEVICE, ALONE)
    prepare(config, device, ALONE)
    samples, loader = training_data(config, ALONE, device)
    inputs = Inputs(config.DATA).to(device)
    change = batch_change(config.TRAIN, config.MODEL.NUM_CLASSES, device)

    def images() -> Iterator[Shown]:
        for update, window in enumerate(loader.epoch(1), start=1):
            for share, batch in window:
                seed_all(config.SEED, "micro", update, share.number)
                seen = change(inputs(batch.images), batch.labels)
                targets = seen.targets if seen.targets.dim() > 1 else None
                pixels = _bytes(seen.images, inputs).cpu().numpy()
                for row, image in enumerate(pixels):
                    shares = {int(seen.labels[row]): 1.0} if targets is None else _shares(targets[row])
                    yield Shown(image, tuple((_name(samples.classes, label), part) for label, part in shares.items()))

    try:
        return list(itertools.islice(images(), count))
    finally:
        loader.close()


def draw(path: Path, config: Config, shown: list[Shown]) -> None:
    """A sheet of images with their labels."""
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    size = (SIDE_INCHES * max(columns, 3), SIDE_INCHES * 1.25 * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)
    figure.suptitle(f"{config.DATA.DATASET}, {config.DATA.IMAGE_SIZE} x {config.DATA.IMAGE_SIZE}", fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.imshow(one.pixels.squeeze(-1) if one.pixels.shape[-1] == 1 else one.pixels, cmap="gray", vmin=0, vmax=255)
        axis.set_title(_in_words(one.labels), fontsize=7)
    try:
        with writing(path, "-out"):
            figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _bytes(images: Tensor, inputs: Inputs) -> Tensor:
    """Back from what the model sees to what eyes see; erased boxes of noise leave 0..255 and are cut off there."""
    return ((images - inputs.offset) / inputs.factor).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _shares(target: Tensor) -> dict[int, float]:
    """The classes an image is made of, the greater share first."""
    values, labels = target.topk(min(2, len(target)))
    pairs = zip(labels.tolist(), values.tolist(), strict=True)
    return {label: value for label, value in pairs if value >= SMALLEST_SHARE}


def _name(classes: list[str] | None, label: int) -> str:
    name = classes[label] if classes else str(label)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _in_words(labels: tuple[tuple[str, float], ...]) -> str:
    if len(labels) == 1:
        return labels[0][0]
    return "\n".join(f"{name}: {100 * share:.0f} %" for name, share in labels)
