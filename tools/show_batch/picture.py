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
"""Letters of a class's name; longer names are cut"""


class Shown(NamedTuple):
    """One image as the model sees it, but with pixels from 0 to 255, and its labels."""

    pixels: np.ndarray
    """uint8, height x width x channels"""
    labels: tuple[tuple[str, float], ...]
    """(class, fraction), the larger fraction first"""


def first_images(config: Config, count: int) -> list[Shown]:
    """Return the first `count` training images of the run, augmented with the same random numbers as in training."""
    # The number of epochs may be auto, and is not known yet. The images are then those of the longest run.
    config = config.changed(TRAIN=config.TRAIN.spanning(LONGEST_RUN))
    global_batch = config.TRAIN.GLOBAL_BATCH
    if global_batch is not None:
        config = with_global_batch(config, global_batch, ALONE)
    device = pick_device(config.DEVICE, ALONE)
    set_up_device(config, device, ALONE)
    samples, loader = training_data(config, ALONE, device)
    inputs = Inputs(config.DATA).to(device)
    augment_batch = build_batch_transform(config.TRAIN, task_of(config), device)

    def images() -> Iterator[Shown]:
        for update, micro_batches in enumerate(loader.epoch(1), start=1):
            for share, batch in micro_batches:
                seed_all(config.SEED, "micro", update, share.number)
                augmented = augment_batch(inputs(batch.images), batch.labels)
                # Normalised images back to pixels. Noise of random erasing can leave 0..255 and is clipped.
                pixels = (augmented.images - inputs.offset) / inputs.factor
                if config.DATA.is_plain:
                    pixels = pixels.round().clamp(0, 255).to(torch.uint8)
                # One fraction per class, also where images are not mixed and have a label each.
                has_fractions = augmented.targets.dim() > 1
                targets = augmented.targets if has_fractions else F.one_hot(augmented.labels)
                for image, target in zip(pixels.permute(0, 2, 3, 1).cpu().numpy(), targets, strict=True):
                    picture = np.atleast_3d(np.asarray(picture_of_bands(image)))
                    yield Shown(picture, _largest_labels(target, samples.classes))

    try:
        return list(itertools.islice(images(), count))
    finally:
        loader.close()


def _largest_labels(target: Tensor, classes: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """Return the labels that are shown above an image: name and fraction, the largest fraction first.

    `target` has the fraction of each class. Without names in `classes`, numbers are the names.
    """
    shown_labels = []
    fractions, labels = target.float().sort(descending=True, stable=True)
    for label, fraction in zip(labels.tolist(), fractions.tolist(), strict=True):
        name = classes[label] if classes else str(label)
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 1]}…"
        if fraction >= SMALLEST_FRACTION:
            shown_labels.append((name, fraction))
    return tuple(shown_labels)


def draw(path: Path, config: Config, images: list[Shown]) -> None:
    """Write a picture file with a grid of images, and the labels of each image above it."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    # The heading needs the width of 3 images and half an inch, and the labels a quarter of an image's height.
    figure = Figure(figsize=(SIDE_INCHES * max(columns, 3), SIDE_INCHES * 1.25 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    high, wide, channels = images[0].pixels.shape
    heading = f"{config.DATA.DATASET}, {high} x {wide}"
    if not config.DATA.is_plain:
        heading += f", {shown_bands(config.DATA.IMAGE_CHANNELS)}"
    figure.suptitle(heading, fontsize=9, parse_math=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image in zip(axes.flat, images, strict=False):
        axis.imshow(image.pixels.squeeze(-1) if channels == 1 else image.pixels, cmap="gray", vmin=0, vmax=255)
        title = "\n".join(f"{name}: {100 * fraction:.0f} %" for name, fraction in image.labels)
        if len(image.labels) == 1:  # an image that is not mixed, whose label is its name alone
            title = image.labels[0][0]
        axis.set_title(title.encode(errors="backslashreplace").decode(), fontsize=7, parse_math=False)
    with writing(path, "-out"):
        figure.savefig(path, dpi=120)
