#!/usr/bin/env python3
"""Time vitamp's loader beside timm's on the images of a data set, as training and as validation see them.

    python bench/loading.py -data_path /data/imagenet
    python bench/loading.py -cfg recipe.yaml -data_path /data/flowers -num_workers 4

Both loaders read the same samples (those of the training split) and make uint8 batches, with the same augmentation.
They alternate, in reverse order every other round. The output has the medians by wall-clock time and by CPU time, and
the ratios taken within a round.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.loader import create_loader
from timm.data.transforms_factory import create_transform
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.benchmark_amp.plan import ratio
from datasets import EpochOrder, TrainLoader, ValLoader, check_dataset, open_dataset
from datasets.images import Images
from datasets.transforms.augment import image_changes
from tools.common.command_line import PAGES, Tool, tool
from tools.common.turns import alternating_order
from utils.config.train import TrainConfig
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, whole
from utils.machine.cpus import keep_freed_memory

CPU = torch.device("cpu")
BATCHES = 8
"""Least number of batches per round; with fewer, mainly the start of a loader would be measured."""
OWN = (
    Flag("rounds", "how often each loader is measured", "N", default=5, kind=whole(1)),
    Flag("images", "images per measurement", "N", default=500, kind=whole(1)),
)
NAME = "loading.py"
PAGES[NAME] = "performance"
ONE_LABEL = "the compared loaders support one label per image; leave it out"
TOOL = Tool(NAME, __doc__, OWN, one_label=ONE_LABEL, folder="bench")


class PerSample(Dataset[tuple[Any, int]]):
    """The usual data set of timm: PIL opens the image, a transform does the rest."""

    def __init__(self, images: Images, changes: TrainConfig | None, order: np.ndarray) -> None:
        """`changes`: the augmentations of training; None for validation."""
        self.samples = images.samples
        self.order = order
        data = images.data
        self.transform: Any = create_transform(
            data.IMAGE_SIZE,
            is_training=changes is not None,
            scale=data.CROP_SCALE,
            ratio=data.CROP_RATIO,
            hflip=data.FLIP,
            color_jitter=0.0,
            interpolation=data.INTERPOLATION,
            mean=data.IMAGENET_MEAN,
            crop_pct=data.CROP_PCT,
            crop_mode=data.CROP_MODE,
            use_prefetcher=True,
        )
        if changes is not None:
            # The same operations for both: timm's would stop at an image that Pillow 13 refuses to posterise.
            self.transform.transforms[-1:-1] = image_changes(data, changes)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        index = int(self.order[place])
        encoded = self.samples.read(index)
        if isinstance(encoded, np.ndarray):
            image = Image.fromarray(encoded.squeeze()).convert("RGB")
        else:
            image = Image.open(io.BytesIO(encoded)).convert("RGB")
        return self.transform(image), int(self.samples.labels[index])


def cpu_seconds() -> float:
    """CPU time of this process and its children."""
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # no /proc here, or the child has just ended
            fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    config = line.load().config
    # As in loading processes: operations must not use other cores. timm gains from it too.
    torch.set_num_threads(1)
    keep_freed_memory()
    # Only training images are loaded: the data set may be too small for a validation split.
    data = config.DATA.changed(PART="train")
    check_dataset(data, config.MODEL.NUM_CLASSES, train=False)
    images = open_dataset(config.DATA, True, config.MODEL.NUM_CLASSES, config.SEED, CPU).augment(config.TRAIN)
    validated = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, CPU)
    if not isinstance(images, Images) or not isinstance(validated, Images):
        raise UserError(f"DATA.DATASET {config.DATA.DATASET}: its images are in memory, so there is nothing to load.")
    # Random samples, in an order that suits their source: tar files are read one after another.
    order = images.shuffled(np.random.Generator(np.random.Philox(key=config.SEED)))[: asked.images]
    batch = max(1, min(config.DATA.BATCH_SIZE, len(order) // BATCHES))
    order = order[: len(order) // batch * batch]
    workers = config.DATA.NUM_WORKERS or 0
    print(f"{asked.rounds} rounds of {len(order)} images in batches of {batch}, {workers} loading processes")

    epochs = EpochOrder(
        len(order), batch, 1, 0, 1, images.seed, drop_last=True, shuffled=lambda g: g.permutation(order)
    )
    train = TrainLoader(images, epochs, images.seed, workers, CPU)
    val = ValLoader(validated, batch, 0, 1, workers, CPU, shard=lambda *_: list(order.reshape(-1, batch)))
    loaders: dict[str, Callable[[int], Iterable[Any]]] = {
        "training": lambda epoch: itertools.chain.from_iterable(train.epoch(epoch)),
        "validation": lambda _epoch: val,
    }
    for what, ours in loaders.items():
        training = what == "training"
        dataset: Any = PerSample(images if training else validated, config.TRAIN if training else None, order)
        transform = dataset.transform
        size = config.DATA.IMAGE_SIZE
        persistent = workers > 0
        made: Any = create_loader(
            dataset, size, batch, is_training=training, num_workers=workers, persistent_workers=persistent, device=CPU
        )
        dataset.transform = transform  # create_loader has set one of its own
        timms = made.loader  # its PrefetchLoader would normalise on the device
        wall: dict[str, list[float]] = {"vitamp": [], "timm": []}
        cpu: dict[str, list[float]] = {"vitamp": [], "timm": []}
        # Round 0 starts the processes.
        for nth, name in alternating_order(tuple(wall), range(asked.rounds + 1)):
            began = time.perf_counter(), cpu_seconds()
            for _ in timms if name == "timm" else ours(nth + 1):
                pass
            if nth:
                wall[name].append(len(order) / (time.perf_counter() - began[0]))
                # The clock of children counts hundredths of a second.
                cpu[name].append(len(order) / max(cpu_seconds() - began[1], 0.01))
        print(f"{what}:")
        for name, speeds in wall.items():
            print(f"  {name}: {statistics.median(speeds):.0f} images/s, {statistics.median(cpu[name]):.0f} by CPU time")
        ratios = [ratio(each["vitamp"], each["timm"]) for each in (wall, cpu)]
        print(f"  vitamp to timm: {ratios[0]}, by CPU time {ratios[1]}")
    train.close()
    val.close()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
