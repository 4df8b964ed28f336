"""Images that a person names, without labels, made into pixels exactly as validation makes those of its own."""

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
    """Files anywhere. All have the label 0, which means nothing."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths, self.labels = PathTable(paths), np.zeros(len(paths), dtype=np.int64)

    def read(self, index: int) -> bytes:
        return read_regular(self.paths[index])

    def name(self, index: int) -> str:
        return self.paths[index]


def open_given(paths: Sequence[str], data: DataConfig) -> Images:
    """Those files, in their order."""
    data = data.model_copy(update={"EXCLUDE": None, "DECODER": _decoder(data)})
    images = Images(GivenSamples(paths), data, train=False, seed=0)
    images.pixels = _single(data) or images.pixels
    return images


def squeezes(data: DataConfig) -> bool:
    """Whether validation shows the whole of an image, squeezed, and not its middle."""
    return getattr(_single(data), "squeezed", data.CROP == "none")


def _single(data: DataConfig) -> Callable[[Encoded, Tensor], None] | None:
    """What makes the pixels of an image of sets that lie in memory."""
    source = SOURCES.get(data.DATASET)
    return source.single(data) if source is not None and source.single is not None else None


def _decoder(data: DataConfig) -> str:
    """The one of training, or what there is: elsewhere than where the model was trained, it may not be installed."""
    try:
        check_decoder(data)
    except UserError as error:
        log.warning("%s Until then the pixels differ a little from those of training.", error)
        return "auto"
    return data.DECODER


class Unread(BrokenInValidation):
    """The images that could not be read, by number, for as long as nobody has asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[int, str] = {}

    def met(self, found: Iterable[Broken]) -> None:
        self._reasons |= {broken.sample: broken.reason for broken in found}

    def take(self, index: int) -> str:
        """Why it could not be read."""
        return self._reasons.pop(index)
