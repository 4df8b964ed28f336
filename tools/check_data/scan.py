"""Scan of a data set: every image is read and decoded once, in loading processes."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from datasets.base import Encoded, Samples
from datasets.damage.retry import failure_of
from datasets.decoding.choice import decoder_of
from datasets.decoding.header import header_of
from datasets.decoding.jpeg import damage_of
from datasets.decoding.reader import JPEG_START
from datasets.loading.loader import start_worker
from datasets.loading.workers import LoadingProcesses
from datasets.transforms.pixels import Pixels
from tools.check_data.near import SIDE
from tools.common.progress import progress_bar
from utils.config.data import DataConfig
from utils.errors import TrainingError

CHUNK = 32
PREFETCH = 2
"""Chunks per loading process that are under way at once."""


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
        worker_init_fn=start_worker,
        generator=torch.Generator(),
        persistent_workers=bool(workers and chunks),
    )
    scans: list[Scan] = []
    with warnings.catch_warnings(action="ignore"), progress_bar(len(samples), "images", title) as bar:
        processes = LoadingProcesses(loader) if loader.num_workers else None
        try:
            for chunk in processes or loader:
                scans.extend(chunk)
                bar.update(len(chunk))
        except TrainingError as death:
            raise TrainingError(
                f"{death} If an image caused this, it is {samples.name(len(scans))} or one of the next "
                f"{CHUNK * workers * PREFETCH - 1} images of the {title} split."
            ) from None
        finally:
            if processes is not None:
                processes.end()
    return Split(title, samples, scans)


class _Scanner(Dataset[Any]):
    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples, self.channels = samples, data.IMAGE_CHANNELS
        # Images are decoded whole: training's fastest decoders may stop at the end of a crop and miss damage behind it.
        # And they are resized whole, to the thumbnails that are compared with each other.
        decoder = "pil" if data.DECODER == "pil" else "auto"
        whole = {"DECODER": decoder, "CROP": "none", "IMAGE_SIZE": SIDE}
        self.pixels = Pixels(data.model_copy(update=whole), train=False)
        self.by_simplejpeg = decoder_of(data.model_copy(update={"DECODER": "auto"})) == "simplejpeg"
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
            problem = failure.kind
            if problem == "damaged" and encoded is not None and not isinstance(encoded, np.ndarray):
                problem = _kind_of_damage(bytes(encoded))
            return Scan(problem, failure.reason, b"", "", (0, 0))
        assert encoded is not None
        if isinstance(encoded, np.ndarray):
            height, width, _ = encoded.shape
            return Scan("", "", _digest(encoded.tobytes()), "", (width, height), "", self.out.numpy().tobytes())
        damage = damage_of(encoded) if self.by_simplejpeg and encoded.startswith(JPEG_START) else ""
        header = header_of(encoded, self.channels)
        return Scan("", "", _digest(encoded), header.mode, header.size, damage, self.out.numpy().tobytes())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _kind_of_damage(encoded: bytes) -> str:
    if not encoded:
        return "empty"
    try:
        with Image.open(io.BytesIO(encoded)):
            return "damaged"
    except UnidentifiedImageError:
        return "no image"
    except Image.DecompressionBombError:
        return "too large"
    except Exception:  # a damaged header can raise nearly anything
        return "damaged"
