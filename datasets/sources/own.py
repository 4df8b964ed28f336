"""Data sets in the user's own code: a function that returns the images, labels and classes of a split."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import Encoded, Part, Samples, Source
from datasets.labels import check_class_count
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.own_code import OWN_ERRORS, own_lines
from utils.text import one_line
from vitamp.files import read_regular
from vitamp.registry import Own, own_named


class OwnSamples(Samples):
    """A split that the user's function returned. Each image is the path of a file or an array of pixels."""

    def __init__(self, name: str, images: Sequence[str | np.ndarray], labels: np.ndarray, classes: list[str]) -> None:
        self._name = name
        self._images = images
        self.labels = labels
        self.classes = classes

    def read(self, index: int) -> Encoded:
        image = self._images[index]
        return read_regular(image, self.most_bytes) if isinstance(image, str) else image

    def name(self, index: int) -> str:
        image = self._images[index]
        return one_line(image) if isinstance(image, str) else f"{self._name} {index}"

    def size(self, index: int) -> int:
        image = self._images[index]
        return super().size(index) if isinstance(image, str) else image.nbytes


def source_of_own(own: Own) -> Source:
    """Make the source of a data set that a file of USE has registered."""
    return Source(_samples, reads_path=own.takes("data_path"))


def _samples(data: DataConfig, part: Part, num_classes: int) -> OwnSamples:
    """Return the split that the user's function makes. UserError if it has more than `num_classes` classes."""
    identity = repr(own_named("dataset", data.DATASET))
    samples = _opened(data.DATASET, data.DATA_PATH, part, identity)
    check_class_count(len(samples.classes or ()), num_classes, f"The data set {data.DATASET}")
    return samples


@cache
def _opened(name: str, path: str | None, part: Part, identity: str) -> OwnSamples:  # noqa: ARG001 - for the cache
    """Call the user's function for a split, and check what it returns. Later calls return the same samples.

    `path`: DATA.DATA_PATH. `identity`: text of the registered function with its settings; only the cache uses it. With
    another text, the function is called again.
    """
    own = own_named("dataset", name)
    assert own is not None  # a data set is only opened if its function is registered
    where = f"{own.file}: data set {name}, split {part}"
    images, labels, classes = _returned(own, path, part, where)
    if not images or labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{where}: {len(images)} images and labels of shape {labels.shape} ({labels.dtype}); there must be a "
            "whole number per image, and at least one image."
        )
    for index, label in enumerate(labels.tolist()):
        if not 0 <= label < len(classes):
            last = f"{len(classes)} classes are returned, so labels go from 0 to {len(classes) - 1}"
            raise UserError(f"{where}, image {index}: the label is {label}, but {last}.")
    # Contiguous, because resizing reads no negative strides, as those of `pixels[:, :, ::-1]`.
    paths_or_pixels = [str(image) if isinstance(image, str | Path) else np.ascontiguousarray(image) for image in images]
    for index, image in enumerate(paths_or_pixels):
        if isinstance(image, str):  # a path, which is checked when the file is read
            continue
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
            raise UserError(
                f"{where}, image {index}: an array of {image.dtype} of shape {image.shape}. Images are paths, or "
                "arrays of uint8 of height x width x 1 or 3 channels."
            )
    return OwnSamples(f"{own.name}, {part} image", paths_or_pixels, labels.astype(np.int64), classes)


def _returned(own: Own, path: str | None, part: Part, where: str) -> tuple[list[Any], np.ndarray, list[str]]:
    """Call the user's function, and return images, labels and names of classes. Its errors become UserErrors."""
    try:
        arguments = {"data_path": path} if own.takes("data_path") else {}
        images, labels, classes = own.made()(split=part, **arguments)
        return list(images), np.asarray(labels), [str(name) for name in classes]
    except UserError:
        raise
    except OWN_ERRORS as error:
        message = own_lines(error) or f"{where}: must return (images, labels, classes): {error}"
        raise UserError(message) from None
