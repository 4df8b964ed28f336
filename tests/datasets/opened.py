"""Helpers that open data sets and look into them."""

from __future__ import annotations

import torch

from datasets import open_dataset
from datasets.base import ImageDataset, Samples
from datasets.images import Images
from utils.config.data import DataConfig


def part(data: DataConfig, train: bool = True, num_classes: int = 3) -> Samples:
    dataset = open_dataset(data, train, num_classes, 0, torch.device("cpu"))
    assert isinstance(dataset, Images)
    return dataset.samples


def pixels(dataset: ImageDataset, *indices: int) -> torch.Tensor:
    return dataset.__getitems__([(1, index) for index in indices]).images
