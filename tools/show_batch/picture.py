"""Make the first images of a training run, augmented as in training, and draw a picture of them."""

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
"""Width of an image in the picture"""
SMALLEST_FRACTION = 0.005
"""Labels with a smaller fraction round to 0 % and are not shown"""
LONGEST_NAME = 18
"""Characters of a class name that are shown"""


class Shown(NamedTuple):
    """One image as the model sees it, but with pixels from 0 to 255."""

    pixels: np.ndarray
    """uint8, height x width x channels"""
    labels: tuple[tuple[str, float], ...]
    """(class, fraction), the larger fraction first"""


def first_images(config: Config, count: int) -> list[Shown]:
    """Return the first `count` images that training would see, augmented with the random numbers of training."""
    # The augmentation may depend on the length of the run. With TRAIN.NUM_EPOCHS auto, it is unknown, and the length of
    # the longest possible run is taken.
    config = config.changed(TRAIN=config.TRAIN.with_auto_epochs(LONGEST_RUN))
    global_batch = config.TRAIN.GLOBAL_BATCH
    if global_batch is not None:
        config = with_global_batch(config, global_batch, ALONE)
    device = pick_device(config.DEVICE, ALONE)
    set_up_device(config, device, ALONE)
    samples, loader = training_data(config, ALONE, device)
    inputs = Inputs(config.DATA).to(device)
    transform = build_batch_transform(config.TRAIN, task_of(config), device)

    def images_of_first_epoch() -> Iterator[Shown]:
        for update, micro_batches in enumerate(loader.epoch(1), start=1):
            for share, batch in micro_batches:
                # As in training: each micro-batch has a seed of its own.
                seed_all(config.SEED, "micro", update, share.number)
                seen = transform(inputs(batch.images), batch.labels)
                # Normalised images back to pixels. Noise of random erasing can leave 0..255 and is clipped.
                pixels = (seen.images - inputs.offset) / inputs.factor
                if config.DATA.is_plain:
                    pixels = pixels.round().clamp(0, 255).to(torch.uint8)
                channels_last = pixels.permute(0, 2, 3, 1).cpu().numpy()
                # With mixing, targets are the fraction of each class (images x classes). Without, they are labels.
                was_mixed = seen.targets.dim() > 1
                fractions = seen.targets if was_mixed else F.one_hot(seen.labels)
                for image, fraction_of_class in zip(channels_last, fractions, strict=True):
                    picture = np.atleast_3d(np.asarray(picture_of_bands(image)))
                    yield Shown(picture, _labels(fraction_of_class, samples.classes))

    try:
        return list(itertools.islice(images_of_first_epoch(), count))
    finally:
        loader.close()


def _labels(target: Tensor, classes: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """Return (class, fraction) of the classes that an image shows, the larger fraction first.

    `target`: the fraction of each class. `classes`: their names; None for numbers. Long names are cut.
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


def draw(path: Path, config: Config, shown: list[Shown]) -> None:
    """Write the images `shown` as a grid to the PNG file `path`, with the labels above each image."""
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    # At least three columns wide, for the title. A row has space for labels, and the figure for the title.
    figure = Figure(figsize=(SIDE_INCHES * max(columns, 3), SIDE_INCHES * 1.25 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    high, wide, channels = shown[0].pixels.shape
    heading = f"{config.DATA.DATASET}, {high} x {wide}"
    if not config.DATA.is_plain:
        heading += f", {shown_bands(config.DATA.IMAGE_CHANNELS)}"
    figure.suptitle(heading, fontsize=9, parse_math=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image in zip(axes.flat, shown, strict=False):  # the grid may have more places than images
        axis.imshow(image.pixels.squeeze(-1) if channels == 1 else image.pixels, cmap="gray", vmin=0, vmax=255)
        # An image that is not mixed has one label, whose fraction is not shown.
        lines = [f"{name}: {100 * fraction:.0f} %" for name, fraction in image.labels]
        if len(image.labels) == 1:
            lines = [name for name, _fraction in image.labels]
        # Names of folders may have bytes that are not UTF-8, which matplotlib cannot draw: they are shown as \xff.
        title = "\n".join(lines).encode(errors="backslashreplace").decode()
        axis.set_title(title, fontsize=7, parse_math=False)
    with writing(path, "-out"):
        figure.savefig(path, dpi=120)
