"""Time of our path by stage: read, decode, crop and resize, augment, collate, transfer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from datasets.base import Encoded, seed_sample
from datasets.images import Images
from datasets.transforms.pixels import Pixels
from tools.benchmark_data.paths import InMemory, ours
from tools.benchmark_data.rates import Contender, Rates
from utils.config.train import TrainConfig

READ, DECODE, CROP, CHANGE, WHOLE = "read", "decode", "crop and resize", "augment", "collate"
"""Names of the stages, and of the parts of the path that end with them."""
TRANSFERS = 20


def stage_runs(images: Images, order: np.ndarray, changes: TrainConfig, batch: int) -> list[Contender]:
    """Parts of the path, each one stage longer. A stage is the difference of two, so its inside needs no timer."""
    plain, changed = Pixels(images.data, True), Pixels(images.data, True, changes)
    size, channels = images.data.IMAGE_SIZE, images.data.IMAGE_CHANNELS
    out = torch.zeros(channels, size, size, dtype=torch.uint8)
    runs = [
        Contender(READ, order, lambda _, indices: [images.samples.read(index) for index in indices]),
        _from_memory(DECODE, images, order, plain.decode),
        _from_memory(CROP, images, order, lambda encoded: plain(encoded, out)),
        ours(WHOLE, images, order, batch),
    ]
    if changes.single_image_keys:
        runs.append(_from_memory(CHANGE, images, order, lambda encoded: changed(encoded, out)))
    return runs


def _from_memory(name: str, images: Images, order: np.ndarray, step: Callable[[Encoded], object]) -> Contender:
    held = InMemory(images.samples)

    def work(nth: int, indices: list[int]) -> None:
        for index in indices:
            seed_sample(images.seed, nth, index)
            step(held[index])

    return Contender(name, order, work, held.hold)


def stages(rates: dict[str, Rates]) -> dict[str, float]:
    """CPU milliseconds per image of each stage."""
    spent = {name: 1000 / np.array(rate.cpu) for name, rate in rates.items() if rate.cpu}
    if not spent:
        return {}
    steps = {READ: spent[READ], DECODE: spent[DECODE], CROP: spent[CROP] - spent[DECODE]}
    if CHANGE in spent:
        steps[CHANGE] = spent[CHANGE] - spent[CROP]
    steps[WHOLE] = spent[WHOLE] - spent[READ] - spent.get(CHANGE, spent[CROP])
    # The difference of a very cheap stage can be slightly below zero.
    return {name: max(0.0, statistics.median(each.tolist())) for name, each in steps.items()}


def transfer_milliseconds(images: Images, device: torch.device, batch: int) -> float | None:
    """Milliseconds per image from pinned memory to the device; None on a CPU."""
    if device.type == "cpu":
        return None
    size, channels = images.data.IMAGE_SIZE, images.data.IMAGE_CHANNELS
    pixels = torch.zeros(batch, channels, size, size, dtype=torch.uint8)
    pixels = pixels.pin_memory() if device.type == "cuda" else pixels
    times = []
    for _ in range(TRANSFERS):
        begin = time.perf_counter()
        pixels.to(device, non_blocking=True)
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times) / batch
