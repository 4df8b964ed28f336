"""vitamp for other Python code: `load` returns a trained model, as timm builds it, and the transform of its images.

`loss`, `model`, `augmentation`, `dataset` and `metric` are for files that -use names (docs/own_code.md). The program
itself is started by the command `vitamp`, or by the scripts of a clone; nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitamp.registry import augmentation, dataset, loss, metric, model

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["__version__", "augmentation", "dataset", "load", "loss", "metric", "model"]
__version__ = "0.3.0"


def load(path: str | Path, weights: str = "auto") -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """The trained model, in evaluation mode on the CPU, and the transform of one image that validation applies.

    The transform takes one of Pillow's images. Where DATA.BITS or DATA.IMAGE_CHANNELS are those of other images than
    photographs, it takes the path of a file, a list of an image's files, or an array of the stored values.

    `path`: a run (its best checkpoint), a checkpoint, or a file of weights that vitamp wrote. `weights`: `model`,
    `ema`, or `auto`, which takes those that validated better. `model.vitamp` says which they are, and has the names of
    the classes. A batch is a stack of images: `model(torch.stack([transform(image) for image in images]))`.
    """
    from vitamp.timm_model import load_model

    return load_model(Path(path), weights)
