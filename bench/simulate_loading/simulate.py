"""Requests, mixing and memory of a run on tar files at a URL, by the order, the cache and the requests of training.

Only store, disk and pixels are missing. Downloads keep up: a tar file is there one batch after it is announced.
"""

import copy
import itertools
import math
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from datasets import Batch, TrainLoader
from datasets.base import Key
from datasets.images import Images
from datasets.shards.cache import ShardCache
from datasets.shards.index import BLOCK, Range, Remote, ShardFile, ShardIndex
from datasets.shards.source import WINDOW, ShardSamples, ShardSet
from datasets.variants import Repeated
from engine.setup import training_order
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import World

NAME = b"00000000.jpg"
HEADERS = 1536
"""Bytes of a tar file for each image beside its own: two headers, and the label"""


class Store(Remote):
    """Counts requests in place of sending them."""

    def __init__(self) -> None:
        self.root, self.counts = "the simulated store", Counter[str]()

    def _request(self, wanted: Sequence[Range], contents: dict[Range, np.ndarray]) -> None:
        for one in wanted:
            self.counts.update(requests=1, bytes=one[2])
            contents[one] = np.empty(one[2], np.uint8)


class Cache(ShardCache):
    """That of one loading process, in the folder of its machine."""

    def __init__(self, store: Store, files: Sequence[ShardFile], limit: float, there: dict[Path, int]) -> None:
        """`there`: path and size of each file in the folder; the one used last at the end."""
        super().__init__(store, files, Path("the simulated cache"), limit)
        self._changed = threading.Condition()  # without a thread: see `download`
        self._counts, self._there = store.counts, there

    def has(self, number: int) -> bool:
        path = self._path(number)
        if path in self._there:
            self._there[path] = self._there.pop(path)
        return path in self._there

    def download(self) -> None:
        """Download what is announced, as far as there is room."""
        for number in itertools.filterfalse(self.has, self._coming):
            file, path = self._files[number], self._path(number)
            self._there[path] = file.size
            try:
                self._make_room(file.size)
            except OSError:
                self._remove(path)
                continue
            self._counts.update(files=1)
            for begin in range(0, file.size, BLOCK):
                self._store.ranges([(file.name, begin, min(BLOCK, file.size - begin))])
        self._coming = []

    def _free(self) -> float:
        return math.inf

    def _kept(self) -> list[tuple[float, int, Path]]:
        return [(0.0, size, path) for path, size in self._there.items()]

    def _remove(self, path: Path) -> None:
        del self._there[path]


class Requests(Images):
    """The training images of a rank, whose loading processes take turns: requested, and not read."""

    def __init__(self, tars: ShardSamples, data: DataConfig, store: Store, caches: Sequence[Cache | None]) -> None:
        """`caches`: of each loading process."""
        super().__init__(tars, data, True, 0)
        self._tars, self._counts, self._caches = tars, store.counts, itertools.cycle(caches)
        tars.store, tars.cache = store, next(self._caches)

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = [index for _, index in keys]
        self.samples.prefetch(indices)
        self._counts.update(images=len(keys), image_bytes=sum(map(self.samples.size, indices)))
        self._tars.cache = next(self._caches)
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0))


class Imagined(ShardSet):
    """As many images of one size, as pack_images.py would store them."""

    def __init__(self, data: DataConfig) -> None:
        self.store, self.data, self.classes = Store(), data.changed(CACHE_GB=0), None

    def samples(self, images: int, per_shard: int, image_bytes: int) -> ShardSamples:
        each = -(-(image_bytes + HEADERS) // 512) * 512
        shard, place = np.divmod(np.arange(images), per_shard)
        files = [ShardFile(f"{n:05d}.tar", count * each, "") for n, count in enumerate(np.bincount(shard).tolist())]
        sizes, labels = np.full(images, image_bytes), np.zeros(images, np.int64)
        names, ends = np.frombuffer(NAME * images, np.uint8), np.arange(1, images + 1) * len(NAME)
        index = ShardIndex(files, shard.astype(np.int32), place * each + 512, sizes, labels, names, ends)
        return ShardSamples(self, "train", index, WINDOW, np.arange(images))


def traffic(config: Config, samples: ShardSamples, ranks: int, machines: int, epochs: int) -> list[Counter[str]]:
    """What the first machine, of so many ranks, requests in each epoch."""
    data, store, there, caches, loaders = config.DATA, Store(), dict[Path, int](), list[Cache](), list[TrainLoader]()
    for rank in range(ranks):
        tars = copy.copy(samples)
        tars.machines, tars.by_machine = machines, data.SAMPLER == "by_machine"
        own: list[Cache | None] = [None]
        if data.CACHE_GB:
            limit = data.CACHE_GB * 1e9
            own = [Cache(store, samples.index.files, limit, there) for _ in range(data.NUM_WORKERS or 1)]
        caches += filter(None, own)
        dataset = Requests(tars, data, store, own)
        order, copies = training_order(config, World(rank, ranks * machines, rank, ranks), dataset)
        repeated = Repeated(dataset, copies) if copies > 1 else dataset
        loaders.append(TrainLoader(repeated, order, config.SEED, 0, torch.device("cpu")))
    updates = zip(*(loader.epochs(range(1, epochs + 1)) for loader in loaders), strict=True)
    found = []
    for _ in range(epochs):
        store.counts.clear()
        for windows in itertools.islice(updates, loaders[0].order.updates):
            for _ in zip(*windows, strict=True):
                for cache in caches:
                    cache.download()
        found.append(store.counts.copy())
    return found


def mixing_and_memory(config: Config, tars: ShardSamples, ranks: int, machines: int) -> dict[str, float]:
    """How well an epoch is mixed, and the bytes of a machine's list of images and of a rank's order of them.

    `files_per_update`: tar files that the images of an update come from. `apart`: images between two in an epoch that
    are stored side by side. Both also as if all images were shuffled. `rank_correlation`: Spearman's, of the places in
    storage and in the epoch.
    """
    dataset = Images(tars, config.DATA, True, 0)
    order, _ = training_order(config, World(0, ranks * machines, 0, ranks), dataset)
    samples, files, batch = dataset.samples, len(tars.index.files), order.global_batch
    permutation = order.permutation(1) % len(samples)
    shard = np.repeat(np.arange(files), np.diff(samples.file_begins))
    parts = [shard[permutation[update * batch :][: order.samples_of(update)]] for update in range(order.updates)]
    place = np.zeros(len(samples), np.int64)
    place[permutation] = np.arange(len(permutation))
    arrays = [*vars(tars).values(), *vars(tars.index).values()]
    return {
        "images": len(samples),
        "files": files,
        "bytes": sum(one.size for one in tars.index.files),
        "updates": order.updates,
        "global_batch": batch,
        "files_per_update": float(np.mean([len(np.unique(part)) for part in parts])),
        "files_per_update_shuffled": files * (1 - (1 - 1 / files) ** len(parts[0])),
        "apart": float(np.abs(np.diff(place)).mean()),
        "apart_shuffled": (len(samples) + 1) / 3,
        "rank_correlation": float(np.corrcoef(np.arange(len(samples)), place)[0, 1]),
        "list_bytes": sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)),
        "order_bytes": permutation.nbytes,
    }
