#!/usr/bin/env python3
"""Requests, bytes, shuffling and memory of training from tar files, simulated.

    python bench/simulate_loading.py -images 1281167 -ranks 8 -batch_size 128
    python bench/simulate_loading.py -dataset shards -data_path s3://bucket/packed -ranks 8 -machines 2

It runs the order, the cache and the requests of training; only store, disk and pixels are missing. Downloads keep up:
a tar file is there one batch after it is announced. With -data_path, it reads the index of these tar files; else it
imagines a set.

Takes the flags and settings of main_single_gpu.py, such as -num_workers (1 if open) and DATA.CACHE_GB.
"""

import copy
import itertools
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import Batch, TrainLoader
from datasets.base import Key
from datasets.images import Images
from datasets.labels import ANY_LABEL
from datasets.shards.cache import ShardCache
from datasets.shards.index import BLOCK, Range, Remote, ShardFile, ShardIndex
from datasets.shards.source import WINDOW, ShardSamples, ShardSet, open_split, open_store
from datasets.variants import Repeated
from engine.setup import training_order
from tools.common.command_line import OVERWRITE, PAGES, Tool, above_zero, check_one_process, tool
from tools.common.output_file import writing
from tools.common.tables import in_columns
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import World
from utils.errors import EXIT_DONE
from utils.flags import Flag, whole
from utils.log import unheard
from vitamp.files import write_atomically

NAME = "simulate_loading.py"
PAGES[NAME] = "shards"
IMAGE_NAME = b"00000000.jpg"
HEADERS = 1536
"""Bytes of a tar file for each image beside its own: two headers, and the label"""
IMAGINED = (
    Flag("images", "images of the training split", "N", default=1_281_167, kind=whole(2, 10**9)),
    Flag("shard_images", "images per tar file", "N", default=1000, kind=whole(1, 10**9)),
    Flag("image_kb", "size of an image, in 1000 bytes", "X", default=30.0, kind=above_zero),
)
OWN = (
    *IMAGINED,
    Flag("ranks", "processes of the run on each machine", "N", default=1, kind=whole(1, 1024)),
    Flag("machines", "machines of the run", "N", default=1, kind=whole(1, 10**6)),
    Flag("json", "write the results as JSON", "FILE"),
    OVERWRITE,
)
TOOL = Tool(NAME, __doc__, OWN, folder="bench")


class Store(Remote):
    """Counts requests in place of sending them."""

    def __init__(self) -> None:
        self.root = "the simulated store"
        self.counts = Counter[str]()

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
        self._counts = store.counts
        self._there = there

    def has(self, number: int) -> bool:
        path = self._path(number)
        if path in self._there:
            self._there[path] = self._there.pop(path)
        return path in self._there

    def download(self) -> None:
        """Download what is announced, as far as there is room."""
        for number in itertools.filterfalse(self.has, self._to_download):
            file = self._files[number]
            path = self._path(number)
            self._there[path] = file.size
            try:
                self._make_room(file.size)
            except OSError:
                self._remove(path)
                continue
            self._counts.update(files=1)
            for begin in range(0, file.size, BLOCK):
                self._store.ranges([(file.name, begin, min(BLOCK, file.size - begin))])
        self._to_download = []

    def _free(self) -> float:
        return math.inf

    def _files_by_last_use(self) -> list[tuple[float, int, Path]]:
        return [(0.0, size, path) for path, size in self._there.items()]

    def _remove(self, path: Path) -> None:
        del self._there[path]


class Requests(Images):
    """The training images of a rank, whose loading processes take turns: requested, and not read."""

    def __init__(self, tars: ShardSamples, data: DataConfig, store: Store, caches: Sequence[Cache | None]) -> None:
        """`caches`: of each loading process."""
        super().__init__(tars, data, True, 0)
        self._tars = tars
        self._counts = store.counts
        self._caches = itertools.cycle(caches)
        tars.store = store
        tars.cache = next(self._caches)

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = [index for _, index in keys]
        self.samples.prefetch(indices)
        self._counts.update(images=len(keys), image_bytes=sum(map(self.samples.size, indices)))
        self._tars.cache = next(self._caches)
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0))


class Imagined(ShardSet):
    """As many images of one size, as pack_images.py would store them."""

    def __init__(self, data: DataConfig) -> None:
        self.store = Store()
        self.data = data.changed(CACHE_GB=0)
        self.classes = None

    def samples(self, images: int, per_shard: int, image_bytes: int) -> ShardSamples:
        each = -(-(image_bytes + HEADERS) // 512) * 512
        shard, place = np.divmod(np.arange(images), per_shard)
        files = [ShardFile(f"{n:05d}.tar", count * each, "") for n, count in enumerate(np.bincount(shard).tolist())]
        sizes = np.full(images, image_bytes)
        labels = np.zeros(images, np.int64)
        names = np.frombuffer(IMAGE_NAME * images, np.uint8)
        ends = np.arange(1, images + 1) * len(IMAGE_NAME)
        index = ShardIndex(files, shard.astype(np.int32), place * each + 512, sizes, labels, names, ends)
        self.splits = {"train": files}
        return ShardSamples(self, "train", index, WINDOW, np.arange(images))


def traffic(config: Config, samples: ShardSamples, ranks: int, machines: int, epochs: int) -> list[Counter[str]]:
    """What the first machine, of so many ranks, requests in each epoch."""
    data = config.DATA
    store = Store()
    there = dict[Path, int]()
    caches = list[Cache]()
    loaders = list[TrainLoader]()
    for rank in range(ranks):
        tars = copy.copy(samples)
        tars.machines = machines
        tars.by_machine = data.SAMPLER == "by_machine"
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
    samples = dataset.samples
    files = len(tars.index.files)
    batch = order.global_batch
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


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    file = line.file("json")
    check_one_process(NAME)
    config = line.load({"DATA.DATASET": ("shards", NAME)}, resolved=False).config
    data = config.DATA
    if data.DATA_PATH is None:
        samples = Imagined(data).samples(asked.images, asked.shard_images, round(1000 * asked.image_kb))
    else:
        line.refuse([flag.name for flag in IMAGINED], "-{}: the set in -data_path has its own; leave it out.")
        samples = open_split(ShardSet(open_store(data.DATA_PATH), data), data, "train", ANY_LABEL, WINDOW)
    uncached = config.changed(DATA={"CACHE_GB": 0})
    with unheard():
        near = traffic(uncached, samples, asked.ranks, asked.machines, 1)[0]
    # The first epoch begins with an empty cache; the others are like the second.
    first, second = traffic(config, samples, asked.ranks, asked.machines, 2)
    alone = {"requests": near["images"], "bytes": near["image_bytes"]}
    ways = {"each image": alone, "near images together": near, "first epoch": first, "second epoch": second}
    found = mixing_and_memory(config, samples, asked.ranks, asked.machines)
    rows = [["One machine requests in an epoch", "requests", "GB", "tar files"]]
    for name, counts in ways.items():
        cached = f" with DATA.CACHE_GB={data.CACHE_GB:g}" if name.endswith("epoch") else ""
        row = f"{counts['requests']:,}", f"{counts['bytes'] / 1e9:,.3g}", f"{counts.get('files', 0):,}"
        rows.append([name + cached, *row])
    listed = found["list_bytes"] / 1e9
    ordered = found["order_bytes"] / 1e9
    print(
        f"{found['images']:,} images in {found['files']:,} tar files, {found['bytes'] / 1e9:,.3g} GB; "
        f"{asked.machines:,} x {asked.ranks:,} ranks; {found['updates']:,} updates of {found['global_batch']:,} images",
        *in_columns(rows),
        f"Tar files per update: {found['files_per_update']:,.0f} (fully shuffled: "
        f"{found['files_per_update_shuffled']:,.0f})",
        f"Images between neighbours in storage: {found['apart']:,.0f} (fully shuffled: "
        f"{found['apart_shuffled']:,.0f}); rank correlation {found['rank_correlation']:.3f}",
        f"List of images: {listed:,.3g} GB per machine, and {ordered:,.3g} per rank: "
        f"{listed + ordered * asked.ranks:,.3g} GB",
        sep="\n",
    )
    if file is not None:
        with writing(file, "-json"):
            write_atomically(file, json.dumps({**found, "machine": ways}, indent=1) + "\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
