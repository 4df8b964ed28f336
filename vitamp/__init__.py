"""vitamp for other Python code: `load` returns a trained model and the transform of its images, `train` trains one, and
`auto` finds one.

The decorators `loss`, `model`, `augmentation`, `dataset` and `metric` are for files that -use names
(docs/own_code.md). The program itself is started by the command `vitamp`, by the scripts of a clone, or in processes of
its own; nothing of it is imported here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitamp.registry import augmentation, dataset, loss, metric, model

if TYPE_CHECKING:
    from vitamp.processes import Loaded, Run

__all__ = ["__version__", "augmentation", "auto", "dataset", "load", "loss", "metric", "model", "train"]
__version__ = "0.3.0"


def load(path: str | Path, weights: str = "auto") -> Loaded:
    """Load a trained model, in evaluation mode on the CPU, and the transform that validation applies to an image.

    path: a run (its best checkpoint), a checkpoint, or a file of weights that vitamp wrote
    weights: `model`, `ema`, or `auto`, which takes those that validated better

    The result is a pair, `model, transform = load(path)`, and `load(path).predict(images)` gives classes and
    probabilities. `model.vitamp` tells which weights were loaded, and has the names of the classes. A batch is a stack
    of images: `model(torch.stack([transform(image) for image in images]))`.

    The transform takes an image of Pillow. If the model is not for photographs (DATA.BITS, DATA.IMAGE_CHANNELS), it
    takes the path of a file, a list of the files of one image, or an array of the stored values.
    """
    from vitamp.timm_model import load_model

    return load_model(Path(path), weights)


def train(cfg: str | Path, ngpus: int | None = None, **flags: Any) -> Run:
    """Train as the command line does, in a process of its own, and return the run when it is done.

    cfg: a YAML file, or the name of a recipe
    ngpus: number of processes, which main_multi_gpu.py starts; None: one, by main_single_gpu.py
    flags: flags of that script, such as `amp=True`, `data_path="photos"` or `output="runs/photos"`; settings are given
        as `**{"TRAIN.BASE_LR": 1e-3}`

    Raises ValueError for a wrong flag or setting, and RuntimeError if the run fails, with the program's own message.
    Ctrl-C, or stopping the cell of a notebook, lets the run save first.
    """
    from vitamp.processes import trained

    # With `load`, the run loads its best model when that is used.
    return trained(os.path.expanduser(cfg), {"ngpus": ngpus, **flags}, load)


def auto(data: str | Path, max_time: str, output: str | Path = "output/auto", **flags: Any) -> Run:
    """Find a good model for images in a given time, as scripts/auto.py does, and return its final run.

    data: folder or table of the images
    max_time: time that everything may take, such as "0:30:00"
    output: folder of all results; the answer is in its answer.txt. The same call goes on after an interruption.
    flags: other flags and settings of that script, such as `weights="resnet18,resnet50"`, as for `train`

    Raises ValueError and RuntimeError as `train` does.
    """
    from vitamp.processes import found

    # No shell has expanded ~ here.
    folder = Path(data).expanduser()
    asked = {"max_time": max_time, "output": str(Path(output).expanduser()), **flags}
    return found(str(folder), asked, load)
