"""Resizing uint8 pixels with anti-aliasing: by torch, whose vectorised kernels agree with PIL's, or by PIL itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from .crops import View

Resize = Callable[[np.ndarray, View], np.ndarray]
"""(pixels of the view's box: height x width x channels, the view) -> the square, size x size x channels"""


class TorchResize:
    """By torch, straight on uint8."""

    def __init__(self, interpolation: str) -> None:
        # torch.nn.functional.interpolate takes no size together with a scale, and cannot be told where to write.
        self.kernel = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out
        self.by_pil = PilResize(interpolation)
        self.interpolation = interpolation

    def __reduce__(self) -> tuple[object, ...]:
        """The kernel cannot be sent to loading processes that are not forked; they look it up themselves."""
        return TorchResize, (self.interpolation,)

    def __call__(self, pixels: np.ndarray, view: View) -> np.ndarray:
        # The kernel knows no offset: what lies before the square is made along with it, and then cut off.
        left, top = round((view.left - view.box.left) / view.across), round((view.top - view.box.top) / view.down)
        size = view.size
        if max(left, top) > size:
            return self.by_pil(pixels, view)  # a strip so long that most of the work would be thrown away
        if not pixels.flags.writeable:
            pixels = pixels.copy()  # torch has no tensors that cannot be written, and would warn
        source = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        # Stored pixel by pixel, in and out, as the kernel works; asked for plane by plane it would add a slow pass.
        out = torch.empty(
            (1, source.shape[1], top + size, left + size), dtype=torch.uint8, memory_format=torch.channels_last
        )
        self.kernel(source, out.shape[2:], False, 1 / view.down, 1 / view.across, out=out)
        return out[0].permute(1, 2, 0).numpy()[top:, left:]


class PilResize:
    """By PIL: slower, and what the other one is compared to."""

    def __init__(self, interpolation: str) -> None:
        self.filter = Image.Resampling[interpolation.upper()]

    def __call__(self, pixels: np.ndarray, view: View) -> np.ndarray:
        left, top = view.left - view.box.left, view.top - view.box.top
        right, bottom = left + view.size * view.across, top + view.size * view.down
        height, width, channels = pixels.shape
        within = (left, top, min(right, width), min(bottom, height))  # rounding may lead a hair's breadth beyond
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        small = image.resize((view.size, view.size), self.filter, box=within)
        return np.asarray(small).reshape(view.size, view.size, channels)
