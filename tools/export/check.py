"""scripts/export.py: real images, and whether what was written says the same of them as the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datasets import PADDING, ImageDataset
from datasets.given import open_given
from engine.saved.predictions import name_of, validation_part
from engine.saved.trained import Trained
from tools.common.progress import progress_bar
from utils.errors import TrainingError, UserError
from utils.log import log

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2}
"""Of the largest output; docs/export.md has what was measured."""
AT_ONCE = 32
NAMED = 3
NOISE_IMAGES = 16


@dataclass(frozen=True)
class CheckImages:
    pixels: Tensor
    """uint8, N x C x S x S"""
    names: list[str]
    words: str
    """What they are"""

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        """Inputs of the exported file. The first batch has one image, since the file must take any number."""
        for part in (self.pixels[:1], *self.pixels[1:].split(AT_ONCE)):
            if len(part):
                yield (part if with_preprocess else trained.inputs(part)).contiguous()


def images_for_check(trained: Trained, folder: Path | None, most: int | None) -> CheckImages:
    """Evenly out of the folder, else of the validation part, else noise."""
    if folder is not None:
        return _some(_folder(trained, folder), most, f"in {folder}")
    try:
        dataset = validation_part(trained)
    except UserError as error:
        log.warning("The run's validation images cannot be had: %s", error)
        log.warning("The check is made on generated noise. To have it made on real images, name a folder: -images DIR")
        return _noise(trained)
    return _some(dataset, most, "of the run's validation part")


def reference_logits(trained: Trained, images: CheckImages) -> Tensor:
    """Logits of the trained model, with which every exported file is compared."""
    logits = []
    with progress_bar(len(images.pixels), "images", "reference") as bar:
        for part in images.pixels.split(AT_ONCE):
            logits.append(trained.logits(part))
            bar.update(len(part))
    return torch.cat(logits)


def compare(trained: Trained, images: CheckImages, wanted: Tensor, got: Tensor, tolerance: float) -> str:
    """A sentence of how near `got` is; TrainingError where that is not near enough."""
    scale = float(wanted.abs().max()) or 1.0
    errors = (got - wanted).abs() / scale
    worst = float(errors.max())
    if not worst <= tolerance:  # nor where it is no number
        raise TrainingError(_differing(trained, images, (wanted, got), errors, tolerance))
    same = wanted.argmax(1) == got.argmax(1)
    count = f"{len(same)} images {images.words}"
    words = f"checked on {count}: outputs differ by {worst:.1e} of the largest at most ({tolerance:g} allowed), top-1 "
    if bool(same.all()):
        return f"{words}the same on all"
    row = int(torch.nonzero(~same)[0])
    return (
        f"{words}another on {int((~same).sum())}, where two classes are nearly even: {images.names[row]} is "
        f"{trained.name_of(int(wanted[row].argmax()))} to the model, {trained.name_of(int(got[row].argmax()))} here"
    )


def _differing(
    trained: Trained, images: CheckImages, outputs: tuple[Tensor, Tensor], errors: Tensor, tolerance: float
) -> str:
    wanted, got = outputs
    # What is no number is the worst of all.
    order = errors.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten().argsort(descending=True)[:NAMED].tolist()
    lines = []
    for place in order:
        row, label = divmod(place, errors.shape[1])
        lines.append(
            f"  {images.names[row]}, class {trained.name_of(label)}: {float(got[row, label]):.6g} instead of "
            f"{float(wanted[row, label]):.6g}"
        )
    return (
        f"the outputs differ from the model's by {float(errors.max()):.2g} of the largest, and {tolerance:g} is "
        f"allowed (-tolerance), on {len(images.names)} images {images.words}. They differ most in\n" + "\n".join(lines)
    )


def _folder(trained: Trained, folder: Path) -> ImageDataset:
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings) if folder.is_dir() else []
    if not found:
        what = "holds no image" if folder.is_dir() else "is no folder"
        raise UserError(f"-images {folder}: {what}; name a folder with images.")
    return open_given([str(path) for path in found], trained.config.DATA)


def _some(dataset: ImageDataset, most: int | None, where: str) -> CheckImages:
    count = len(dataset) if most is None else min(most, len(dataset))
    chosen = np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist()
    parts, read = [], []
    for first in range(0, count, AT_ONCE):
        batch = dataset.__getitems__([(0, index) for index in chosen[first : first + AT_ONCE]])
        good = batch.indices != PADDING
        parts.append(batch.images[good])
        read += batch.indices[good].tolist()
    if broken := dataset.take_broken():
        log.warning("%d images cannot be read and are left out, such as %s", len(broken), broken[0].name)
    if not read:
        raise UserError(f"none of the {count} images {where} can be read; name others by -images DIR.")
    return CheckImages(torch.cat(parts), [name_of(dataset, index) for index in read], where)


def _noise(trained: Trained) -> CheckImages:
    data = trained.config.DATA
    size = (NOISE_IMAGES, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = [f"noise {number}" for number in range(NOISE_IMAGES)]
    return CheckImages(pixels, names, "of generated noise, since no real one could be had")
