"""Check of an exported file: its logits on real images are compared with those of the trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets import PADDING, ImageDataset
from datasets.base import TITLES, Samples
from datasets.given import open_given
from datasets.sources.files import SkippedFiles, images_below
from engine.trained.model import Trained, name_of, split_of_run
from tools.common.turns import progress_bar
from utils.errors import TrainingError, UserError, first_line
from utils.log import log
from utils.text import counted
from vitamp.metrics import ONE_LABEL

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2}
"""Fractions of the largest output; docs/benchmarks.md has measured differences."""
LOGITS, PROBABILITIES = "logits", "probabilities"
IMAGE = "image"
"""Input of a file that takes one image of any size"""
BATCH = 32
WORST_SHOWN = 3
NOISE_IMAGES = 16


class OneLabel:
    """How users of an exported file read its logits."""

    no_hub = ""
    """Why the Hub cannot have the model; '' if it can"""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.metadata: dict[str, Any] = {}
        """What the file says of its outputs; nothing, since a softmax is what everyone expects"""

    def clearly_other(self, expected: Tensor, found: Tensor, clear: float) -> Tensor:
        """Rows of probabilities whose prediction differs, although it is not within `clear` of another."""
        first, second = expected.topk(2, dim=1).values.unbind(1)
        return (expected.argmax(1) != found.argmax(1)) & (first - second > clear)

    def agreement(self, names: Sequence[str], expected: Tensor, found: Tensor, are_logits: bool) -> str:
        """Whether the file predicts what the model does for the images of these names."""
        other = torch.nonzero(expected.argmax(1) != found.argmax(1))[:, 0].tolist()
        if not other:
            return "top-1 the same on all"
        row = other[0]
        by_model, by_file = (self.trained.name_of(int(output[row].argmax())) for output in (expected, found))
        return (
            f"top-1 different on {len(other)}, where two classes are nearly equal: {names[row]} is {by_model} to the "
            f"model, {by_file} to the exported file"
        )


class SeveralLabels(OneLabel):
    no_hub = (
        "this model has several labels per image, but the Hub and timm's example code apply a softmax, which fits only "
        "one label; use safetensors, whose header names the sigmoid"
    )

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.thresholds = torch.tensor(trained.thresholds()[0], dtype=torch.float64)
        thresholds = self.thresholds.tolist()
        self.metadata = {"multi_label": True, "activation": "sigmoid", "class_thresholds": thresholds}

    def clearly_other(self, expected: Tensor, found: Tensor, clear: float) -> Tensor:
        other = (expected >= self.thresholds) != (found >= self.thresholds)
        return (other & ((expected - self.thresholds).abs() > clear)).any(1)

    def agreement(self, names: Sequence[str], expected: Tensor, found: Tensor, are_logits: bool) -> str:
        both = (output.double().sigmoid() if are_logits else output.double() for output in (expected, found))
        by_model, by_file = (output >= self.thresholds for output in both)
        other = int((by_model != by_file).any(1).sum())
        advice = "; apply a sigmoid to the logits" if are_logits else ""
        return f"labels {f'different on {other}' if other else 'the same on all'}{advice}"


def outputs_of(trained: Trained) -> OneLabel:
    return OneLabel(trained) if trained.task.kind == ONE_LABEL else SeveralLabels(trained)


@dataclass(frozen=True)
class CheckImages:
    pixels: Tensor
    """uint8, N x C x S x S. Of images of any size: what the nodes of the file make from them"""
    names: list[str]
    source: str
    """Where they are from, for the log"""
    samples: Samples | None = None
    """The stored images, unless they are held in memory"""
    indices: tuple[int, ...] = ()
    """Index of each in `samples`"""
    any_size: tuple[Callable[[], np.ndarray], ...] = ()
    """With -with_resize: each returns an image of any size, H x W x 3"""
    about: dict[str, Any] = field(default_factory=dict)
    """What the file says of its input besides"""

    @property
    def output(self) -> str:
        """What the file computes of them."""
        return PROBABILITIES if self.any_size else LOGITS

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        """Inputs of the exported file. The first batch has one image, since the file must take any number."""
        if self.any_size:
            yield from (torch.from_numpy(np.array(image()))[None] for image in self.any_size)
            return
        for part in (self.pixels[:1], *self.pixels[1:].split(BATCH)):
            if len(part):
                yield (part if with_preprocess else trained.inputs(part)).contiguous()


def images_for_check(trained: Trained, folder: Path | None, count: int | None, part: str = "val") -> CheckImages:
    """`count` images, evenly chosen from the folder or a split of the run's data; noise if that cannot be read."""
    if folder is not None:
        return _choose(_open_folder(trained, folder), count, f"in {folder}")
    try:
        dataset = split_of_run(trained, part)
    except UserError as error:
        log.warning("The images of the run cannot be read: %s", error)
        log.warning("The export is checked on generated noise. To check it on real images: -images DIR")
        data = trained.config.DATA
        size = (NOISE_IMAGES, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
        pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        names = [f"noise {number}" for number in range(NOISE_IMAGES)]
        return CheckImages(pixels, names, "of generated noise, since the real ones cannot be read")
    return _choose(dataset, count, f"of the run's {'data' if part == 'all' else TITLES[part]}")


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


def reference_logits(trained: Trained, images: CheckImages) -> Tensor:
    """Logits of the trained model, with which those of every exported file are compared."""
    logits = []
    with progress_bar(len(images.pixels), "images", "reference") as bar:
        for part in images.pixels.split(BATCH):
            logits.append(trained.logits(part))
            bar.update(len(part))
    return torch.cat(logits)


def run_onnx(model: str | bytes, name: str, output: str, inputs: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Outputs of a model with one input, a file or its bytes, for each input. `name`: of the model, for errors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        (taken,) = session.get_inputs()
        return [np.asarray(session.run([output], {taken.name: one})[0]) for one in inputs]
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise TrainingError(f"{name}: onnxruntime cannot run the file: {first_line(error)}") from None


def compare(trained: Trained, images: CheckImages, expected: Tensor, found: Tensor, tolerance: float) -> str:
    """Describe how well the outputs agree with those expected; raise TrainingError beyond the tolerance."""
    errors = (found - expected).abs() / (float(expected.abs().max()) or 1.0)
    worst = float(errors.max())
    if worst <= tolerance:  # never with NaN
        return (
            f"checked on {counted(len(found), 'image')} {images.source}: largest difference {worst:.1e} x the largest "
            f"output ({tolerance:g} allowed), "
            + outputs_of(trained).agreement(images.names, expected, found, images.output == LOGITS)
        )
    # NaN counts as the largest difference.
    order = errors.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten().argsort(descending=True)
    lines = []
    for place in order[:WORST_SHOWN].tolist():
        row, label = divmod(place, errors.shape[1])
        lines.append(
            f"  {images.names[row]}, class {trained.name_of(label)}: {float(found[row, label]):.6g} instead of "
            f"{float(expected[row, label]):.6g}"
        )
    raise TrainingError(
        f"the outputs differ from the model's by up to {worst:.2g} times the largest output on {len(images.names)} "
        f"images {images.source}, but only {tolerance:g} is allowed (-tolerance). Largest differences:\n"
        + "\n".join(lines)
    )
