"""Measure the data path and return the results as plain values."""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets import check_dataset, open_dataset
from datasets.images import Images
from engine.machine.device import processor
from tools.benchmark_data.loaders import loader_name, loaders
from tools.benchmark_data.packed import Packed, pack
from tools.benchmark_data.paths import bound, is_jpeg, opened, ours, paths
from tools.benchmark_data.rates import OURS, TIMM, TORCHVISION, Rates, measure
from tools.benchmark_data.stages import stage_runs, stages, transfer_milliseconds
from tools.common.results.section import as_typed
from tools.common.turns import Budget, Ratio, ratio
from utils.cache import cache_folder
from utils.config import Config
from utils.errors import UserError
from utils.log import log
from utils.machine.cpus import cores
from utils.machine.heap import keep_freed_memory

Results = dict[str, Any]
BATCHES = 8
"""Least number of batches per round; with fewer, mainly the start of a loader would be measured."""
LOOKED_AT = 64
"""Number of samples to report kind and size of."""


@dataclass(frozen=True)
class Plan:
    """What to measure, how often, and the time limit."""

    rounds: int
    images: int
    workers: tuple[int, ...]
    seconds: float
    parts: tuple[str, ...]


class Benchmark:
    """Measures the splits of a data set."""

    def __init__(self, config: Config, plan: Plan, device: torch.device) -> None:
        # As in loading processes: operations must not use other cores. timm and torchvision gain from it too.
        torch.set_num_threads(1)
        keep_freed_memory()
        check_dataset(config.DATA, config.MODEL.NUM_CLASSES)
        self.config, self.plan, self.device = config, plan, device
        self.budget = Budget(plan.seconds)
        self.parts = {train: self._open(train) for train in (True, False)}
        self.orders = {train: self._choose(part) for train, part in self.parts.items()}
        self.images = len(self.orders[True])
        self.batch = max(1, min(config.DATA.BATCH_SIZE, self.images // BATCHES))

    def _open(self, train: bool) -> Images:
        config = self.config
        part = open_dataset(config.DATA, train, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
        part = part.augment(config.TRAIN) if train else part
        if not isinstance(part, Images):
            raise UserError(
                f"DATA.DATASET {config.DATA.DATASET}: its images are in memory, so there is no loading to measure. "
                "Give -made N to measure on JPEGs that the tool makes, or name another data set."
            )
        return part

    def _choose(self, part: Images) -> np.ndarray:
        """Random samples of the split, in an order that suits its source: tar files are read one after another."""
        generator = np.random.Generator(np.random.Philox(key=self.config.SEED))
        return part.shuffled(generator)[: self.plan.images]

    def run(self) -> Results:
        begin = time.monotonic()
        about = _about(self.parts[True], self.orders[True][:LOOKED_AT])
        opening = (time.monotonic() - begin) / min(LOOKED_AT, self.images)
        results: Results = {
            "date": time.strftime("%Y-%m-%d"),
            "command": as_typed("benchmark_data.py", sys.argv[1:]),
            "machine": f"{processor()}, {cores()} cores",
            "versions": library_versions(),
            "images": about,
            "rounds": self.plan.rounds,
            "images_a_round": self.images,
            "batch": self.batch,
        }
        with tempfile.TemporaryDirectory(dir=cache_folder(self.config.DATA, "benchmark")) as folder:
            packed = self._packed(Path(folder), opening)
            steps = {
                "train": lambda: self._per_core(True, packed),
                "val": lambda: self._per_core(False, packed),
                "stages": self._stages,
                "loader": self._loaders,
            }
            for name, step in steps.items():
                if name in self.plan.parts:
                    log.info("measuring: %s", name)
                    results[name] = step()
        return results | {"cut": self.budget.cut}

    def _packed(self, folder: Path, opening: float) -> Packed:
        encoded = self.parts[True].samples.read(int(self.orders[True][0]))
        if "packed" not in self.plan.parts or not isinstance(encoded, bytes):
            return {}
        # Two splits, two kinds of packing, and encoding takes about as long as opening.
        if not self.budget.allows(8 * opening * self.images):
            return {}
        log.info("packing %d images for comparison", self.images)
        return pack(self.parts, self.orders, self.config.TRAIN, folder)

    def _per_core(self, train: bool, packed: Packed) -> Results:
        part, order = self.parts[train], self.orders[train]
        contenders = paths(part, order, train, self.config.TRAIN, self.batch)
        for kind, parts in packed.items():
            contenders.append(ours(f"{OURS}, {kind}", parts[train], np.arange(len(parts[train])), self.batch))
        if is_jpeg(part.samples.read(int(order[0]))):
            contenders.append(bound(part.samples, order))
        return per_core(measure(contenders, self.plan.rounds, len(order), self.budget))

    def _stages(self) -> Results:
        runs = stage_runs(self.parts[True], self.orders[True], self.config.TRAIN, self.batch)
        milliseconds = stages(measure(runs, self.plan.rounds, self.images, self.budget))
        transfer = transfer_milliseconds(self.parts[True], self.device, self.batch)
        return milliseconds | ({"transfer": transfer} if transfer is not None else {})

    def _loaders(self) -> Results:
        order = self.orders[True][: self.images // self.batch * self.batch]
        with loaders(self.parts[True], order, self.config.TRAIN, self.batch, self.plan.workers) as contenders:
            return through_loaders(measure(contenders, self.plan.rounds, len(order), self.budget), self.plan.workers)


def per_core(rates: dict[str, Rates]) -> Results:
    """One row per contender: images per second of CPU time, and the ratios to timm and torchvision."""
    return {
        name: {
            "images_per_second": statistics.median(rate.cpu),
            "rounds": rate.cpu,
            "to": {other: _plain(ratio(rate.cpu, rates[other].cpu)) for other in (TIMM, TORCHVISION) if other != name},
        }
        for name, rate in rates.items()
        if rate.cpu
    }


def through_loaders(rates: dict[str, Rates], counts: tuple[int, ...]) -> Results:
    """One row per number of workers: our loader and timm's, by wall-clock time and by CPU time of all processes."""
    rows: Results = {}
    for workers in counts:
        mine, other = (rates[loader_name(name, workers)] for name in (OURS, TIMM))
        if mine.wall:
            rows[str(workers)] = {
                OURS: statistics.median(mine.wall),
                TIMM: statistics.median(other.wall),
                "to": _plain(ratio(mine.wall, other.wall)),
                "to_by_core_time": _plain(ratio(mine.cpu, other.cpu)),
            }
    return rows


def library_versions() -> dict[str, str]:
    """Versions of the libraries that are measured."""
    wanted = ("torch", "torchvision", "timm", "pillow", "simplejpeg", "numpy")
    installed = {library.metadata["Name"].lower(): library.version for library in distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in wanted if name in installed}


def _plain(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else asdict(ratio)


def _about(part: Images, looked_at: np.ndarray) -> Results:
    """Number, size and kind of the images."""
    encoded = [part.samples.read(int(index)) for index in looked_at]
    sizes = [opened(one).size for one in encoded]
    kilobytes = [len(one) / 1000 if isinstance(one, bytes) else one.nbytes / 1000 for one in encoded]
    return {
        "count": len(part),
        "kilobytes": round(statistics.fmean(kilobytes), 1),
        "width": int(statistics.median(width for width, _ in sizes)),
        "height": int(statistics.median(height for _, height in sizes)),
        "jpeg": sum(map(is_jpeg, encoded)) / len(encoded),
    }
