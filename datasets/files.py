"""Images that lie in files: what list files and class folders have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch.utils.data import get_worker_info

from utils.config.schema import DataConfig, TrainConfig
from utils.errors import TrainingError, UserError
from utils.seeding import host_generators_kept

from .base import PADDING, Batch, ImageDataset, Key
from .randomness import seed_sample
from .transforms import decode, training_transform, validation_transform


class PathTable:
    """Paths in one block of bytes. A million strings would be copied into every worker as soon as it reads them."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._block = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        begin, end = self._ends[index : index + 2]
        return os.fsdecode(self._block[begin:end])


class ImageFiles(ImageDataset):
    """One part of a data set of image files."""

    def __init__(
        self,
        root: Path,
        paths: PathTable,
        labels: np.ndarray,
        classes: list[str] | None,
        data: DataConfig,
        train: bool,
        seed: int,
    ) -> None:
        self.root, self.paths, self.labels, self.classes = root, paths, labels, classes
        self.data, self.seed, self.train = data, seed, train
        self.channels, self.size = data.IMAGE_CHANNELS, data.IMAGE_SIZE
        self.transform = training_transform(data) if train else validation_transform(data)

    def augment(self, train: TrainConfig) -> None:
        self.transform = training_transform(self.data, train)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: list[Key]) -> Batch:
        if get_worker_info() is not None:
            return self._load(keys)
        with host_generators_kept():
            return self._load(keys)

    def _load(self, keys: list[Key]) -> Batch:
        images = torch.zeros(len(keys), self.channels, self.size, self.size, dtype=torch.uint8)
        labels = torch.zeros(len(keys), dtype=torch.int64)
        for row, (epoch, index) in enumerate(keys):
            if index == PADDING:
                continue
            image = self._decode(index)
            if self.train:
                seed_sample(self.seed, epoch, index)
            images[row] = self.transform(image)
            labels[row] = int(self.labels[index])
        return Batch(images, labels, torch.tensor([index for _, index in keys]))

    def _decode(self, index: int) -> Image:
        path = self.root / self.paths[index]
        try:
            return decode(str(path), self.channels)
        except FileNotFoundError:
            raise TrainingError(f"The image {path} (sample {index}) does not exist.") from None
        except Exception as error:  # a damaged file can raise nearly anything in its decoder
            reason = str(error).replace(str(path), "it") or type(error).__name__
            raise TrainingError(
                f"The image {path} (sample {index}) cannot be read: {reason}. Replace it or leave it out."
            ) from None


def data_folder(data: DataConfig) -> Path:
    """DATA_PATH as a folder that exists."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET {data.DATASET} needs DATA.DATA_PATH (-data_path): the folder its images lie in.")
    folder = Path(data.DATA_PATH).expanduser()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {what}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} may not be read by this user.")
    return folder
