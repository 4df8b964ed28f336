#!/usr/bin/env python3
"""Fine-tune with lightly-train and fastai as their guides do, beside runs of finetune_bench.py on the same images.

    pip install lightly-train fastai
    python bench/finetune_others.py SETS -only fastai -weights lite0.safetensors -json fastai.json \
        -ours docs/results/finetune_rates_lite0.json
    python bench/finetune_others.py SETS -only lightly-train -model vit_small_patch14_dinov2 -weights vit.safetensors \
        -ours docs/results/finetune_rates_dinov2_s.json -json lightly.json

Images, draws, epochs and image size are those of vitamp's runs in -ours, and so are the weights. Batch, learning rate,
schedule and augmentation are each program's own; lightly-train, whose default is 100,000 steps, gets the steps of so
many epochs. fastai resizes images twice ("presizing"), to twice the size first. lightly-train 0.18 cannot classify with
EfficientNets, whose features it takes before the last convolution.

Runs that the JSON file holds are not run again, and it is written after each run.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.functional import center_crop, normalize, pil_to_tensor, resize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.finetune_bench import VITAMP, Row, compared, images_in, labels_of, lay_out, over_sets, top1
from vitamp.files import write_atomically

VALIDATION_SCALE = 1.143
"""lightly-train's default: the images of validation are resized to this multiple of the size before they are cropped"""
Trained = Callable[[list[Path]], np.ndarray]
"""Returns the guessed class of each image"""


def with_fastai(data: Path, weights: Path, task: Row) -> Trained:
    """vision_learner and fine_tune: the head alone for one epoch, then all for the epochs that are asked for."""
    vision: Any = import_module("fastai.vision.all")
    size = task["size"]
    vision.set_seed(task["draw"])
    loaders = vision.ImageDataLoaders.from_folder(
        data,
        train="train",
        valid="val",
        item_tfms=vision.Resize(2 * size),
        batch_tfms=vision.aug_transforms(size=size, min_scale=0.75),
        num_workers=0,
        device=torch.device("cpu"),
    )
    learner = vision.vision_learner(loaders, task["model"], pretrained_cfg_overlay={"file": f"{weights}"})
    learner.fine_tune(task["epochs"])

    def guesses(images: list[Path]) -> np.ndarray:
        probabilities, _ = learner.get_preds(dl=loaders.test_dl(images))
        return probabilities.argmax(1).numpy()

    return guesses


def with_lightly(data: Path, weights: Path, task: Row) -> Trained:
    lightly_train: Any = import_module("lightly_train")
    size = task["size"]
    backbone = data / "backbone.pt"
    torch.save(load_file(weights), backbone)
    classes = (data / "classes.txt").read_text().splitlines()
    batch = 16  # lightly-train's default
    out = data / "out"
    lightly_train.train_image_classification(
        out=out,
        data={"train": data / "train", "val": data / "val", "classes": dict(enumerate(classes))},
        model=f"timm/{task['model']}",
        steps=task["epochs"] * task["images"] // batch,
        accelerator="cpu",
        num_workers=0,
        seed=task["draw"],
        model_args={"backbone_weights": backbone},
        transform_args={"image_size": (size, size)},
    )
    model = lightly_train.load_model(out / "exported_models" / "exported_last.pt").eval()

    def guess(file: Path) -> int:
        pixels = pil_to_tensor(Image.open(file).convert("RGB")) / 255
        pixels = center_crop(resize(pixels, [round(VALIDATION_SCALE * size)]), [size, size])
        pixels = normalize(pixels, **model.image_normalize)
        return int(model.forward_backend(pixels[None]).argmax())

    def guesses(images: list[Path]) -> np.ndarray:
        with torch.inference_mode():
            return np.array([guess(file) for file in images])

    return guesses


PROGRAMS = {"fastai": with_fastai, "lightly-train": with_lightly}


def run(sets: Path, weights: Path, task: Row) -> Row:
    """Train once and predict the images set aside; returns the task with its results."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        labels = lay_out(sets / task["set"], task["draw"], task["images"], data)
        before = os.times()
        trained = PROGRAMS[task["line"]](data, weights, task)
        after = os.times()
        guesses = trained(images_in(data / "val"))
    seconds = after.user + after.system - before.user - before.system
    return task | {
        "cpu_seconds": round(seconds, 1),
        "acc1": top1(guesses, labels),
        "guesses": " ".join(map(str, guesses)),
    }


def tables(sets: Path, ours: list[Row], runs: list[Row]) -> list[Row]:
    """Return a table of each program and amount of images, with the intervals of finetune_bench.py."""
    found = list[Row]()
    groups = sorted({(row["line"], row["images"], row["epochs"], row["size"]) for row in runs})
    for line, images, epochs, size in groups:
        where: dict[str, Any] = {"images": images, "epochs": epochs, "size": size}
        of_sets = list[Row]()
        for name in sorted({row["set"] for row in runs}):
            task = (where | {"set": name}).items()
            theirs = [row for row in runs if row["line"] == line and task <= row.items()]
            draws = {row["draw"] for row in theirs}
            beside = [row for row in ours if row["draw"] in draws and task <= row.items()]
            if beside:
                labels = labels_of(images_in(sets / name / "aside"), images_in(sets / name / "pool"))
                one = compared(beside, theirs, labels)
                one[line] = one.pop("timm")
                one["cpu_seconds"][line] = one["cpu_seconds"].pop("timm")
                of_sets.append({"set": name} | one)
        found.append({"line": line} | where | {"sets": of_sets, "over_sets": over_sets(of_sets)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("-weights", type=Path, required=True, help="of the model")
    parser.add_argument("-model", default="tf_efficientnet_lite0", help="name of timm")
    parser.add_argument("-ours", type=Path, required=True, help="JSON of finetune_bench.py")
    parser.add_argument("-json", type=Path, required=True)
    parser.add_argument("-only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("-images", type=int, nargs="+", default=[100, 500])
    parser.add_argument("-draws", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ours = [row for row in json.loads(asked.ours.read_text())["runs"] if row["line"] == VITAMP]
    held: Row = {"runs": []}
    if asked.json.exists():
        held = json.loads(asked.json.read_text())
    held["versions"] = {name: version(name) for name in ("torch", "timm", *PROGRAMS)}
    names = {folder.name for folder in asked.sets.iterdir()}
    wanted = [
        {key: row[key] for key in ("draw", "set", "images", "epochs", "size")}
        for row in sorted(ours, key=lambda row: (row["draw"], row["set"]))
        if row["images"] in asked.images and row["draw"] <= asked.draws and row["set"] in names
    ]
    for given in wanted:
        for line in asked.only:
            task: Row = {"line": line, "model": asked.model, "lr": None} | given
            if any(task.items() <= row.items() for row in held["runs"]):
                continue
            held["runs"].append(run(asked.sets, asked.weights.resolve(), task))
            held["tables"] = tables(asked.sets, ours, held["runs"])
            held["cpu_hours"] = round(sum(row["cpu_seconds"] for row in held["runs"]) / 3600, 2)
            write_atomically(asked.json, json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
