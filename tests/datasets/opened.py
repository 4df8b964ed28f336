"""Helpers that open data sets and look into them."""

import numpy as np
import torch

from datasets import check_dataset, open_dataset
from datasets.base import ImageDataset, Samples
from datasets.images import Images
from utils.config.data import DataConfig

CPU = torch.device("cpu")


def settings(**values: object) -> DataConfig:
    """Small images, and the settings of the test."""
    return DataConfig.model_validate({"IMAGE_SIZE": 8, "BATCH_SIZE": 4, **values})


def of_shards(place: object, **more: object) -> DataConfig:
    return settings(DATASET="shards", DATA_PATH=str(place), **more)


def of_hub(place: object, **more: object) -> DataConfig:
    return settings(DATASET=f"hf:{place}", **more)


def part(data: DataConfig, train: bool = True, num_classes: int = 3) -> Samples:
    """One split, after the check before a run."""
    check_dataset(data, num_classes)
    dataset = open_dataset(data, train, num_classes, 0, CPU)
    assert isinstance(dataset, Images)
    return dataset.samples


def content(samples: Samples) -> list[bytes | np.ndarray]:
    return [samples.read(k) for k in range(len(samples))]


def pixels(dataset: ImageDataset, *indices: int) -> torch.Tensor:
    return dataset.__getitems__([(1, index) for index in indices]).images
