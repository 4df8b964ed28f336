"""Which maps show where a model looks: photographs with random labels, and a marker in a corner that carries the class.

    python bench/explain.py -photographs DIR -lite0 FILE -out docs/results/explain.json -pictures DIR

Each photograph gets one of four classes by chance, and a small marker of its class: once always in the top left corner,
once in any of the four. A ViT and a ResNet learn them from random weights, and an EfficientNet-Lite0 from those of
ImageNet. Of the validation images that are predicted correctly, a map passes if more than half of it is in
the marker's ninth of the image. The same is measured for models that learned the photographs without markers: there, no
corner should hold the map.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vitamp.explain import maps_of

ROOT = Path(__file__).resolve().parents[1]
SIDE = 96
"""Pixels of the images along each side"""
MARKER = 15
"""Pixels of the marker along each side"""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
MOST_AWAY = 4
"""Most pixels between the marker and the borders of its corner"""
TRAINED = 0.8
BRIGHT = 0.5
"""Fall of the logarithm of the odds, and brightness of the product's maps, above which a map is called bright"""
SEED = 0
CORNERS = ("top left", "top right", "bottom left", "bottom right")
TRAINING = (
    f"DATA.IMAGE_SIZE={SIDE} DATA.CROP=none DATA.FLIP=0 DATA.BATCH_SIZE=32 TRAIN.SMOOTHING=0 TRAIN.WARMUP_EPOCHS=1 "
    "TRAIN.MODEL_EMA=false DATA.CHECK=off MODEL.NUM_CLASSES=auto TRAIN.WEIGHT_DECAY=0.05"
).split()
MODELS = {
    "ViT": "MODEL.TYPE=vit MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=96 MODEL.DEPTH=4 MODEL.NUM_HEADS=3 "
    "TRAIN.BASE_LR=0.001 TRAIN.NUM_EPOCHS=8",
    "ResNet": "-model resnet10t TRAIN.BASE_LR=0.001 TRAIN.NUM_EPOCHS=3",
    "Lite0": "-model tf_efficientnet_lite0 MODEL.FREEZE=batch_norm TRAIN.BASE_LR=0.0002 TRAIN.NUM_EPOCHS=12",
}


def with_marker(picture: Image.Image, label: int, corner: int, random: np.random.Generator) -> Image.Image:
    """Draw the marker of a class into a corner."""
    away = random.integers(0, MOST_AWAY + 1, 2).tolist()
    left = SIDE - MARKER - away[0] if corner % 2 else away[0]
    top = SIDE - MARKER - away[1] if corner // 2 else away[1]
    picture = picture.copy()
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, left + MARKER - 1, top + MARKER - 1), fill=list(COLOURS.values())[label])
    return picture


def make_images(photographs: Path, folder: Path, corners: int, marked: bool, most: int) -> None:
    """Write training and validation images of random classes; the name of each ends with its corner."""
    random = np.random.default_rng(SEED)
    files = sorted(photographs.rglob("*.JPEG"))[:most]
    labels = random.integers(0, len(COLOURS), len(files)).tolist()
    places = random.integers(0, corners, len(files)).tolist()
    for number, (file, label, corner) in enumerate(zip(files, labels, places, strict=True)):
        part = "train" if number < TRAINED * len(files) else "val"
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        short = min(picture.size)
        left = (picture.width - short) // 2
        top = (picture.height - short) // 2
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + short, top + short))
        if marked:
            picture = with_marker(picture, label, corner, random)
        place = folder / part / list(COLOURS)[label]
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{number:04}-{corner}.png")


def run_command(words: list[str]) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def train(name: str, images: Path, run: Path, lite0: Path) -> float:
    """Train a model on the images by the command line; returns the seconds that it took."""
    start = time.perf_counter()
    words = ["-data_path", str(images), *TRAINING, *MODELS[name].split()]
    if name == "Lite0":
        words += ["-pretrained", str(lite0)]
    run_command(["main_single_gpu.py", *words, "-output", str(run)])
    return time.perf_counter() - start


def score(model: torch.nn.Module, label: int, pixels: Tensor) -> Tensor:
    """The logarithm of the odds of the label."""
    logits = model(pixels)
    others = torch.cat((logits[:, :label], logits[:, label + 1 :]), 1)
    return logits[:, label] - others.logsumexp(1)


def as_grid(activation: Tensor) -> Tensor:
    """Arrange what a layer returns for one image as channels x rows x columns, without prefix tokens."""
    if activation.ndim == 4:
        return activation[0]
    tokens = activation[0]
    side = int(len(tokens) ** 0.5)
    return tokens[len(tokens) - side * side :].T.reshape(-1, side, side)


def by_gradient(layer: int, model: torch.nn.Module, pixels: Tensor, label: int) -> Tensor:
    """Gradient times activation of a layer of timm's feature_info, by the number of the layer from the end."""
    kept: list[Tensor] = []
    info: Any = model.feature_info
    module = model.get_submodule(info[-layer]["module"])

    def keep(_module: torch.nn.Module, _arguments: Any, output: Tensor) -> None:
        kept.append(output)

    handle = module.register_forward_hook(keep)
    value = score(model, label, pixels.requires_grad_())
    handle.remove()
    gradient = torch.autograd.grad(value.sum(), kept[0])[0]
    return as_grid(gradient * kept[0]).sum(0).detach()


def by_input(grid: int, model: torch.nn.Module, pixels: Tensor, label: int) -> Tensor:
    """Gradient of the pixels times their distance from the mean colour, summed over the cells of a grid."""
    pixels.requires_grad_()
    gradient = torch.autograd.grad(score(model, label, pixels).sum(), pixels)[0]
    return functional.adaptive_avg_pool2d((gradient * pixels)[0].sum(0)[None, None], grid)[0, 0].detach()


def by_hiding(grid: int, width: int, fill: str, model: torch.nn.Module, pixels: Tensor, label: int) -> Tensor:
    """The loss of score when squares of `width` cells are hidden, as the mean of each cell of a grid.

    `fill`: by the mean colour, by the blurred image, or by the inverse colours.
    """
    side = pixels.shape[-1]
    cells = functional.adaptive_avg_pool2d(pixels, grid)
    blurred = functional.interpolate(cells, size=side, mode="bilinear")
    hidden = {"mean": torch.zeros_like(pixels), "blur": blurred, "inverse": -pixels}[fill]
    place = (torch.arange(side) + 0.5) * grid / side
    first = torch.arange(grid - width + 1)[:, None]
    lines = (place >= first) & (place < first + width)
    squares = lines[:, None, None, :, None] & lines[:, None, None, :]
    with torch.no_grad():
        scores = [score(model, label, torch.where(some, hidden, pixels)) for some in squares.flatten(0, 1).split(32)]
        whole = score(model, label, pixels)
    falls = (whole - torch.cat(scores)).reshape(1, 1, len(first), len(first)).clamp(min=0)
    return functional.avg_pool2d(falls, width, 1, width - 1, count_include_pad=False)[0, 0]


def by_both(model: torch.nn.Module, pixels: Tensor, label: int) -> Tensor:
    """The larger loss by hiding with the mean colour and with the inverse colours."""
    mean = by_hiding(8, 2, "mean", model, pixels, label)
    return torch.maximum(mean, by_hiding(8, 2, "inverse", model, pixels, label))


def by_product(model: torch.nn.Module, pixels: Tensor, label: int) -> Tensor:
    """The map of predict.py, the report and vitamp.load."""
    with torch.no_grad():
        return maps_of(model, pixels[0], [label], torch.zeros(3, 1, 1), one_label=True, batch=32)[0]


Method = Callable[[torch.nn.Module, Tensor, int], Tensor]
"""(model, normalised image, label) -> map of any size"""
METHODS: dict[str, Method] = {
    "gradient x activation, last layer": partial(by_gradient, 1),
    "gradient x activation, layer before": partial(by_gradient, 2),
    "gradient x pixels, 8 x 8": partial(by_input, 8),
    "hiding, 4 x 4, by mean colour": partial(by_hiding, 4, 1, "mean"),
    "hiding, 8 x 8, by mean colour": partial(by_hiding, 8, 1, "mean"),
    "hiding, 8 x 8, overlapping, by mean colour": partial(by_hiding, 8, 2, "mean"),
    "hiding, 8 x 8, overlapping, by blur": partial(by_hiding, 8, 2, "blur"),
    "hiding, 8 x 8, overlapping, by inverse": partial(by_hiding, 8, 2, "inverse"),
    "hiding, 8 x 8, overlapping, by inverse blur (the product)": by_product,
    "hiding, 8 x 8, overlapping, by mean and inverse": by_both,
}


def as_map(values: Tensor) -> np.ndarray:
    """Enlarge what speaks for the class to the image; it sums to 1."""
    found = functional.interpolate(values.clamp(min=0)[None, None], size=SIDE, mode="bilinear")[0, 0].numpy()
    return found / max(found.sum(), 1e-12)


def in_corners(found: np.ndarray) -> list[float]:
    """The fraction of a map in the ninth of the image at each corner."""
    third = SIDE // 3
    rows = (slice(None, third), slice(-third, None))
    return [float(found[rows[corner // 2], rows[corner % 2]].sum()) for corner in range(len(CORNERS))]


def measure(run: Path, most: int, pictures: Path | None, methods: dict[str, Method]) -> dict[str, Any]:
    """Measure methods on validation images that the run predicts correctly."""
    from engine.trained.model import load_trained
    from tools.common.report_page.evaluations import split_of_run

    trained = load_trained(run, device="cpu", amp="off")
    dataset = split_of_run(trained, "val")
    labels = dataset.sample_labels()
    samples: Any = dataset.single_images()
    right = 0
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in methods}
    largest: dict[str, list[float]] = {name: [] for name in methods}
    for index in np.random.default_rng(SEED).permutation(len(dataset)).tolist():
        pixels = dataset.__getitems__([(0, index)]).images
        with trained.computing(1):
            normalised = trained.inputs(pixels)
            label = int(trained.model(normalised).argmax())
        if label != labels[index]:
            continue
        right += 1
        if right > most:
            continue
        corner = int(Path(samples.name(index)).stem[-1])
        shown = []
        for name, method in methods.items():
            start = time.perf_counter()
            values = method(trained.model, normalised.clone(), label)
            seconds = time.perf_counter() - start
            found = as_map(values)
            corners = in_corners(found)
            rows[name].append((corners[corner], max(corners), seconds))
            shown.append(found)
            largest[name].append(float(values.max()))
        if pictures and right <= 6:
            picture = pixels[0].permute(1, 2, 0).numpy()
            panels = [picture] + [overlaid(picture, found) for found in shown]
            Image.fromarray(np.concatenate(panels, 1)).save(pictures / f"{run.name}-{right}.png")
    rows_of_methods = {}
    for name, of_method in rows.items():
        own, highest, seconds = np.array(of_method).T
        bright = np.array(largest[name]) > BRIGHT
        of_bright = round(100 * float((own[bright] > 0.5).mean()), 1) if bright.any() else None
        rows_of_methods[name] = {
            "in_marked_corner_percent": round(100 * float((own > 0.5).mean()), 1),
            "in_any_corner_percent": round(100 * float((highest > 0.5).mean()), 1),
            "bright_percent": round(100 * float(bright.mean()), 1) if "hiding" in name else None,
            "in_marked_corner_percent_of_bright": of_bright if "hiding" in name else None,
            "mean_mass_in_marked_corner": round(float(own.mean()), 3),
            "largest_value": round(float(np.median(largest[name])), 3),
            "seconds_per_image": round(float(np.median(seconds)), 4),
        }
    accuracy = round(100 * right / len(dataset), 1)
    return {"top1_percent": accuracy, "images": min(right, most), "methods": rows_of_methods}


def overlaid(picture: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Lay a map over a picture, from red to yellow."""
    strength = (found / max(found.max(), 1e-12))[:, :, None]
    colour = np.concatenate((np.full_like(strength, 255), 255 * strength, np.zeros_like(strength)), 2)
    return (picture * (1 - 0.7 * strength) + colour * 0.7 * strength).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-photographs", type=Path, required=True)
    parser.add_argument("-lite0", type=Path, required=True)
    parser.add_argument("-work", type=Path, required=True, help="folder for images and runs, which are used again")
    parser.add_argument("-out", type=Path, required=True)
    parser.add_argument("-pictures", type=Path)
    parser.add_argument("-models", default=",".join(MODELS))
    parser.add_argument("-sets", default="one,four,none")
    parser.add_argument("-methods", default="", help="words in the names of methods, separated by commas")
    parser.add_argument("-most", type=int, default=1000, help="photographs")
    parser.add_argument("-mapped", type=int, default=60, help="images with maps, of each model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    words_of_methods = args.methods.split(",")
    methods = {name: method for name, method in METHODS.items() if any(word in name for word in words_of_methods)}
    sets = {"one": ("marker at the top left", 1, True), "four": ("marker in any corner", 4, True)}
    sets["none"] = ("no marker", 4, False)
    for key in args.sets.split(","):
        words, corners, marked = sets[key]
        images = args.work / f"images-{key}-{args.most}"
        if not images.exists():
            make_images(args.photographs, images, corners, marked, args.most)
        for model in args.models.split(","):
            run = args.work / f"{key}-{model}-{args.most}"
            seconds = None if run.exists() else round(train(model, images, run, args.lite0), 1)
            found = measure(run, args.mapped, args.pictures, methods)
            found |= {"photographs": args.most, "training_seconds": seconds}
            results.setdefault(words, {})[model] = found
            print(words, model, json.dumps(found, indent=1), flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
