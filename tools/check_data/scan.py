"""Scan of a data set, in which every image is decoded once."""

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datasets import decoding
from datasets.base import Encoded, Key, Samples, dtype_of
from datasets.damage import Failure, failure_or
from datasets.examine.copies import digest_of
from datasets.examine.findings import Scan, Split
from datasets.loading.loader import Plan
from datasets.loading.workers import LoadingProcesses
from datasets.transforms.pixels import Pixels
from engine.inputs.batches import Inputs
from tools.check_data.near import SIDE, Thumbnails
from tools.common.ranks import gather
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError
from utils.progress import Progress

CHUNK = 32
"""Images that a loading process scans at once"""
PREFETCH = 2
"""Chunks per loading process that are under way at once."""
KINDS = {"empty": decoding.EMPTY, "no image": decoding.UNKNOWN_FORMAT, "too large": decoding.TOO_LARGE}
"""Kind of problem -> words of the decoder about it"""
SHADES = 48
"""Of a standard deviation in thumbnails of bands"""


def scan_split(title: str, samples: Samples, data: DataConfig, workers: int, world: World = ALONE) -> Split:
    """Scan every image of a split; of several ranks, each scans some, and rank 0 gets all."""
    chunks = [np.arange(begin, min(begin + CHUNK, len(samples))) for begin in range(0, len(samples), CHUNK)]
    chunks = chunks[world.rank :: world.size]
    plan = Plan()
    loader = DataLoader(
        _Scanner(samples, data),
        batch_sampler=plan,
        num_workers=min(workers, len(chunks)),
        prefetch_factor=PREFETCH if workers and chunks else None,
        collate_fn=list,
        generator=torch.Generator(),
        persistent_workers=bool(workers and chunks),
    )
    scanned: list[list[Scan]] = []
    bar = Progress(None, sum(map(len, chunks)), "images", title, world.first)
    with warnings.catch_warnings(action="ignore"), bar:
        processes = LoadingProcesses(loader) if loader.num_workers else None
        plan.begin((0, chunk) for chunk in chunks)
        try:
            if processes is not None:
                processes.begin()
            for chunk in processes or loader:
                scanned.append(chunk)
                bar.update(len(chunk))
        except TrainingError as death:
            first = samples.name(int(chunks[len(scanned)][0]))
            near = f"{first} or one of the next {CHUNK * workers * PREFETCH * world.size - 1} images"
            raise TrainingError(f"{death} If an image caused this, it is {near} of the {title} split.") from None
        finally:
            if processes is not None:
                processes.end()
    return Split(title, samples, list(itertools.chain.from_iterable(gather(scanned, world))))


def thumbnails_of(scans: Sequence[Scan]) -> Thumbnails:
    """Of images that can be read."""
    pixels = np.frombuffer(b"".join(scan.thumbnail for scan in scans), np.uint8)
    shorter = np.array([min(scan.header.size) for scan in scans])
    return Thumbnails(pixels.reshape(len(scans), -1, SIDE, SIDE), shorter)


class _Scanner(Dataset[Any]):
    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples = samples
        self.data = data
        self.inputs = Inputs(data)
        # Images are decoded whole: training's fastest decoders may stop at the end of a crop and miss damage behind it.
        # And they are resized whole, to the thumbnails that are compared with each other.
        self.pixels = Pixels(data.changed(CROP="none", IMAGE_SIZE=SIDE), train=False)
        self.by_simplejpeg = decoding.decoder_of_jpeg() == "simplejpeg"
        self.out = torch.empty(data.IMAGE_CHANNELS, SIDE, SIDE, dtype=dtype_of(data))
        self.storage_failures = 0  # in a row

    def __getitems__(self, keys: list[Key]) -> list[Scan]:
        indices = [index for _, index in keys]
        self.samples.prefetch(indices)
        return [self._scan(index) for index in indices]

    def _scan(self, index: int) -> Scan:
        decoded = failure_or(lambda: self._decoded(index), self.storage_failures)
        if isinstance(decoded, Failure):
            self.storage_failures += decoded.kind == "storage"
            problem = next((kind for kind, reason in KINDS.items() if reason in decoded.reason), decoded.kind)
            return Scan(decoding.Header("", (0, 0)), problem, decoded.reason)
        self.storage_failures = 0
        encoded, whole = decoded
        damage = ""
        if self.by_simplejpeg and isinstance(encoded, bytes) and encoded.startswith(decoding.JPEG_START):
            damage = decoding.damage_of(encoded)
        digest = digest_of(encoded)
        same = digest
        if (whole != whole[0, 0]).any():
            same = hashlib.blake2b(whole.tobytes(), digest_size=16, key=str(whole.shape).encode()).digest()
        header = decoding.header_of(encoded, self.data)
        thumbnail = self.out
        if not self.data.is_plain:
            blank = [str(number + 1) for number, band in enumerate(self.out) if band.min() == band.max()]
            if blank:
                header = header._replace(mode=f"blank: band {', '.join(blank)}")
            # Shades by mean and deviation, so that images of 12 of 16 bits are no copies of each other.
            thumbnail = (self.inputs(self.out[None])[0] * SHADES + 128).round().clamp(0, 255).byte()
        return Scan(header, digest=digest, same=same, damage=damage, thumbnail=thumbnail.numpy().tobytes())

    def _decoded(self, index: int) -> tuple[Encoded, np.ndarray]:
        """The stored image, and its pixels; the thumbnail is in `out`."""
        read = self.samples.read(index)
        whole, view = self.pixels.decode(read)
        self.pixels.finish(self.pixels.resize(whole, view, None), self.out.numpy().transpose(1, 2, 0))
        return read, whole
