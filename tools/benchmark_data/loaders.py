"""Whole loaders: uint8 batches as they arrive in the training process, with any number of loading processes."""

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
from tools.benchmark_data.rates import OURS, TIMM, Contender
from utils.config.train import TrainConfig
from utils.text import counted


def loader_name(name: str, workers: int) -> str:
    return f"{name}, {counted(workers, 'worker')}"


@contextmanager
def loaders(
    images: Images, order: np.ndarray, changes: TrainConfig, batch: int, counts: tuple[int, ...]
) -> Iterator[list[Contender]]:
    """Our loader and timm's, for each number of workers. Workers stay alive, and idle while others are measured."""
    opened: list[TrainLoader] = []
    contenders: list[Contender] = []
    try:
        for workers in counts:
            opened.append(_our_loader(images, order, batch, workers))
            contenders.append(_our_contender(loader_name(OURS, workers), order, opened[-1]))
            timm_loader = _timm_loader(images, order, changes, batch, workers)
            contenders.append(_timm_contender(loader_name(TIMM, workers), order, timm_loader))
        yield contenders
    finally:
        for loader in opened:
            loader.close()


def _our_loader(images: Images, order: np.ndarray, batch: int, workers: int) -> TrainLoader:
    epochs = EpochOrder(
        len(order), batch, 1, 0, 1, images.seed, drop_last=True, shuffled=lambda generator: generator.permutation(order)
    )
    return TrainLoader(images, epochs, images.seed, workers, torch.device("cpu"))


def _our_contender(name: str, order: np.ndarray, loader: TrainLoader) -> Contender:
    def work(nth: int, _: list[int]) -> None:
        for window in loader.epoch(nth):
            for _share, _batch in window:
                pass

    return Contender(name, order, work)


def _timm_loader(images: Images, order: np.ndarray, changes: TrainConfig, batch: int, workers: int) -> Any:
    """timm's loader without normalisation: the DataLoader inside its PrefetchLoader."""
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
    # create_loader has set a transform of its own; this one has the settings of all contenders.
    dataset.transform = transform
    return loader.loader


def _timm_contender(name: str, order: np.ndarray, loader: Any) -> Contender:
    def work(_nth: int, _samples: list[int]) -> None:
        for _ in loader:
            pass

    return Contender(name, order, work)
