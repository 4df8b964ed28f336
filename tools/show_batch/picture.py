"""First images of a training run, augmented as in training, and a picture of them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from engine.inputs.batches import Inputs
from engine.inputs.mixing import build_batch_transform
from engine.machine.device import pick_device, set_up_device
from engine.memory.dry_run import LONGEST_RUN
from engine.memory.global_batch import with_global_batch
from engine.setup import training_data
from engine.task import task_of
from tools.common.output_file import writing
from utils.config import Config
from utils.distributed.world import ALONE
from utils.seeding import seed_all
from vitamp.bands import picture_of_bands, shown_bands

SIDE_INCHES = 1.7
SMALLEST_FRACTION = 0.005
"""Labels with a smaller fraction round to 0 % and are not shown"""
LONGEST_NAME = 18


class Shown(NamedTuple):
    """One image as the model sees it, but with pixels from 0 to 255."""

    pixels: np.ndarray
    """uint8, height x width x channels"""
    labels: tuple[tuple[str, float], ...]
    """(class, fraction), the larger fraction first"""


def first_images(config: Config, count: int) -> list[Shown]:
    """First `count` training images of the run, augmented with the random numbers of training."""
    # TRAIN.NUM_EPOCHS auto: a long run's first ones, as its length is not known
    config = config.changed(TRAIN=config.TRAIN.spanning(LONGEST_RUN))
    total = config.TRAIN.GLOBAL_BATCH
    if total is not None:
        config = with_global_batch(config, total, ALONE)
    device = pick_device(config.DEVICE, ALONE)
    set_up_device(config, device, ALONE)
    samples, loader = training_data(config, ALONE, device)
    inputs = Inputs(config.DATA).to(device)
    change = build_batch_transform(config.TRAIN, task_of(config), device)

    def images() -> Iterator[Shown]:
        for update, window in enumerate(loader.epoch(1), start=1):
            for share, batch in window:
                seed_all(config.SEED, "micro", update, share.number)
                seen = change(inputs(batch.images), batch.labels)
                # Normalised images back to pixels. Noise of random erasing can leave 0..255 and is clipped.
                pixels = (seen.images - inputs.offset) / inputs.factor
                if config.DATA.is_plain:
                    pixels = pixels.round().clamp(0, 255).to(torch.uint8)
                several = seen.targets if seen.targets.dim() > 1 else F.one_hot(seen.labels)
                for image, target in zip(pixels.permute(0, 2, 3, 1).cpu().numpy(), several, strict=True):
                    shown = np.atleast_3d(np.asarray(picture_of_bands(image)))
                    yield Shown(shown, _labels(target, samples.classes))

    try:
        return list(itertools.islice(images(), count))
    finally:
        loader.close()


def _labels(target: Tensor, classes: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    found = []
    values, labels = target.float().sort(descending=True, stable=True)
    for label, fraction in zip(labels.tolist(), values.tolist(), strict=True):
        name = classes[label] if classes else str(label)
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 1]}…"
        if fraction >= SMALLEST_FRACTION:
            found.append((name, fraction))
    return tuple(found)


def draw(path: Path, config: Config, shown: list[Shown]) -> None:
    """Write a grid of images with their labels."""
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(SIDE_INCHES * max(columns, 3), SIDE_INCHES * 1.25 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    high, wide, channels = shown[0].pixels.shape
    title = f"{config.DATA.DATASET}, {high} x {wide}"
    if not config.DATA.is_plain:
        title += f", {shown_bands(config.DATA.IMAGE_CHANNELS)}"
    figure.suptitle(title, fontsize=9, parse_math=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.imshow(one.pixels.squeeze(-1) if channels == 1 else one.pixels, cmap="gray", vmin=0, vmax=255)
        title = "\n".join(f"{name}: {100 * fraction:.0f} %" for name, fraction in one.labels)
        if len(one.labels) == 1:
            title = one.labels[0][0]
        axis.set_title(title.encode(errors="backslashreplace").decode(), fontsize=7, parse_math=False)
    with writing(path, "-out"):
        figure.savefig(path, dpi=120)
