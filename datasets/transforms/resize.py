"""Resizing uint8 pixels with anti-aliasing: by torch, whose vectorised kernels agree with PIL's, or by PIL itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from datasets.transforms.crops import View

Resize = Callable[[np.ndarray, View, np.ndarray | None], np.ndarray]
"""(pixels of the view's box: height x width x channels, the view, a place for the square) -> the square

The square is size x size x channels. It is made in the place it was given where that can be, and elsewhere if not.
"""


class TorchResize:
    """By torch, straight on uint8."""

    def __init__(self, interpolation: str) -> None:
        # torch.nn.functional.interpolate takes no size together with a scale, and cannot be told where to write.
        self.kernel = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out
        self.by_pil = PilResize(interpolation)
        self.interpolation = interpolation
        # Stored pixels can only be read, and so they are. torch warns of such arrays, once in a process: that is now.
        with warnings.catch_warnings(action="ignore"):
            torch.from_numpy(np.frombuffer(b"read only", dtype=np.uint8))

    def __reduce__(self) -> tuple[object, ...]:
        """The kernel cannot be sent to loading processes that are not forked; they look it up themselves."""
        return TorchResize, (self.interpolation,)

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        # The kernel knows no offset: what lies before the square is made along with it, and then cut off.
        left, top = round((view.left - view.box.left) / view.across), round((view.top - view.box.top) / view.down)
        size = view.size
        if max(left, top) > size:
            return self.by_pil(pixels, view)  # a strip so long that most of the work would be thrown away
        shape = (top + size, left + size, pixels.shape[2])
        scales = zip(shape, pixels.shape, (view.down, view.across), strict=False)
        if any(made == stored and scale != 1 for made, stored, scale in scales):
            return self.by_pil(pixels, view)  # the kernel takes an axis of the same length for one of the same scale
        made = place if place is not None and place.shape == shape else np.empty(shape, dtype=np.uint8)
        # Stored pixel by pixel, in and out, as the kernel works; asked for plane by plane it would add a slow pass.
        source, out = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, made))
        self.kernel(source, shape[:2], False, 1 / view.down, 1 / view.across, out=out)
        return made if made is place else made[top:, left:]


class PilResize:
    """By PIL: slower, and what the other one is compared to."""

    def __init__(self, interpolation: str) -> None:
        self.filter = Image.Resampling[interpolation.upper()]

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:  # noqa: ARG002 - PIL cannot be told where
        left, top = view.left - view.box.left, view.top - view.box.top
        right, bottom = left + view.size * view.across, top + view.size * view.down
        height, width, channels = pixels.shape
        within = (left, top, min(right, width), min(bottom, height))  # rounding may lead a hair's breadth beyond
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        small = image.resize((view.size, view.size), self.filter, box=within)
        return np.asarray(small).reshape(view.size, view.size, channels)
