"""Whole loaders: batches of bytes as they arrive in the process that trains, from any number of loading processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from timm.data.loader import create_loader

from datasets import EpochOrder, TrainLoader
from datasets.images import Images
from tools.benchmark_data.paths import PerSample, timm_transform
from tools.common.turns import OURS, TIMM, Contender
from utils.config.train import TrainConfig


def loader_name(name: str, workers: int) -> str:
    return f"{name}, {workers} worker{'s' * (workers != 1)}"


@contextmanager
def loaders(
    images: Images, order: np.ndarray, changes: TrainConfig, batch: int, counts: tuple[int, ...]
) -> Iterator[list[Contender]]:
    """Ours and timm's, for each number of loading processes. These stay, and sleep while others are measured."""
    opened: list[TrainLoader] = []
    contenders: list[Contender] = []
    try:
        for workers in counts:
            opened.append(_ours(images, order, batch, workers))
            contenders.append(_going_through(loader_name(OURS, workers), order, opened[-1]))
            contenders.append(
                _emptying(loader_name(TIMM, workers), order, _timms(images, order, changes, batch, workers))
            )
        yield contenders
    finally:
        for loader in opened:
            loader.close()


def _ours(images: Images, order: np.ndarray, batch: int, workers: int) -> TrainLoader:
    epochs = EpochOrder(
        len(order), batch, 1, 0, 1, images.seed, drop_last=True, shuffled=lambda generator: generator.permutation(order)
    )
    return TrainLoader(images, epochs, images.seed, workers, torch.device("cpu"))


def _going_through(name: str, order: np.ndarray, loader: TrainLoader) -> Contender:
    def work(nth: int, _: list[int]) -> None:
        for window in loader.epoch(nth):
            for _share, _batch in window:
                pass

    return Contender(name, order, work)


def _timms(images: Images, order: np.ndarray, changes: TrainConfig, batch: int, workers: int) -> Any:
    """timm's loader up to where its bytes would be normalised: the DataLoader inside its PrefetchLoader."""
    transform = timm_transform(images.data, True, changes)
    dataset: Any = PerSample(images.samples, transform, order)
    loader: Any = create_loader(
        dataset,
        images.data.IMAGE_SIZE,
        batch,
        is_training=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
    )
    # create_loader puts a transform of its own making there; this one has the settings that all have here.
    dataset.transform = transform
    return loader.loader


def _emptying(name: str, order: np.ndarray, loader: Any) -> Contender:
    def work(_nth: int, _samples: list[int]) -> None:
        for _ in loader:
            pass

    return Contender(name, order, work)
