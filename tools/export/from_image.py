"""-to onnx -with_resize: a file that takes an image of any size, and how it is checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from PIL import Image
from torch import Tensor

from datasets.base import Samples
from datasets.decoding.reader import Reader
from datasets.decoding.stored import Box
from datasets.given import open_given
from engine.saved.trained import Trained
from tools.export.check import CheckImages, reference_logits
from tools.export.formats import Export, Onnx, run_onnx
from tools.export.outputs import outputs_of
from tools.export.resize import ADVICE, IMAGE, PIXELS, check_resizable, prepend, resize_model
from utils.config.data import DataConfig
from utils.errors import TrainingError
from utils.log import log
from utils.text import counted

OUTPUT = "probabilities"
SHAPES = {"portrait": (1.1, 2.03), "landscape": (2.03, 1.1), "tiny": (0.3, 0.2), "exact": (1.0, 1.0)}
"""Width and height of made images, as fractions of the model's"""
RESHAPED = 4
"""Images that are made into these shapes"""
CLEAR = 0.1
"""Distance between probabilities from which on a prediction is clear"""


@dataclass(frozen=True)
class WholeImages(CheckImages):
    """Images of any size. `pixels` are those that the nodes of the file make from them."""

    sources: tuple[Callable[[], np.ndarray], ...] = ()
    """Each returns an image, H x W x 3"""
    differences: dict[str, Any] | None = None
    """How far pixels and predictions are from those of validation"""
    output: ClassVar[str] = OUTPUT

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        for source in self.sources:
            yield torch.from_numpy(np.array(source()))[None]

    def example(self, trained: Trained, with_preprocess: bool) -> Tensor:
        return self.pixels[:1].contiguous()

    def about(self) -> dict[str, Any]:
        return {"input": IMAGE, "output": OUTPUT, "differences": self.differences}


class OnnxFromImage(Onnx):
    """The file of `Onnx`, with nodes before it that resize one image."""

    output = OUTPUT
    any_number = False

    def finish(self, export: Export, model: ir.Model) -> None:
        prepend(export.trained.config.DATA, model)

    def summary(self, export: Export) -> str:
        return f"'{IMAGE}' H x W x 3 (uint8, RGB, any size) to '{OUTPUT}' {export.metadata['num_classes']}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        images = (batch[0].numpy() for batch in batches)
        return torch.stack([torch.from_numpy(row) for row in run_onnx(str(file), file.name, IMAGE, OUTPUT, images)])


def whole_images(trained: Trained, images: CheckImages) -> WholeImages:
    """The same images before validation resizes them, and some of them in other shapes.

    Raises TrainingError if the pixels of the file lead to other predictions than those of validation.
    """
    data = trained.config.DATA
    check_resizable(data)
    stored, own, names = images.samples, images.pixels, list(images.names)
    if stored is None:  # held in memory, or noise: only made images have another size
        sources, bases = [], [_rgb(row.permute(1, 2, 0).numpy()) for row in own[:RESHAPED]]
        own, names = own[:0], []
    else:
        sources = [functools.partial(_decoded, data, stored, index) for index in images.indices]
        bases = [source() for source in sources[:RESHAPED]]
    made = {f"{name} {number}": _shaped(base, name, data) for number, base in enumerate(bases) for name in SHAPES}
    own = torch.cat([own, *(_as_validation(data, image)[None] for image in made.values())])
    sources = (*sources, *(functools.partial(np.asarray, image) for image in made.values()))
    rows = run_onnx(resize_model(data).SerializeToString(), "resizing", IMAGE, PIXELS, (source() for source in sources))
    pixels = torch.cat([torch.from_numpy(row) for row in rows])
    where = f"{images.source} ({len(made)} of them resized to be {', '.join(SHAPES)})"
    names += list(made)
    differences = _differences(trained, CheckImages(own, names, where), CheckImages(pixels, names, where))
    return WholeImages(pixels, names, where, sources=sources, differences=differences)


def _differences(trained: Trained, own: CheckImages, made: CheckImages) -> dict[str, Any]:
    """Differences of pixels and probabilities, also for the log."""
    outputs = outputs_of(trained)
    wanted, found = (outputs.probabilities(reference_logits(trained, images)) for images in (own, made))
    pixels = (own.pixels.short() - made.pixels.short()).abs()
    percent = 100 * float((pixels > 0).double().mean())
    most, worst = int(pixels.max()), float((wanted - found).abs().max())
    other = outputs.clearly_other(trained, wanted, found, CLEAR)
    if bool(other.any()):
        row = int(torch.nonzero(other)[0])
        raise TrainingError(
            f"-with_resize: resized by ONNX, {int(other.sum())} of {counted(len(own.names), 'image')} {own.source} are "
            f"clearly predicted otherwise than in validation, such as {own.names[row]}: pixels differ by up to {most} "
            f"of 255, probabilities by up to {worst:.2g}. {ADVICE}"
        )
    log.info(
        "Resized by ONNX, pixels differ from those of validation by at most %d of 255 (%.2f %% of them), probabilities "
        "by at most %.1e.",
        *(most, percent, worst),
    )
    return {"images": len(own.names), "pixels": most, "pixels_percent": round(percent, 4), "probabilities": worst}


def _decoded(data: DataConfig, samples: Samples, index: int) -> np.ndarray:
    """A stored image, upright and without transparency."""
    stored = Reader(data).open(samples.read(index))
    return _rgb(stored.cut(Box(0, 0, stored.width, stored.height)))


def _rgb(pixels: np.ndarray) -> np.ndarray:
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels


def _shaped(image: np.ndarray, name: str, data: DataConfig) -> np.ndarray:
    wide, high = (max(1, round(share * data.IMAGE_SIZE)) for share in SHAPES[name])
    return np.asarray(Image.fromarray(image).resize((wide, high), Image.Resampling.BICUBIC))


def _as_validation(data: DataConfig, image: np.ndarray) -> Tensor:
    out = torch.empty(data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, dtype=torch.uint8)
    open_given([], data).pixels(image, out)
    return out
