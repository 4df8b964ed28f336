"""Resizing of uint8 pixels with anti-aliasing: by torch, whose vectorised kernels match PIL's, or by PIL."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from datasets.transforms.crops import View

Resize = Callable[[np.ndarray, View, np.ndarray | None], np.ndarray]
"""(pixels of the view's box: height x width x channels, the view, output array) -> rows x columns x channels

The result is the output array if resizing can write into it, else a new array.
"""


class TorchResize:
    """Resizes with torch, directly on uint8."""

    def __init__(self, interpolation: str) -> None:
        # torch.nn.functional.interpolate accepts no size together with a scale, and no output tensor.
        self.kernel = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out
        self.by_pil = PilResize(interpolation)
        self.interpolation = interpolation
        # Raw pixels are read-only, which is fine here. torch warns of such arrays once per process: use that up now.
        with warnings.catch_warnings(action="ignore"):
            torch.from_numpy(np.frombuffer(b"read only", dtype=np.uint8))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the kernel, which cannot be pickled: spawned loading processes look it up themselves."""
        return TorchResize, (self.interpolation,)

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        # The kernel has no offset: pixels left of and above the view are resized too, and then cut off.
        left, top = round((view.left - view.box.left) / view.across), round((view.top - view.box.top) / view.down)
        if left > view.columns or top > view.rows:
            return self.by_pil(pixels, view)  # such a long strip that most of the work would be cut off
        shape = (top + view.rows, left + view.columns, pixels.shape[2])
        scales = zip(shape, pixels.shape, (view.down, view.across), strict=False)
        if any(made == stored and scale != 1 for made, stored, scale in scales):
            return self.by_pil(pixels, view)  # the kernel ignores the scale of an axis whose length does not change
        made = place if place is not None and place.shape == shape else np.empty(shape, dtype=np.uint8)
        # Channels-last, in and out, as the kernel works; planes would cost a slow conversion.
        source, out = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, made))
        self.kernel(source, shape[:2], False, 1 / view.down, 1 / view.across, out=out)
        return made if made is place else made[top:, left:]


class PilResize:
    """Resizes with PIL: slower, and the reference for TorchResize."""

    def __init__(self, interpolation: str) -> None:
        self.filter = Image.Resampling[interpolation.upper()]

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        left, top = view.left - view.box.left, view.top - view.box.top
        right, bottom = left + view.columns * view.across, top + view.rows * view.down
        height, width, channels = pixels.shape
        within = (left, top, min(right, width), min(bottom, height))  # rounding can exceed the image by a tiny bit
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        small = image.resize((view.columns, view.rows), self.filter, box=within)
        return np.asarray(small).reshape(view.rows, view.columns, channels)
