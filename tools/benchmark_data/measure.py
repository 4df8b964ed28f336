"""Measure vitamp's loading beside timm's, on the same samples."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.loader import create_loader
from timm.data.transforms_factory import create_transform
from torch.utils.data import Dataset

from datasets import EpochOrder, TrainLoader, check_dataset, open_dataset
from datasets.base import Encoded, Samples
from datasets.images import Images
from datasets.transforms.augment import image_changes
from engine.machine.device import processor
from tools.common.tables import Section, as_typed
from tools.common.turns import Budget, Ratio, alternate, ratio
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import UserError
from utils.log import log
from utils.machine.cpus import cores, keep_freed_memory
from utils.program import started_as
from utils.text import counted

OURS, TIMM = "vitamp", "timm"
"""Names of the contenders, in tables and files."""
TITLES = {
    "train": "Training: images per second of CPU time",
    "val": "Validation: images per second of CPU time",
}
ENOUGH = 1.1
"""How many times as fast as the model a loader must be, so that the model never waits."""


def sections(results: dict[str, Any]) -> list[Section]:
    """One table per part that was measured."""
    made = []
    for part, title in TITLES.items():
        rows = [["", "images / CPU s", f"to {TIMM}"]]
        for name, row in results.get(part, {}).items():
            rows.append([name, f"{row['images_per_second']:.0f}", _ratio(row["to"].get(TIMM))])
        made += [Section(title, rows)] if rows[1:] else []
    if results.get("loader"):
        rows = [["workers", OURS, TIMM, "ratio", "by CPU time"]]
        for workers, row in results["loader"].items():
            ratios = _ratio(row["to"]), _ratio(row["to_by_core_time"])
            rows.append([workers, f"{row[OURS]:.0f}", f"{row[TIMM]:.0f}", *ratios])
        ratios = f"ratios of {OURS} to {TIMM} by wall-clock time, then by CPU time (of all processes)"
        made.append(Section(f"Through the loaders, batches of {results['batch']}: images per second; {ratios}", rows))
    return made


def _ratio(fields: dict[str, float] | None) -> str:
    return "" if fields is None else str(Ratio(**fields))


def verdict(results: dict[str, Any], appetite: float) -> str:
    """Whether loading keeps up with a model that trains `appetite` images per second, and if not, what would."""
    rates = {int(workers): row[OURS] for workers, row in results.get("loader", {}).items()}
    per_core = results.get("train", {}).get(OURS, {}).get("images_per_second")
    if not rates:
        if per_core is None:
            return "No verdict on -appetite: it needs a complete round of -parts loader or train."
        needed = counted(math.ceil(appetite / per_core), "core")
        return f"The model trains on {appetite:.0f} images/s: loading needs about {needed}."
    workers = max(rates, key=lambda count: rates[count])
    best = rates[workers]
    text = f"The model trains on {appetite:.0f} images/s; loading reaches {best:.0f} with {counted(workers, 'worker')}"
    if best >= ENOUGH * appetite:
        enough = min(count for count, rate in rates.items() if rate >= ENOUGH * appetite)
        return f"{text}: loading is not the bottleneck. {enough} workers are enough."
    waits = 100 * max(0.0, 1 - best / appetite)
    text += f": loading is the bottleneck, or nearly so. The model would wait {waits:.0f} % of its time."
    if per_core is not None:
        text += f" About {math.ceil(ENOUGH * appetite / per_core)} cores would keep up, or fewer after packing the "
        text += f"images ({started_as('scripts/pack_images.py')})."
    return text


Transform = Callable[[Image.Image], Any]
Work = Callable[[int, list[int]], object]
"""Called with round and samples; its time is measured."""
BATCHES = 8
"""Least number of batches per round; with fewer, mainly the start of a loader would be measured."""
LOOKED_AT = 64
"""Number of samples to report kind and size of."""
WARMUP_IMAGES = 16


def measure(
    config: Config,
    parts: Collection[str],
    rounds: int,
    images: int,
    workers: Sequence[int],
    budget: Budget,
    words: Sequence[str],
) -> dict[str, Any]:
    """The results as plain values. `words`: the command line."""
    # As in loading processes: operations must not use other cores. timm gains from it too.
    torch.set_num_threads(1)
    keep_freed_memory()
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES)
    splits = {train: _open(config, train) for train in (True, False)}
    generator = np.random.Generator(np.random.Philox(key=config.SEED))
    # Random samples, in an order that suits their source: tar files are read one after another.
    orders = {train: split.shuffled(generator)[:images] for train, split in splits.items()}
    images = len(orders[True])
    batch = max(1, min(config.DATA.BATCH_SIZE, images // BATCHES))
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": as_typed("benchmark_data.py", words),
        "machine": f"{processor()}, {cores()} cores",
        "versions": library_versions(),
        "images": _about(splits[True], orders[True][:LOOKED_AT]),
        "rounds": rounds,
        "images_a_round": images,
        "batch": batch,
    }
    for name, train in (("train", True), ("val", False)):
        if name in parts:
            log.info("measuring: %s", name)
            works = per_core(splits[train], train, config.TRAIN, batch)
            rates = alternating(works, orders[train], rounds, len(orders[train]), budget)
            results[name] = {
                one: {
                    "images_per_second": statistics.median(rate.cpu),
                    "rounds": rate.cpu,
                    "to": {TIMM: _plain(ratio(rate.cpu, rates[TIMM].cpu))} if one == OURS else {},
                }
                for one, rate in rates.items()
                if rate.cpu
            }
    if "loader" in parts:
        log.info("measuring: loader")
        order = orders[True][: images // batch * batch]
        with loaders(splits[True], order, config.TRAIN, batch, workers) as works:
            rates = alternating(works, order, rounds, len(order), budget)
        results["loader"] = {}
        for count in workers:
            mine, other = rates[f"{OURS} {count}"], rates[f"{TIMM} {count}"]
            if mine.wall:
                results["loader"][str(count)] = {
                    OURS: statistics.median(mine.wall),
                    TIMM: statistics.median(other.wall),
                    "to": _plain(ratio(mine.wall, other.wall)),
                    "to_by_core_time": _plain(ratio(mine.cpu, other.cpu)),
                }
    return results | {"cut": budget.cut}


def _open(config: Config, train: bool) -> Images:
    split = open_dataset(config.DATA, train, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
    split = split.augment(config.TRAIN) if train else split
    if not isinstance(split, Images):
        raise UserError(
            f"DATA.DATASET {config.DATA.DATASET}: its images are in memory, so there is no loading to measure. "
            "Give -made N to measure on JPEGs that the tool makes, or name another data set."
        )
    return split


def library_versions() -> dict[str, str]:
    """Versions of the libraries that are measured."""
    wanted = ("torch", "torchvision", "timm", "pillow", "simplejpeg", "numpy")
    installed = {library.metadata["Name"].lower(): library.version for library in distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in wanted if name in installed}


def _about(split: Images, looked_at: np.ndarray) -> dict[str, Any]:
    """Number, size and kind of the images."""
    encoded = [split.samples.read(int(index)) for index in looked_at]
    sizes = [opened(one).size for one in encoded]
    kilobytes = [len(one) / 1000 if isinstance(one, bytes) else one.nbytes / 1000 for one in encoded]
    jpegs = [isinstance(one, bytes) and one[:2] == b"\xff\xd8" for one in encoded]
    return {
        "count": len(split),
        "kilobytes": round(statistics.fmean(kilobytes), 1),
        "width": int(statistics.median(width for width, _ in sizes)),
        "height": int(statistics.median(height for _, height in sizes)),
        "jpeg": sum(jpegs) / len(encoded),
    }


def _plain(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else asdict(ratio)


# Alternating over the same samples


@dataclass
class Rates:
    """Images per second in each round."""

    wall: list[float] = field(default_factory=list)
    """By wall-clock time."""
    cpu: list[float] = field(default_factory=list)
    """By CPU time of this process and its children."""


def alternating(
    works: Mapping[str, Work], order: np.ndarray, rounds: int, images: int, budget: Budget
) -> dict[str, Rates]:
    """Rates in the rounds that all contenders finished within the budget.

    Each round takes the next samples of `order`, starting over at the end.
    """
    rates = {name: Rates() for name in works}
    for work in works.values():  # the first call is slow
        _time(work, order, -1, min(images, WARMUP_IMAGES))
    for name, nth in alternate(list(works), rounds, budget):
        wall, cpu = _time(works[name], order, nth, images)
        rates[name].wall.append(images / wall)
        rates[name].cpu.append(images / cpu)
    finished = min(len(rate.wall) for rate in rates.values())
    return {name: Rates(rate.wall[:finished], rate.cpu[:finished]) for name, rate in rates.items()}


def _time(work: Work, order: np.ndarray, nth: int, images: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one round."""
    first = max(nth, 0) * images
    samples = order[np.arange(first, first + images) % len(order)].tolist()
    wall, cpu = time.perf_counter(), _cpu_seconds()
    work(nth + 2, samples)
    # The clock of children counts hundredths of a second: a very short round must not divide by zero.
    return max(time.perf_counter() - wall, 1e-6), max(_cpu_seconds() - cpu, 1e-6)


def _cpu_seconds() -> float:
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # no /proc here, or the child has just ended
            fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


# Paths from a stored image to uint8 pixels


class PerSample(Dataset[tuple[Any, int]]):
    """The usual data set of timm: PIL opens the image, a transform does the rest."""

    def __init__(self, samples: Samples, transform: Transform, order: np.ndarray | None = None) -> None:
        self.samples, self.transform = samples, transform
        self.order = np.arange(len(samples)) if order is None else order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        index = int(self.order[place])
        return self.transform(opened(self.samples.read(index))), int(self.samples.labels[index])


def opened(encoded: Encoded) -> Image.Image:
    if isinstance(encoded, np.ndarray):
        return Image.fromarray(encoded.squeeze()).convert("RGB")
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


def timm_transform(data: DataConfig, train: bool, changes: TrainConfig) -> Transform:
    """create_transform as in timm's training: it ends with uint8, which the device normalises."""
    transform: Any = create_transform(
        data.IMAGE_SIZE,
        is_training=train,
        scale=data.CROP_SCALE,
        ratio=data.CROP_RATIO,
        hflip=data.FLIP,
        color_jitter=0.0,
        interpolation=data.INTERPOLATION,
        crop_pct=data.CROP_PCT,
        crop_mode=data.CROP_MODE,
        mean=data.IMAGENET_MEAN,
        use_prefetcher=True,
    )
    if train:
        # The same operations for all: timm's would stop at an image that Pillow 13 refuses to posterise.
        transform.transforms[-1:-1] = image_changes(data, changes)
    return transform


def per_core(images: Images, train: bool, changes: TrainConfig, batch: int) -> dict[str, Work]:
    """What is compared per core, on one split."""
    dataset = PerSample(images.samples, timm_transform(images.data, train, changes))

    def ours(nth: int, samples: list[int]) -> None:
        for begin in range(0, len(samples), batch):
            images.__getitems__([(nth, index) for index in samples[begin : begin + batch]])

    def timms(_: int, samples: list[int]) -> None:
        for index in samples:
            dataset[index]

    return {OURS: ours, TIMM: timms}


@contextlib.contextmanager
def loaders(
    images: Images, order: np.ndarray, changes: TrainConfig, batch: int, counts: Sequence[int]
) -> Iterator[dict[str, Work]]:
    """Our loader and timm's, for each number of workers: uint8 batches as they arrive in the training process.

    Workers stay alive, and idle while others are measured.
    """
    with contextlib.ExitStack() as stack:
        works: dict[str, Work] = {}
        for count in counts:
            epochs = EpochOrder(
                len(order), batch, 1, 0, 1, images.seed, drop_last=True, shuffled=lambda g: g.permutation(order)
            )
            loader = TrainLoader(images, epochs, images.seed, count, torch.device("cpu"))
            stack.callback(loader.close)
            works[f"{OURS} {count}"] = partial(_load_ours, loader)
            works[f"{TIMM} {count}"] = partial(_load_timms, _timm_loader(images, order, changes, batch, count))
        yield works


def _load_ours(loader: TrainLoader, nth: int, _: list[int]) -> None:
    for window in loader.epoch(nth):
        for _share, _batch in window:
            pass


def _load_timms(loader: Any, _nth: int, _samples: list[int]) -> None:
    for _ in loader:
        pass


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
