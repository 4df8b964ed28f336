"""Check of an exported file: its logits on real images are compared with those of the trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from datasets import PADDING, ImageDataset
from datasets.base import TITLES, Samples
from datasets.given import open_given
from datasets.sources.walk import SkippedFiles, images_below
from engine.saved.predictions import name_of, split_of_run
from engine.saved.trained import Trained
from tools.common.progress import progress_bar
from tools.export.outputs import outputs_of
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.text import counted

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2}
"""Fractions of the largest output; docs/benchmarks.md has measured differences."""
LOGITS = "logits"
BATCH = 32
WORST_SHOWN = 3
NOISE_IMAGES = 16


@dataclass(frozen=True)
class CheckImages:
    pixels: Tensor
    """uint8, N x C x S x S"""
    names: list[str]
    source: str
    """Where they are from, for the log"""
    samples: Samples | None = None
    """The stored images, unless they are held in memory"""
    indices: tuple[int, ...] = ()
    """Index of each in `samples`"""
    output: ClassVar[str] = LOGITS
    """What the file computes of them"""

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        """Inputs of the exported file. The first batch has one image, since the file must take any number."""
        for part in (self.pixels[:1], *self.pixels[1:].split(BATCH)):
            if len(part):
                yield (part if with_preprocess else trained.inputs(part)).contiguous()

    def example(self, trained: Trained, with_preprocess: bool) -> Tensor:
        """Input to export with."""
        first = next(self.batches(trained, with_preprocess))
        return torch.cat([first, first])

    def about(self) -> dict[str, Any]:
        """What the file says of its input besides."""
        return {}


def images_for_check(trained: Trained, folder: Path | None, count: int | None, part: str = "val") -> CheckImages:
    """`count` images, evenly chosen from the folder or a split of the run's data; noise if that cannot be read."""
    if folder is not None:
        return _choose(_open_folder(trained, folder), count, f"in {folder}")
    try:
        dataset = split_of_run(trained, part)
    except UserError as error:
        log.warning("The images of the run cannot be read: %s", error)
        log.warning("The export is checked on generated noise. To check it on real images: -images DIR")
        return _noise(trained)
    return _choose(dataset, count, f"of the run's {'data' if part == 'all' else TITLES[part]}")


def reference_logits(trained: Trained, images: CheckImages) -> Tensor:
    """Logits of the trained model, with which those of every exported file are compared."""
    logits = []
    with progress_bar(len(images.pixels), "images", "reference") as bar:
        for part in images.pixels.split(BATCH):
            logits.append(trained.logits(part))
            bar.update(len(part))
    return torch.cat(logits)


def compare(trained: Trained, images: CheckImages, expected: Tensor, logits: Tensor, tolerance: float) -> str:
    """Describe how well `logits` agree with `expected`; raise TrainingError beyond the tolerance."""
    scale = float(expected.abs().max()) or 1.0
    errors = (logits - expected).abs() / scale
    worst = float(errors.max())
    if not worst <= tolerance:  # also for NaN
        raise TrainingError(_describe_differences(trained, images, (expected, logits), errors, tolerance))
    return (
        f"checked on {counted(len(logits), 'image')} {images.source}: largest difference {worst:.1e} x the largest "
        f"output ({tolerance:g} allowed), "
        + outputs_of(trained).agreement(trained, images.names, expected, logits, images.output == LOGITS)
    )


def _describe_differences(
    trained: Trained, images: CheckImages, outputs: tuple[Tensor, Tensor], errors: Tensor, tolerance: float
) -> str:
    expected, logits = outputs
    # NaN counts as the largest difference.
    order = errors.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten().argsort(descending=True)
    lines = []
    for place in order[:WORST_SHOWN].tolist():
        row, label = divmod(place, errors.shape[1])
        lines.append(
            f"  {images.names[row]}, class {trained.name_of(label)}: {float(logits[row, label]):.6g} instead of "
            f"{float(expected[row, label]):.6g}"
        )
    return (
        f"the outputs differ from the model's by up to {float(errors.max()):.2g} times the largest output on "
        f"{len(images.names)} images {images.source}, but only {tolerance:g} is allowed (-tolerance). "
        "Largest differences:\n" + "\n".join(lines)
    )


def _open_folder(trained: Trained, folder: Path) -> ImageDataset:
    if not folder.is_dir():
        raise UserError(f"-images {folder}: not a folder; name a folder with images.")
    skipped = SkippedFiles()
    paths = [str(folder / path) for path in images_below(str(folder), skipped)]
    skipped.warn(str(folder))
    if not paths:
        raise UserError(f"-images {folder}: no images are in it; name a folder with images.")
    return open_given(paths, trained.config.DATA)


def _choose(dataset: ImageDataset, most: int | None, source: str) -> CheckImages:
    """Readable ones of `most` evenly chosen images."""
    count = len(dataset) if most is None else min(most, len(dataset))
    chosen = np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist()
    parts, indices = [], []
    for first in range(0, count, BATCH):
        batch = dataset.__getitems__([(0, index) for index in chosen[first : first + BATCH]])
        readable = batch.indices != PADDING
        parts.append(batch.images[readable])
        indices += batch.indices[readable].tolist()
    if broken := dataset.take_broken():
        log.warning("%d images cannot be read and are left out, such as %s", len(broken), broken[0].name)
    if not indices:
        raise UserError(f"none of the {count} images {source} can be read; name other images with -images DIR.")
    names = [name_of(dataset, index) for index in indices]
    return CheckImages(torch.cat(parts), names, source, dataset.single_images(), tuple(indices))


def _noise(trained: Trained) -> CheckImages:
    data = trained.config.DATA
    size = (NOISE_IMAGES, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = [f"noise {number}" for number in range(NOISE_IMAGES)]
    return CheckImages(pixels, names, "of generated noise, since the real ones cannot be read")
