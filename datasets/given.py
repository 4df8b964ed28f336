"""Unlabelled image files, preprocessed exactly as in validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from datasets.base import Broken, Encoded, Samples
from datasets.damage.broken import BrokenInValidation
from datasets.decoding.reader import check_decoder
from datasets.images import Images
from datasets.registry import SOURCES
from datasets.sources.files import PathTable
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import read_regular
from utils.log import log


class GivenSamples(Samples):
    """Image files in any folder. Their labels are all 0, as a placeholder."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths, self.labels = PathTable(paths), np.zeros(len(paths), dtype=np.int64)

    def read(self, index: int) -> bytes:
        return read_regular(self.paths[index])

    def name(self, index: int) -> str:
        return self.paths[index]


def open_given(paths: Sequence[str], data: DataConfig) -> Images:
    """A data set of these files, in this order."""
    data = data.model_copy(update={"EXCLUDE": None, "DECODER": _available_decoder(data)})
    images = Images(GivenSamples(paths), data, train=False, seed=0)
    images.pixels = _pixels_of_source(data) or images.pixels
    return images


def squeezes(data: DataConfig) -> bool:
    """Whether validation squeezes the whole image into the square instead of cropping its centre."""
    return getattr(_pixels_of_source(data), "squeezed", data.CROP == "none")


def crop_of(data: DataConfig) -> tuple[str, float]:
    """How validation crops, in timm's words: `crop_mode` and `crop_pct`."""
    return ("squash", 1.0) if squeezes(data) else (data.CROP_MODE, data.CROP_PCT)


def _pixels_of_source(data: DataConfig) -> Callable[[Encoded, Tensor], None] | None:
    """See `Source.single`; None for sources without their own preprocessing."""
    source = SOURCES.get(data.DATASET)
    return source.single(data) if source is not None and source.single is not None else None


def _available_decoder(data: DataConfig) -> str:
    """The decoder of training; `auto` with a warning if it is not installed on this machine."""
    try:
        check_decoder(data)
    except UserError as error:
        log.warning("%s PIL decodes JPEG files here, so pixels differ slightly from those of training.", error)
        return "auto"
    return data.DECODER


class Unread(BrokenInValidation):
    """Images that could not be read, by index, until their reason is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[int, str] = {}

    def add(self, images: Iterable[Broken]) -> None:
        self._reasons |= {broken.sample: broken.reason for broken in images}

    def take(self, index: int) -> str:
        """Remove and return the reason why an image could not be read."""
        return self._reasons.pop(index)
