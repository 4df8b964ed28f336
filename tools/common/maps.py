"""Lays maps of where a trained model looks (vitamp/explain.py) over pictures, for predict.py and the report."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datasets.base import shades_of_mean
from engine.trained.model import Trained
from vitamp.bands import picture_of_bands
from vitamp.explain import maps_of
from vitamp.metrics import ONE_LABEL

LONGER_SIDE = 448
"""Pixels of a picture with a map"""
STRONGEST = 0.8
"""Opacity of the colour where a map is 1"""


def trained_maps(trained: Trained, pixels: Tensor, labels: Sequence[int], batch: int) -> Tensor:
    """Compute the maps of an image for `labels`: labels x H x W.

    `pixels`: the image as in a batch, C x H x W. `batch`: most images at once.
    """
    data = trained.config.DATA
    mean = torch.tensor(shades_of_mean(data), device=pixels.device)[:, None, None]
    one_label = trained.task.kind == ONE_LABEL
    return maps_of(trained.logits, pixels, labels, mean, one_label, batch)


def laid_over(pixels: Tensor, one_map: Tensor) -> Image.Image:
    """Lay a map over an image as the model sees it (C x H x W): the image is grey, and the map red to yellow."""
    colours = np.zeros((*one_map.shape, 4))
    colours[:, :, 0] = 1
    colours[:, :, 1] = one_map
    colours[:, :, 3] = STRONGEST * one_map
    heat = Image.fromarray((255 * colours).astype(np.uint8))
    picture = picture_of_bands(pixels.cpu().permute(1, 2, 0).numpy()).convert("L").convert("RGBA")
    factor = LONGER_SIDE / max(picture.size)
    size = (round(picture.width * factor), round(picture.height * factor))
    return Image.alpha_composite(picture.resize(size), heat.resize(size)).convert("RGB")
