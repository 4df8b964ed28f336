"""Scan of a data set: every image is read and decoded once, in loading processes; and a search for near copies."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datasets.base import Encoded, Samples
from datasets.damage import failure_of
from datasets.decoding import EMPTY, JPEG_START, TOO_LARGE, UNKNOWN_FORMAT, damage_of, decoder_of_jpeg, header_of
from datasets.loading.workers import LoadingProcesses
from datasets.transforms.pixels import Pixels
from tools.common.turns import progress_bar
from utils.config.data import DataConfig
from utils.errors import TrainingError

SIDE, BLOCKS = 32, 8
"""Pixels, and blocks, along each side of a thumbnail"""
FLAT = 6.0
"""Contrast (standard deviation within a channel, of 255 shades) of images of one colour, which have no near copies"""
MOST_APART, MOST_IN_BLOCK = 0.12, 0.15
"""Root mean square difference of thumbnails, and greatest difference of a block"""
CLOSE, MOST_IN_BLOCK_OF_CLOSE = 0.05, 0.3
"""The same for thumbnails that differ less: where a brighter copy is clipped at white, whole blocks differ smoothly."""
MOST_BRIGHTER, MOST_CONTRAST = 30.0, 1.25
"""Difference of brightness, in shades, and ratio of contrasts that copies may have"""
BITS, BANDS = 64, 4
MOST_BITS = 8
"""Different bits of two codes; those of images at MOST_APART differ in 2.4 of 64 on average"""
PAIRS = 1 << 20
"""Pairs held in memory at once"""

Pairs = tuple[np.ndarray, np.ndarray]


class Thumbnails:
    """Thumbnails (images x channels x SIDE x SIDE, uint8) and what is compared of them."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        count = len(pixels)
        self.brightness, self.contrast = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self.blocks = np.zeros((count, pixels.shape[1] * BLOCKS * BLOCKS), np.float16)
        self.codes = np.zeros(count, np.uint64)
        directions = np.random.default_rng(0).standard_normal((self.blocks.shape[1], BITS)).astype(np.float32)
        for begin in range(0, count, 1024):
            part = slice(begin, begin + 1024)
            planes = pixels[part].reshape(len(pixels[part]), pixels.shape[1], -1).astype(np.float32)
            self.brightness[part], self.contrast[part] = planes.mean((1, 2)), np.sqrt(planes.var(2).mean(1))
            normal, side = self.normal(np.arange(count)[part]), SIDE // BLOCKS
            blocks = normal.reshape(len(normal), pixels.shape[1], BLOCKS, side, BLOCKS, side)
            of_blocks = blocks.mean((3, 5)).reshape(len(normal), -1)
            self.blocks[part] = of_blocks
            by_channel = of_blocks.reshape(len(of_blocks), pixels.shape[1], -1)
            pattern = (by_channel - by_channel.mean(2, keepdims=True)).reshape(of_blocks.shape)
            self.codes[part] = np.packbits(pattern @ directions > 0, axis=1).view(np.uint64)[:, 0]

    @property
    def flat(self) -> np.ndarray:
        return self.contrast < FLAT

    def normal(self, indices: np.ndarray) -> np.ndarray:
        """Thumbnails of mean 0 and contrast 1. Channels keep their differences: a red and a green icon differ."""
        pixels = self.pixels[indices].astype(np.float32)
        scale = np.maximum(self.contrast[indices], 1.0)[:, None, None, None]
        return (pixels - self.brightness[indices][:, None, None, None]) / scale


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Pairs of images that are nearly the same (pairs x 2, the first index below the second)."""
    chosen = np.flatnonzero(~thumbnails.flat)
    found = [np.empty((0, 2), np.int64)]
    for one, other in _candidates(thumbnails.codes[chosen]):
        first, second = _alike(thumbnails, chosen[one], chosen[other])
        found.append(np.stack([np.minimum(first, second), np.maximum(first, second)], axis=1))
    return np.unique(np.concatenate(found), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[Pairs]:
    """Pairs of codes that differ in few bits, some of them several times.

    Of 7 different bits, one of 4 bands has at most one. So each band is looked up with each of its bits changed, in the
    list of images sorted by that band; no image is compared with all others.
    """
    width = BITS // BANDS
    for band in range(BANDS):
        values = (codes >> np.uint64(band * width)).astype(np.int64) & ((1 << width) - 1)
        order = np.argsort(values, kind="stable")
        begins = np.searchsorted(values[order], np.arange((1 << width) + 1))
        for flipped in (0, *(1 << bit for bit in range(width))):
            begin, counts = begins[values ^ flipped], np.diff(begins)[values ^ flipped]
            ends = np.cumsum(counts)
            at = 0
            while at < len(codes):
                past = ends[at - 1] if at else 0
                until = max(at + 1, int(np.searchsorted(ends, past + PAIRS, side="right")))
                one = np.repeat(np.arange(at, until), counts[at:until])
                inside = np.arange(len(one)) - np.repeat(ends[at:until] - counts[at:until] - past, counts[at:until])
                other = order[begin[one] + inside]
                near = (one < other) & (np.bitwise_count(codes[one] ^ codes[other]) <= MOST_BITS)
                if near.any():
                    yield one[near], other[near]
                at = until


def _alike(thumbnails: Thumbnails, one: np.ndarray, other: np.ndarray) -> Pairs:
    """Those pairs that are nearly the same: first by brightness and contrast, then by blocks, then by all pixels."""
    kept: list[np.ndarray] = [np.empty(0, np.int64)]
    ratio = thumbnails.contrast[one] / thumbnails.contrast[other]
    apart = np.abs(thumbnails.brightness[one] - thumbnails.brightness[other])
    likely = np.flatnonzero((apart < MOST_BRIGHTER) & (ratio < MOST_CONTRAST) & (ratio > 1 / MOST_CONTRAST))
    for begin in range(0, len(likely), 4096):
        pairs = likely[begin : begin + 4096]
        blocks = np.abs(thumbnails.blocks[one[pairs]] - thumbnails.blocks[other[pairs]]).max(1)
        close = np.flatnonzero(blocks < MOST_IN_BLOCK_OF_CLOSE)
        for at in range(0, len(close), 512):
            part = close[at : at + 512]
            difference = thumbnails.normal(one[pairs[part]]) - thumbnails.normal(other[pairs[part]])
            apart = np.sqrt((difference**2).mean((1, 2, 3)))
            kept.append(pairs[part[((apart < MOST_APART) & (blocks[part] < MOST_IN_BLOCK)) | (apart < CLOSE)]])
    pairs = np.concatenate(kept)
    return one[pairs], other[pairs]


CHUNK = 32
PREFETCH = 2
"""Chunks per loading process that are under way at once."""
KINDS = {"empty": EMPTY, "no image": UNKNOWN_FORMAT, "too large": TOO_LARGE}
"""Kind of problem -> words of the decoder about it"""


class Scan(NamedTuple):
    """Result for one image."""

    problem: str
    """Kind of problem in a word; '' where the image can be read"""
    reason: str
    digest: bytes
    """Equal for images of equal bytes; b'' where they cannot be read"""
    mode: str
    """How the colours are stored; '' where the model takes them so, or where it is unknown"""
    size: tuple[int, int]
    """Width and height; (0, 0) where unknown"""
    damage: str = ""
    """The decoder's warning about an image that it could read all the same"""
    thumbnail: bytes = b""
    """Pixels of the whole image, channels x SIDE x SIDE; b'' where it cannot be read"""


@dataclass
class Split:
    """Split of a data set with the scans of its images."""

    title: str
    samples: Samples
    scans: list[Scan]


def scan_split(title: str, samples: Samples, data: DataConfig, workers: int) -> Split:
    """Scan every image of a split."""
    chunks = [list(range(begin, min(begin + CHUNK, len(samples)))) for begin in range(0, len(samples), CHUNK)]
    loader = DataLoader(
        _Scanner(samples, data),
        batch_sampler=chunks,
        num_workers=min(workers, len(chunks)),
        prefetch_factor=PREFETCH if workers and chunks else None,
        collate_fn=list,
        generator=torch.Generator(),
        persistent_workers=bool(workers and chunks),
    )
    scans: list[Scan] = []

    def next_images() -> str:
        others = CHUNK * workers * PREFETCH - 1
        return f"{samples.name(len(scans))} or one of the next {others} images of the {title} split"

    with warnings.catch_warnings(action="ignore"), progress_bar(len(samples), "images", title) as bar:
        processes = LoadingProcesses(loader, next_images) if loader.num_workers else None
        try:
            for chunk in processes or loader:
                scans.extend(chunk)
                bar.update(len(chunk))
        except TrainingError as death:
            raise TrainingError(f"{death} If an image caused this, it is {next_images()}.") from None
        finally:
            if processes is not None:
                processes.end()
    return Split(title, samples, scans)


class _Scanner(Dataset[Any]):
    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples, self.channels = samples, data.IMAGE_CHANNELS
        # Images are decoded whole: training's fastest decoders may stop at the end of a crop and miss damage behind it.
        # And they are resized whole, to the thumbnails that are compared with each other.
        whole = {"CROP": "none", "IMAGE_SIZE": SIDE}
        self.pixels = Pixels(data.model_copy(update=whole), train=False)
        self.by_simplejpeg = decoder_of_jpeg() == "simplejpeg"
        self.out = torch.empty(data.IMAGE_CHANNELS, SIDE, SIDE, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> list[Scan]:
        self.samples.prefetch(indices)
        return [self._scan(index) for index in indices]

    def _scan(self, index: int) -> Scan:
        read: list[Encoded] = []

        def decode() -> None:
            read[:] = [self.samples.read(index)]
            self.pixels(read[0], self.out)

        failure = failure_of(decode)
        encoded = read[0] if read else None
        if failure is not None:
            problem = next((kind for kind, reason in KINDS.items() if reason in failure.reason), failure.kind)
            return Scan(problem, failure.reason, b"", "", (0, 0))
        assert encoded is not None
        mode, size, damage = "", encoded.shape[1::-1] if isinstance(encoded, np.ndarray) else (0, 0), ""
        if not isinstance(encoded, np.ndarray):
            header = header_of(encoded, self.channels)
            mode, size = header.mode, header.size
            damage = damage_of(encoded) if self.by_simplejpeg and encoded.startswith(JPEG_START) else ""
        digest = hashlib.blake2b(bytes(encoded), digest_size=16).digest()
        return Scan("", "", digest, mode, size, damage, self.out.numpy().tobytes())
