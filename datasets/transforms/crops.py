"""What transforms of one image and of a whole batch share: sizes, padding, and affine transforms."""

from __future__ import annotations

import math

import numpy as np
import torch

from utils.config.data import DataConfig

PAD = 4
"""Width of the black border of DATA.CROP: pad, in pixels, as is usual for CIFAR"""


def resized_size(data: DataConfig, width: int, height: int) -> tuple[int, int]:
    """Width and height to which validation resizes an image before it takes the centre, by DATA.CROP_MODE."""
    side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
    if data.CROP_MODE == "squash":
        return side, side
    if data.CROP_MODE == "border":
        ratio = max(width, height) / side
        return max(1, round(width / ratio)), max(1, round(height / ratio))
    if width <= height:
        return side, int(side * height / width)
    return int(side * width / height), side


class BatchAffine:
    """Affine transform of a whole batch at once, with each sample's own random numbers."""

    COLUMNS = 5

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self.data = data
        self.size = data.IMAGE_SIZE
        centres = (torch.arange(self.size, dtype=torch.float32, device=device) * 2 + 1) / self.size - 1
        self.x, self.y = centres[None, None, :], centres[None, :, None]

    def matrices(self, uniform: np.ndarray) -> torch.Tensor:
        """Rows of five uniform numbers -> rows (a, b, c, d, e, f), which map an output pixel (x, y) to its source."""
        data = self.data
        acts = uniform[:, 0] < data.AFFINE_PROB
        shift_x, shift_y, zoom, angle = (np.where(acts, 2 * column - 1, 0.0) for column in uniform[:, 1:].T)
        shift_x, shift_y = 2 * data.SHIFT * shift_x, 2 * data.SHIFT * shift_y
        zoom, angle = 1 + data.ZOOM * zoom, np.deg2rad(data.ROTATE * angle)
        a, b = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = np.stack([a, b, -a * shift_x - b * shift_y, -b, a, b * shift_x - a * shift_y], axis=1)
        return torch.from_numpy(rows.astype(np.float32))

    def __call__(self, images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Transform images (uint8, B x C x S x S); both arguments are on the device."""
        # Elementwise products: the rounding of affine_grid's matrix product can depend on the batch size.
        a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
        grid = torch.stack([a * self.x + b * self.y + c, d * self.x + e * self.y + f], dim=-1)
        moved = torch.nn.functional.grid_sample(images.float(), grid, mode="bilinear", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)
