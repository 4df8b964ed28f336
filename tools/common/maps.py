"""Lays maps of where a trained model looks (vitamp/explain.py) over pictures, for predict.py and the report."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset
from datasets.base import shades_of_mean
from datasets.decoding import Reader
from engine.inputs.batches import input_of
from engine.trained.model import Trained, picture_of
from vitamp.bands import picture_of_bands
from vitamp.explain import heat, maps_of
from vitamp.metrics import ONE_LABEL
from vitamp.timm_model import transform_of

SMALLEST = 256
"""Pixels to whose longer side smaller pictures are enlarged"""
LARGEST = 1024
"""Pixels to whose longer side larger pictures are reduced"""


def trained_maps(trained: Trained, pixels: Tensor, labels: Sequence[int]) -> Tensor:
    """Compute the maps of an image for `labels`: labels x H x W. `pixels`: as in a batch, C x H x W."""
    data = trained.config.DATA
    mean_colour = torch.tensor(shades_of_mean(data)).to(pixels)[:, None, None]
    one_label = trained.task.kind == ONE_LABEL
    return maps_of(trained.logits, pixels, labels, mean_colour, one_label, batch=data.val_batch)


def pictures_with_maps(
    trained: Trained, dataset: ImageDataset, index: int, pixels: Tensor, labels: Sequence[int]
) -> list[Image.Image]:
    """Return the whole picture of an image once per label, with the label's map laid over it.

    `index`: of the image in the data set. `pixels`: the image as in a batch, C x H x W.
    """
    data = trained.config.DATA
    maps = trained_maps(trained, pixels, labels)
    samples = dataset.single_images()
    if samples is None:
        picture = picture_of(dataset, index)
    else:
        picture = picture_of_bands(Reader(data).whole(samples.read(index)))
    longest = max(picture.size)
    factor = min(max(longest, SMALLEST), LARGEST) / longest
    width = max(1, round(picture.width * factor))
    height = max(1, round(picture.height * factor))
    picture = picture.resize((width, height)).convert("RGBA")
    if samples is not None:
        resizing: Any = transform_of(input_of(data)).transforms[-2]  # before normalising
        maps = resizing.undone(maps, width, height)
    pictures = []
    for one_map in maps.numpy():
        colours = heat(one_map).resize((width, height), Image.Resampling.BILINEAR)
        pictures.append(Image.alpha_composite(picture, colours).convert("RGB"))
    return pictures
