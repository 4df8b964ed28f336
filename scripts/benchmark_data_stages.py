"""Where the time of our path goes, stage by stage: read, decode, crop and resize, augment, collate, transfer."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from datasets.augment import keys_set
from datasets.images import Images
from datasets.pixels import Pixels
from datasets.randomness import seed_sample
from datasets.samples import Encoded
from scripts.benchmark_data_measure import Contender, Rates
from scripts.benchmark_data_paths import ours
from utils.config.schema import TrainConfig

READ, DECODE, CROPPED, CHANGED, WHOLE = "read", "decode", "to the crop", "to the augmented crop", "to the batch"
TRANSFERS = 20


def stage_runs(
    images: Images, order: np.ndarray, changes: TrainConfig, batch: int, decode: Contender | None
) -> list[Contender]:
    """Ever longer parts of the path. A stage is the difference of two, so that nothing is measured inside of it."""
    samples = images.samples
    runs = [
        Contender(READ, order, lambda _, indices: [samples.read(index) for index in indices]),
        _OnePart(images, Pixels(images.data, True)).contender(CROPPED, order),
        ours(WHOLE, images, order, batch),
    ]
    if decode is not None:
        runs.append(Contender(DECODE, order, decode.work, decode.before))
    if keys_set(changes):
        runs.append(_OnePart(images, Pixels(images.data, True, changes)).contender(CHANGED, order))
    return runs


class _OnePart:
    """From bytes in memory to pixels."""

    def __init__(self, images: Images, pixels: Pixels) -> None:
        self.images, self.pixels = images, pixels
        data = images.data
        self.out = torch.zeros(data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, dtype=torch.uint8)
        self.encoded: dict[int, Encoded] = {}

    def hold(self, indices: list[int]) -> None:
        self.encoded = {index: self.images.samples.read(index) for index in indices}

    def work(self, nth: int, indices: list[int]) -> None:
        for index in indices:
            seed_sample(self.images.seed, nth, index)
            self.pixels(self.encoded[index], self.out)

    def contender(self, name: str, order: np.ndarray) -> Contender:
        return Contender(name, order, self.work, self.hold)


def stages(found: dict[str, Rates]) -> dict[str, float]:
    """Milliseconds of one core for an image, a stage at a time."""
    if not found[WHOLE].cpu:
        return {}
    spent = {name: 1000 / np.array(rates.cpu) for name, rates in found.items()}
    steps = {"read": spent[READ]}
    if DECODE in spent:
        steps |= {"decode": spent[DECODE], "crop and resize": spent[CROPPED] - spent[DECODE]}
    else:
        steps["decode, crop and resize"] = spent[CROPPED]
    changed = spent.get(CHANGED, spent[CROPPED])
    if CHANGED in spent:
        steps["augment"] = changed - spent[CROPPED]
    steps["collate"] = spent[WHOLE] - spent[READ] - changed
    # A difference of two figures may come out a little below zero where the stage costs next to nothing.
    return {name: max(0.0, statistics.median(each.tolist())) for name, each in steps.items()}


def transfer_milliseconds(images: Images, device: torch.device, batch: int) -> float | None:
    """Milliseconds for one image from pinned memory to the device; None where there is nothing to transfer to."""
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
