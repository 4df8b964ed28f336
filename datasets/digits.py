"""`digits`: 1,797 handwritten digits, 8 x 8 and grey, that come with scikit-learn: real data without a download.

Crop and flip do not apply to them: an 8 x 8 digit has no margin to crop, and a mirrored digit is another one or none.
SHIFT, ZOOM and ROTATE do apply.
"""

from __future__ import annotations

import gzip
import importlib.util
import logging
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from utils.config.schema import DataConfig
from utils.errors import UserError

from .base import PADDING, Batch, ImageDataset, Key, Source
from .labels import check_class_count, tell_spare_classes
from .randomness import sample_table
from .split import split
from .transforms import BatchAffine, moves

CLASSES = [str(digit) for digit in range(10)]
SIDE = 8
BRIGHTEST = 16
VALIDATION_SHARE = 0.2

log = logging.getLogger("vitamp")


class Digits(ImageDataset):
    """One part of the digits, held on the device."""

    classes = CLASSES
    in_memory = True

    def __init__(self, data: DataConfig, train: bool, seed: int, device: torch.device) -> None:
        pixels, labels = read_digits()
        chosen = split(labels, VALIDATION_SHARE, 0, "digits")[0 if train else 1]
        images = torch.from_numpy(pixels[chosen])[:, None]
        if data.IMAGE_SIZE != SIDE:
            mode = InterpolationMode(data.INTERPOLATION)
            images = functional.resize(images, [data.IMAGE_SIZE, data.IMAGE_SIZE], mode, antialias=True)
        self.images = images.to(device)
        self.labels = torch.from_numpy(labels[chosen]).to(device)
        self.channels, self.seed, self.device = data.IMAGE_CHANNELS, seed, device
        self.affine = BatchAffine(data, device) if train and moves(data) else None
        self._matrices: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        real = indices != PADDING
        chosen = indices.clamp(min=0)
        images = self.images[chosen]
        if self.affine is not None:
            images = self.affine(images, self._epoch_matrices(self.affine, keys[0][0])[chosen])
        images = images * real[:, None, None, None]
        return Batch(images.expand(-1, self.channels, -1, -1).contiguous(), self.labels[chosen] * real, indices)

    def _epoch_matrices(self, affine: BatchAffine, epoch: int) -> torch.Tensor:
        if self._matrices is None or self._matrices[0] != epoch:
            uniform = sample_table(self.seed, epoch, len(self), BatchAffine.COLUMNS)
            self._matrices = epoch, affine.matrices(uniform).to(self.device, non_blocking=True)
        return self._matrices[1]


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797 x 8 x 8, uint8, 0..255) and labels from scikit-learn's file, without importing scikit-learn."""
    with gzip.open(_file(), "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",")
    pixels = np.rint(table[:, :-1] * (255 / BRIGHTEST)).astype(np.uint8)
    return pixels.reshape(-1, SIDE, SIDE), table[:, -1].astype(np.int64)


def _file() -> Path:
    spec = importlib.util.find_spec("sklearn")
    folders = spec.submodule_search_locations if spec else None
    file = Path(folders[0]) / "datasets" / "data" / "digits.csv.gz" if folders else None
    if file is None or not file.is_file():
        where = f"its file {file} is missing" if file else "the package is not installed"
        raise UserError(f"DATA.DATASET digits reads a file of scikit-learn: {where}. Run: pip install scikit-learn")
    return file


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Digits:
    check_class_count(len(CLASSES), num_classes, "The data set digits")
    return Digits(data, train, seed, device)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:  # noqa: ARG001 - both parts lie in one file
    _file()
    check_class_count(len(CLASSES), num_classes, "The data set digits")
    tell_spare_classes(len(CLASSES), num_classes, "The data set digits")
    if data.DATA_PATH is not None:
        log.info("DATA.DATA_PATH is not used: the data set digits comes with scikit-learn.")


SOURCE = Source(_open, _check)
