"""Shows where a model looks: parts of the image are hidden, and the places without which its score falls are bright.

Gradients would need one pass in place of 65, but fit only some models, and find fewer markers (bench/explain.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

GRID = 8
"""Rows and columns of the places that are hidden one after another"""
REACH = 1
"""Distance from the middle of a hidden square to its sides, in rows of the grid"""


def explained(model: nn.Module, transform: Any, image: Any, label: int | None) -> np.ndarray:
    """Compute the map of an image for `Loaded.explain`, which describes the parameters."""
    origin: Any = model.vitamp
    *reading, resize, normalise = transform.transforms
    is_photograph = any(isinstance(step, v2.PILToTensor) for step in reading)
    if is_photograph and isinstance(image, str | os.PathLike):
        image = Image.open(image)
    elif is_photograph and not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    elif isinstance(image, Image.Image) and not is_photograph:
        image = np.asarray(image)
    stored = v2.Compose(reading)(image)
    pixels = normalise(resize(stored)).to(next(model.parameters()))

    with torch.no_grad():
        if label is None:
            label = int(model(pixels[None]).argmax())
        mean_colour = pixels.new_zeros(len(pixels), 1, 1)
        maps = maps_of(model, pixels, [label], mean_colour, not origin.several_labels, batch=GRID)
    return resize.undone(maps, width=stored.shape[-1], height=stored.shape[-2])[0].numpy()


def maps_of(
    logits_of: Callable[[Tensor], Tensor],
    pixels: Tensor,
    labels: Sequence[int],
    hidden: Tensor,
    one_label: bool,
    batch: int,
) -> Tensor:
    """Compute a map of each label for one image: labels x H x W, from 0 to 1, all 0 where no place speaks for it.

    The score of a label is the logarithm of its odds. A map is how much it falls, relative to the largest fall.

    logits_of: computes the logits of images
    pixels: the image as `logits_of` takes it, C x H x W
    hidden: colour of what is hidden, C x 1 x 1
    one_label: whether an image has one label, so that the probabilities are a softmax of the logits
    batch: most images at once
    """
    height, width = pixels.shape[-2:]
    squares = _hidden_lines(height)[:, None, :, None] & _hidden_lines(width)[None, :, None, :]
    logits = [logits_of(pixels[None])]
    for some in squares.reshape(GRID * GRID, 1, height, width).to(pixels.device).split(batch):
        logits.append(logits_of(torch.where(some, hidden, pixels)))
    all_logits = torch.cat(logits).double().cpu()

    falls = []
    for label in labels:
        score = all_logits[:, label]
        if one_label:
            others = all_logits.clone()
            others[:, label] = -torch.inf
            score = score - others.logsumexp(1)
        falls.append((score[0] - score[1:]).nan_to_num().clamp(min=0).reshape(GRID, GRID))
    maps = functional.interpolate(torch.stack(falls)[:, None], size=(height, width), mode="bilinear")[:, 0]
    return (maps / maps.amax((1, 2), keepdim=True).clamp(min=1e-9)).float()


def _hidden_lines(length: int) -> Tensor:
    """Whether each of `length` lines of pixels is hidden at each row of the grid: GRID x length."""
    place = (torch.arange(length) + 0.5) * GRID / length
    middle = torch.arange(GRID) + 0.5
    return (place[None] - middle[:, None]).abs() <= REACH
