"""Numbers for the settings that are `auto`: classes, image size and patch size, by what the data set has."""

from __future__ import annotations

import torch

from datasets import count_classes, open_dataset, source_of
from utils.config import DataConfig, Loaded
from utils.config.keys import CLASSES, IMAGE_SIZE, PATCH_SIZE
from utils.config.kinds import AUTO
from utils.config.read import Entry
from utils.errors import UserError
from vitamp.metrics import NO_LABELS, ONE_LABEL

SIZES = range(32, 97)
"""Image sizes that `auto` chooses from"""
PATCHES = range(4, 9)
"""Patch sizes that `auto` chooses from"""
PATCHES_PER_ROW = 8
"""Number of patches that a patch size of `auto` comes closest to"""


def with_classes(loaded: Loaded) -> Loaded:
    config = loaded.config
    try:
        number = count_classes(_of_any_size(config.DATA), train=True)
    except UserError:
        if config.task == NO_LABELS:  # of a data set without classes of its own
            return loaded.with_values({CLASSES: Entry(1, "no labels are read")}, [])
        if not config.EVAL:
            raise
        number = count_classes(_of_any_size(config.DATA), train=False)  # an evaluation needs no training split
    number = max(number, 1)  # the check of the data reports negative labels, with their lines
    name = source_of(config.DATA)
    if number == 1 and config.task == ONE_LABEL and not config.EVAL:
        raise UserError(f"{name} has one class, so there is nothing to learn. Give the data with all classes.")
    note = f"{CLASSES} {number}: classes of {name}"
    return loaded.with_values({CLASSES: Entry(number, f"classes of {name}")}, [note])


def _of_any_size(data: DataConfig) -> DataConfig:
    """For a look at the data while DATA.IMAGE_SIZE may still be `auto`."""
    return data.model_copy(update={"IMAGE_SIZE": SIZES[-1]}) if data.IMAGE_SIZE == AUTO else data


def with_image_size(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.DATA.IMAGE_SIZE != AUTO:
        return loaded
    from datasets.examine import median_side

    name, classes = source_of(config.DATA), config.MODEL.NUM_CLASSES
    data = _of_any_size(config.DATA)
    samples = open_dataset(data, not config.EVAL, classes, config.SEED, torch.device("cpu")).single_images()
    side = None if samples is None else median_side(samples, data)
    if side is None:
        raise UserError(
            f"{loaded.sources[IMAGE_SIZE]}: {IMAGE_SIZE} auto: the size of the images of {name} is unknown, because "
            f"{'they are in memory' if samples is None else 'none of those tried can be read'}. Give a number, as in "
            "-image_size 32."
        )
    patch = config.MODEL.PATCH_SIZE
    step = 8 if patch == AUTO else patch or 16
    size = min((size for size in SIZES if size % step == 0), key=lambda size: abs(size - side), default=step)
    note = f"{IMAGE_SIZE} {size}: the median image of {name} has {side} pixels (shorter side)"
    if side > SIZES[-1]:
        note += f". auto chooses at most {size}; -image_size N shows the model more detail, but takes more time"
    return loaded.with_values({IMAGE_SIZE: Entry(size, f"median image of {name}")}, [note])


def with_patch_size(loaded: Loaded) -> Loaded:
    config, size = loaded.config, loaded.config.DATA.IMAGE_SIZE
    if config.MODEL.PATCH_SIZE != AUTO:
        return loaded
    fitting = [patch for patch in PATCHES if size % patch == 0]
    if not fitting:
        raise UserError(
            f"{loaded.sources[PATCH_SIZE]}: {PATCH_SIZE} auto: no patch of {PATCHES[0]} to {PATCHES[-1]} pixels "
            f"divides {IMAGE_SIZE} {size}. Use a multiple of 8, such as -image_size {(size + 7) // 8 * 8}."
        )
    patch = min(fitting, key=lambda patch: abs(size / patch - PATCHES_PER_ROW))
    note = f"{PATCH_SIZE} {patch}: {size // patch} x {size // patch} patches of an image of {size} x {size}"
    return loaded.with_values({PATCH_SIZE: Entry(patch, f"{IMAGE_SIZE} {size}")}, [note])
