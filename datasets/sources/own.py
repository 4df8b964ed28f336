"""A data set of the user's own: a function that returns the images, labels and classes of a split."""

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
    """Paths of image files, or arrays of pixels."""

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
    """The data set that a file of USE has registered."""
    return Source(_samples, reads_path=own.takes("data_path"))


def _samples(data: DataConfig, part: Part, num_classes: int) -> OwnSamples:
    samples = _opened(data.DATASET, data.DATA_PATH, part, repr(own_named("dataset", data.DATASET)))
    check_class_count(len(samples.classes or ()), num_classes, f"The data set {data.DATASET}")
    return samples


@cache
def _opened(name: str, path: str | None, part: Part, own_is: str) -> OwnSamples:  # noqa: ARG001 - with its settings
    """What the function returns for a split, checked."""
    own = own_named("dataset", name)
    assert own is not None  # the registry found it
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
    # Resizing reads no negative strides, as those of `pixels[:, :, ::-1]`.
    found = [str(one) if isinstance(one, str | Path) else np.ascontiguousarray(one) for one in images]
    for index, one in enumerate(found):
        if not isinstance(one, str) and (one.dtype != np.uint8 or one.ndim != 3 or one.shape[2] not in (1, 3)):
            raise UserError(
                f"{where}, image {index}: an array of {one.dtype} of shape {one.shape}. Images are paths, or arrays "
                "of uint8 of height x width x 1 or 3 channels."
            )
    return OwnSamples(f"{own.name}, {part} image", found, labels.astype(np.int64), classes)


def _returned(own: Own, path: str | None, part: Part, where: str) -> tuple[list[Any], np.ndarray, list[str]]:
    """Images, labels and classes that the function returns."""
    try:
        given = {"data_path": path} if own.takes("data_path") else {}
        images, labels, classes = own.made()(split=part, **given)
        return list(images), np.asarray(labels), [str(one) for one in classes]
    except UserError:
        raise
    except OWN_ERRORS as error:
        what = own_lines(error) or f"{where}: must return (images, labels, classes): {error}"
        raise UserError(what) from None
