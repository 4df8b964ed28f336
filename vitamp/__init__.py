"""vitamp for other Python code: `load` returns a trained model, as timm builds it, and the transform of its images;
`train` trains one.

`loss`, `model`, `augmentation`, `dataset` and `metric` are for files that -use names (docs/own_code.md). The program
itself is started by the command `vitamp`, by the scripts of a clone, or in processes of its own; nothing of it is
imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitamp.registry import augmentation, dataset, loss, metric, model

if TYPE_CHECKING:
    from vitamp.processes import Loaded, Run

__all__ = ["__version__", "augmentation", "dataset", "load", "loss", "metric", "model", "train"]
__version__ = "0.3.0"


def load(path: str | Path, weights: str = "auto") -> Loaded:
    """The trained model, in evaluation mode on the CPU, and the transform of one image that validation applies.

    They are a pair, `model, transform = load(path)`, and `load(path).predict(images)` gives classes and probabilities.

    The transform takes one of Pillow's images. Where DATA.BITS or DATA.IMAGE_CHANNELS are those of other images than
    photographs, it takes the path of a file, a list of an image's files, or an array of the stored values.

    `path`: a run (its best checkpoint), a checkpoint, or a file of weights that vitamp wrote. `weights`: `model`,
    `ema`, or `auto`, which takes those that validated better. `model.vitamp` says which they are, and has the names of
    the classes. A batch is a stack of images: `model(torch.stack([transform(image) for image in images]))`.
    """
    from vitamp.timm_model import load_model

    return load_model(Path(path), weights)


def train(cfg: str | Path, ngpus: int | None = None, **flags: Any) -> Run:
    """Train as the command line does, in a process of its own, and return the run when it is done.

    `flags` are those of main_single_gpu.py: `amp=True`, `data_path="photos"`, `output="runs/photos"`; settings of the
    recipe are given as `**{"TRAIN.BASE_LR": 1e-3}`. `ngpus`: with main_multi_gpu.py. ValueError: a wrong flag or
    setting; RuntimeError: the run failed; each in the program's words. Ctrl-C, or a notebook's stop, lets it save.
    """
    from vitamp.processes import trained

    return trained(str(cfg), {"ngpus": ngpus, **flags}, load)
