"""Mean, standard deviation and range of the training split's pixels, for settings that are `auto`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial, reduce

import numpy as np
import torch

from datasets import open_dataset, source_of
from datasets.base import Box, Encoded, Samples
from datasets.damage import Failure, allowed, failure_or
from datasets.decoding import Reader, decoding_errors
from engine.evaluation.features import contents_of
from engine.inputs.auto import of_any_size
from utils.cache import cache_folder, process_lock
from utils.config import Loaded
from utils.config.data import DataConfig
from utils.config.keys import MEASURED, value_of
from utils.config.kinds import AUTO
from utils.config.read import Entry
from utils.errors import UserError
from utils.log import log
from utils.machine.cpus import cores
from vitamp.bands import is_dicom
from vitamp.files import parse_json, write_atomically

FIRST = 8
"""Images that are read where nothing is measured, to find files that do not fit the settings"""
BLOCK = 1024
"""Images whose results are held at once"""
RANGE, MEAN, STD = MEASURED


@dataclass(frozen=True)
class Moments:
    """Of the stored values of some images, by channel, in float64."""

    number: int
    """Pixels"""
    mean: list[float]
    squares: list[float]
    """Sum of the squared differences from the mean"""
    low: float
    high: float

    def __add__(self, other: Moments) -> Moments:
        """Of the images of both, by the formula of Chan, Golub and LeVeque, which loses nothing to cancellation."""
        number = self.number + other.number
        apart = np.subtract(other.mean, self.mean)
        mean = self.mean + apart * (other.number / number)
        squares = np.add(self.squares, other.squares) + apart**2 * (self.number * other.number / number)
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Moments(number, mean.tolist(), squares.tolist(), low, high)


def with_measurements(loaded: Loaded) -> Loaded:
    """Measure what is `auto`. Of images that are no photographs, read the first ones at least."""
    config, data = loaded.config, of_any_size(loaded.config.DATA)
    wanted = [key for key in MEASURED if value_of(config, key) == AUTO]
    if config.EVAL:
        if wanted:
            raise UserError(f"{wanted[0]} auto: an evaluation measures nothing; give the numbers of the training.")
        return loaded
    split = open_dataset(data, True, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))
    samples = split.single_images() or vars(split).get("samples")
    name = source_of(config.DATA)
    if not isinstance(samples, Samples):
        if wanted:
            raise UserError(f"{wanted[0]} auto: {name} has no images that can be measured; give numbers.")
        return loaded
    notes = []
    if not data.is_plain and isinstance(first := samples.read(0), bytes) and is_dicom(first):
        notes.append("DICOM: slope and intercept are applied; where there is a window, its ends become 0 and 1")
    if not wanted:
        _moments(samples, data, min(FIRST, len(samples)))
        return loaded.with_values({}, notes)
    file = cache_folder(data, "measured") / f"{contents_of(split)[:32]}-{data.IMAGE_CHANNELS}-{data.BITS}.json"
    with process_lock(file.with_suffix(".lock"), f"measures {name}"):
        if file.is_file():
            found = Moments(**parse_json(file.read_bytes()))
        else:
            log.info("Measuring %s on %s training images of %s.", ", ".join(wanted), f"{len(samples):,}", name)
            found = _moments(samples, data, len(samples))
            write_atomically(file, json.dumps(asdict(found)))
    if found.low == found.high:
        raise UserError(f"{name}: all values of all training images are {found.low:g}; there is nothing to learn.")
    low, high = (found.low, found.high) if RANGE in wanted else config.DATA.value_range
    mean = np.subtract(found.mean, low) / (high - low)
    std = np.sqrt(np.divide(found.squares, found.number)) / (high - low)
    if STD in wanted and (blank := np.flatnonzero(std == 0)).size:
        raise UserError(f"{name}: channel {blank[0] + 1} has the same value in all training images; leave it out.")
    values = {RANGE: (low, high), MEAN: tuple(mean.tolist()), STD: tuple(std.tolist())}
    bits = f" ({math.ceil(math.log2(found.high + 1))} of 16 bits)" if data.BITS == 16 else ""
    words = ", ".join(f"{key} [{', '.join(f'{value:.4g}' for value in values[key])}]" for key in wanted)
    span = f"of values from {found.low:g} to {found.high:g}{bits}"
    notes.append(f"Measured on {len(samples):,} training images, {span}: {words}")
    return loaded.with_values({key: Entry(values[key], f"measured on {name}") for key in wanted}, notes)


def _moments(samples: Samples, data: DataConfig, count: int) -> Moments:
    """Of the first `count` images; UserError if more cannot be read than DATA.MAX_BAD allows."""
    reader, broken = Reader(data), list[str]()

    def of_images() -> Iterator[Moments]:
        with ThreadPoolExecutor(cores()) as threads:
            for begin in range(0, count, BLOCK):
                block = range(begin, min(begin + BLOCK, count))
                samples.prefetch(block)
                for index, found in zip(block, threads.map(partial(_of_image, samples, reader), block), strict=True):
                    if isinstance(found, Moments):
                        yield found
                        continue
                    broken.append(f"{samples.name(index)}: {found.reason}")
                    if len(broken) > allowed(data.MAX_BAD, count):
                        more = f" So are {len(broken) - 1} before." if len(broken) > 1 else ""
                        raise UserError(
                            f"The training image {broken[0]}.{more} Correct the images or the settings, or list the "
                            "images in DATA.EXCLUDE; DATA.MAX_BAD allows some."
                        )

    return reduce(Moments.__add__, of_images())


def _of_image(samples: Samples, reader: Reader, index: int) -> Moments | Failure:
    def read() -> np.ndarray:
        encoded: Encoded = samples.read(index)
        with decoding_errors(encoded):
            stored = reader.open(encoded)
            return stored.cut(Box(0, 0, stored.width, stored.height))

    pixels = failure_or(read)
    if isinstance(pixels, Failure):
        return pixels
    values = pixels.reshape(-1, pixels.shape[2]).astype(np.float64)
    if values.shape[1] < reader.channels:  # grey, repeated
        values = values.repeat(reader.channels, axis=1)
    mean = values.mean(axis=0)
    squares = ((values - mean) ** 2).sum(axis=0)
    return Moments(len(values), mean.tolist(), squares.tolist(), float(values.min()), float(values.max()))
