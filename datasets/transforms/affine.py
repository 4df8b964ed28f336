"""Moving images about: shift, zoom and rotation, of one image or of a whole batch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torchvision.transforms import InterpolationMode, v2

from datasets.transforms.augment import ImageChange
from utils.config.data import DataConfig
from utils.errors import UserError


def affine_changes(data: DataConfig) -> list[ImageChange]:
    """Shift, zoom and rotation of one image, where asked for."""
    if not moves(data):
        return []
    affine = v2.RandomAffine(
        degrees=(-data.ROTATE, data.ROTATE),
        translate=(data.SHIFT, data.SHIFT),
        scale=(1 - data.ZOOM, 1 + data.ZOOM),
        interpolation=InterpolationMode.BILINEAR,
    )
    return [v2.RandomApply([affine], p=data.AFFINE_PROB)]


def moves(data: DataConfig) -> bool:
    """Whether SHIFT, ZOOM or ROTATE ever act."""
    return data.AFFINE_PROB > 0 and (data.SHIFT > 0 or data.ZOOM > 0 or data.ROTATE > 0)


def check_ranges(data: DataConfig) -> None:
    """CROP_SCALE and CROP_RATIO must be (least, greatest), or the crop would be something else than asked for."""
    for name, (least, greatest), top in (
        ("CROP_SCALE", data.CROP_SCALE, 1.0),
        ("CROP_RATIO", data.CROP_RATIO, math.inf),
    ):
        if not 0 < least <= greatest <= top:
            wanted = "0 < least <= greatest" + (" <= 1" if top == 1 else "")
            raise UserError(f"DATA.{name} is ({least:g}, {greatest:g}); it needs {wanted}, as in (0.08, 1.0).")


class BatchAffine:
    """Shift, zoom and rotation of a whole batch at once, each sample with its own numbers."""

    COLUMNS = 5

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self.data = data
        self.size = data.IMAGE_SIZE
        centres = (torch.arange(self.size, dtype=torch.float32, device=device) * 2 + 1) / self.size - 1
        self.x, self.y = centres[None, None, :], centres[None, :, None]

    def matrices(self, uniform: np.ndarray) -> torch.Tensor:
        """Rows of five numbers in 0..1 -> rows (a, b, c, d, e, f): where each output pixel (x, y) is taken from."""
        data = self.data
        acts = uniform[:, 0] < data.AFFINE_PROB
        shift_x, shift_y, zoom, angle = (np.where(acts, 2 * column - 1, 0.0) for column in uniform[:, 1:].T)
        shift_x, shift_y = 2 * data.SHIFT * shift_x, 2 * data.SHIFT * shift_y
        zoom, angle = 1 + data.ZOOM * zoom, np.deg2rad(data.ROTATE * angle)
        a, b = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = np.stack([a, b, -a * shift_x - b * shift_y, -b, a, b * shift_x - a * shift_y], axis=1)
        return torch.from_numpy(rows.astype(np.float32))

    def __call__(self, images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Both on the device; images uint8 B x C x S x S."""
        # Plain products instead of affine_grid's matrix product, whose rounding may depend on the batch's size.
        a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
        grid = torch.stack([a * self.x + b * self.y + c, d * self.x + e * self.y + f], dim=-1)
        moved = torch.nn.functional.grid_sample(images.float(), grid, mode="bilinear", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)
