"""Looking at every image of a data set, in loading processes."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset
from tqdm import tqdm

from datasets.base import Encoded, Samples
from datasets.damage.retry import failure_of
from datasets.loading.loader import start_worker
from datasets.loading.workers import WatchedIterator, WatchedLoader, WorkerDied
from datasets.transforms.pixels import Pixels
from utils.config.data import DataConfig
from utils.errors import TrainingError

AT_ONCE = 32
AHEAD = 2
"""Times that, that a loading process is given before anything of it has come back."""


class Look(NamedTuple):
    """What was seen of one image."""

    kind: str
    """'' where it can be read, otherwise what sort of trouble it is"""
    reason: str
    digest: bytes
    """Equal for images whose bytes are equal; b'' where there are none"""
    mode: str
    """How its colours are stored, in a word or two; '' for what the model takes, or what cannot be told"""
    size: tuple[int, int]
    """Width and height; (0, 0) where they cannot be told"""


@dataclass
class Seen:
    """A part of a data set, and what was seen of each of its images."""

    title: str
    samples: Samples
    looks: list[Look]


def look_at(title: str, samples: Samples, data: DataConfig, workers: int) -> Seen:
    """Look at every image of one part."""
    chunks = [list(range(begin, min(begin + AT_ONCE, len(samples)))) for begin in range(0, len(samples), AT_ONCE)]
    loader = WatchedLoader(
        _Looker(samples, data),
        batch_sampler=chunks,
        num_workers=min(workers, len(chunks)),
        prefetch_factor=AHEAD if workers and chunks else None,
        collate_fn=list,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
    )
    looks: list[Look] = []
    with (
        warnings.catch_warnings(action="ignore"),
        tqdm(total=len(samples), desc=title, unit=" images", disable=None, leave=False) as bar,
    ):
        iterator = iter(loader)
        try:
            for found in iterator:
                looks.extend(found)
                bar.update(len(found))
        except WorkerDied as death:
            raise TrainingError(
                f"{death}. It was looking at one of the {AT_ONCE * workers * AHEAD} images of the {title} part from "
                f"{samples.name(len(looks))} on. Look at fewer at a time with -num_workers."
            ) from None
        finally:
            if isinstance(iterator, WatchedIterator):
                iterator.end(kill=True)
    return Seen(title, samples, looks)


class _Looker(Dataset[Any]):
    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples, self.channels = samples, data.IMAGE_CHANNELS
        # Every image is decoded whole: the fastest ways of training may stop where a crop ends.
        whole = {"DCT_SCALE": False, "DECODER": "pil" if data.DECODER == "pil" else "auto"}
        self.pixels = Pixels(data.model_copy(update=whole), train=False)
        self.out = torch.empty(data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> list[Look]:
        self.samples.expect(indices)
        return [self._look(index) for index in indices]

    def _look(self, index: int) -> Look:
        got: list[Encoded] = []

        def read() -> None:
            got[:] = [self.samples.read(index)]
            self.pixels(got[0], self.out)

        failure = failure_of(read)
        if failure is not None:
            known = failure.kind == "damaged" and got and not isinstance(got[0], np.ndarray)
            return Look(_kind_of_damage(bytes(got[0])) if known else failure.kind, failure.reason, b"", "", (0, 0))
        if isinstance(got[0], np.ndarray):
            height, width, _ = got[0].shape
            return Look("", "", _digest(got[0].tobytes()), "", (width, height))
        return Look("", "", _digest(got[0]), *_form(got[0], self.channels))


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


def _form(encoded: bytes, channels: int) -> tuple[str, tuple[int, int]]:
    """How the colours are stored, '' where it is what the model takes, and the size."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return _unusual(image, channels), image.size
    except Exception:  # read by another decoder than Pillow
        return "", (0, 0)


def _unusual(image: Image.Image, channels: int) -> str:
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        return "transparent"
    if image.mode.startswith("I") or image.mode == "F":
        return "16 bits and more"
    if image.mode in ("L", "1"):
        return "" if channels == 1 else "grey"
    names = {"RGB": "" if channels == 3 else "coloured", "P": "palette"}
    return names.get(image.mode, image.mode)
