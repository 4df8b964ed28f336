"""vitamp for other Python code: `load` returns a trained model, as timm builds it, and the transform of its images.

`loss`, `model`, `augmentation`, `dataset` and `metric` are for files that -use names (docs/own_code.md). The program
itself is started by the command `vitamp`, or by the scripts of a clone; nothing of it is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

__all__ = ["augmentation", "dataset", "load", "loss", "metric", "model"]

Call = TypeVar("Call", bound=Callable[..., Any])


def load(path: str | Path, weights: str = "auto") -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    """The trained model, in evaluation mode on the CPU, and the transform of one image that validation applies.

    `path`: a run (its best checkpoint), a checkpoint, or a file of weights that vitamp wrote. `weights`: `model`,
    `ema`, or `auto`, which takes those that validated better. `model.vitamp` says which they are, and has the names of
    the classes. A batch is a stack of images: `model(torch.stack([transform(image) for image in images]))`.
    """
    from vitamp._load import load_model

    return load_model(Path(path), weights)


def loss(call: Call) -> Call:
    """Register a loss for TRAIN.LOSS: a function (logits, targets, ...), or a module whose object is called so."""
    return _registered("loss", call)


def model(call: Call) -> Call:
    """Register a model for MODEL.NAME: a class or function (num_classes, ...) that makes an nn.Module."""
    return _registered("model", call)


def augmentation(call: Call) -> Call:
    """Register an augmentation for TRAIN.AUGMENT: a function (image, ...) -> image, on Pillow's images."""
    return _registered("augmentation", call)


def dataset(call: Call) -> Call:
    """Register a data set for DATA.DATASET: a function (split, ...) -> images, labels, names of the classes."""
    return _registered("dataset", call)


def metric(call: Call) -> Call:
    """Register a metric for VALIDATE_METRICS: (probabilities, labels, ...) -> number, the higher the better."""
    return _registered("metric", call)


def _registered(kind: str, call: Call) -> Call:
    """Register with the program that executes the file; elsewhere, as in a test of the user's, nothing happens."""
    registry = sys.modules.get("utils.own.registry")
    return call if registry is None else getattr(registry, kind)(call)
