"""Shows where a model looks: parts of the image are hidden, and the places without which its score falls are bright.

Gradients would need one pass in place of 50, but find few of the markers that a ViT looks at (bench/explain.py).
"""

from __future__ import annotations

import math
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
"""Rows and columns of cells of a map"""
SQUARE = 2
"""Cells along each side of a hidden square; squares overlap"""
LEAST_FALL = math.log(2)
"""Fall of a score from which on a map is bright: the odds halve"""


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
        scores = model(pixels[None])[0]
        if label is None:
            label = int(scores.argmax())
        if not 0 <= label < len(scores):
            raise ValueError(f"label={label}: the model has {len(scores)} classes, from 0 on")
        mean = pixels.new_zeros(len(pixels), 1, 1)
        maps = maps_of(model, pixels, [label], mean, not origin.several_labels, batch=GRID)
    return resize.undone(maps, width=stored.shape[-1], height=stored.shape[-2])[0].numpy()


def maps_of(
    logits_of: Callable[[Tensor], Tensor],
    pixels: Tensor,
    labels: Sequence[int],
    mean: Tensor,
    one_label: bool,
    batch: int,
) -> Tensor:
    """Compute a map of each label for one image: labels x H x W, from 0 to 1.

    The score of a label is the logarithm of its odds. A map is how much it falls when a place is hidden, relative to
    the largest fall. It stays dark if no place is needed: if the odds do not even halve without any.

    logits_of: computes the logits of images
    pixels: the image as `logits_of` takes it, C x H x W
    mean: mean colour, C x 1 x 1
    one_label: whether an image has one label, so that the probabilities are a softmax of the logits
    batch: most images at once
    """
    height, width = pixels.shape[-2:]
    # Blurred, so that neither colour nor texture stays, and inverted, because a grey square may look like a class.
    cells = functional.adaptive_avg_pool2d(pixels.float()[None], GRID)
    hidden = 2 * mean - functional.interpolate(cells, size=(height, width), mode="bilinear")[0]
    if pixels.dtype == torch.uint8:
        hidden = hidden.clamp(0, 255)
    hidden = hidden.to(pixels)

    squares = _hidden_lines(height)[:, None, None, :, None] & _hidden_lines(width)[:, None, None, :]
    logits = [logits_of(pixels[None])]
    for some in squares.flatten(0, 1).to(pixels.device).split(batch):
        logits.append(logits_of(torch.where(some, hidden, pixels)))
    all_logits = torch.cat(logits).cpu().double()

    falls = []
    for label in labels:
        score = all_logits[:, label]
        if one_label:
            others = all_logits.clone()
            others[:, label] = -torch.inf
            score = score - others.logsumexp(1)
        falls.append((score[0] - score[1:]).nan_to_num().clamp(min=0).reshape(1, *squares.shape[:2]))
    # A cell has the mean of all squares that hide it: fewer at the borders.
    cells = functional.avg_pool2d(torch.stack(falls), SQUARE, 1, SQUARE - 1, count_include_pad=False)
    maps = functional.interpolate(cells, size=(height, width), mode="bilinear")[:, 0]
    return (maps / maps.amax((1, 2), keepdim=True).clamp(min=LEAST_FALL)).float()


def _hidden_lines(length: int) -> Tensor:
    """Whether each of `length` lines of pixels is hidden by each row of squares: rows x length."""
    cell = (torch.arange(length) + 0.5) * GRID / length
    first = torch.arange(GRID - SQUARE + 1)[:, None]
    return (cell >= first) & (cell < first + SQUARE)
