"""A made data set with several labels per image, whose truth can be seen in the pixels."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("east", "north", "south", "west")
"""A class is there where its quarter of the image is bright. In alphabetical order, as the program orders them."""
SIZE = 16
_QUARTERS = {"north": np.s_[:8, :8], "east": np.s_[:8, 8:], "south": np.s_[8:, 8:], "west": np.s_[8:, :8]}


def truth(images: int, seed: int = 0) -> np.ndarray:
    """Rows of zeros and ones; the first image has no class, and classes are of different frequency."""
    generator = np.random.default_rng(seed)
    rows = (generator.random((images, len(CLASSES))) < (0.5, 0.2, 0.35, 0.6)).astype(np.uint8)
    rows[0] = 0
    return rows


def write_images(root: Path, rows: np.ndarray, prefix: str, seed: int = 0) -> list[str]:
    """Small PNG files below `root`; returns their paths relative to it."""
    generator = np.random.default_rng(seed)
    (root / "images").mkdir(parents=True, exist_ok=True)
    paths = []
    for number, row in enumerate(rows):
        pixels = generator.integers(0, 110, (SIZE, SIZE), dtype=np.uint8)
        for name, there in zip(CLASSES, row, strict=True):
            if there:
                pixels[_QUARTERS[name]] += 130
        paths.append(f"images/{prefix}{number}.png")
        Image.fromarray(pixels).save(root / paths[-1])
    return paths


def named(row: np.ndarray) -> list[str]:
    return [name for name, there in zip(CLASSES, row, strict=True) if there]


def write_set(root: Path, train: int = 160, val: int = 61) -> tuple[np.ndarray, np.ndarray]:
    """train.csv and val.csv with their images; returns the truth of both."""
    both = []
    for seed, (name, images) in enumerate({"train": train, "val": val}.items()):
        rows = truth(images, seed)
        paths = write_images(root, rows, name, seed)
        lines = [f"{path},{';'.join(named(row))}" for path, row in zip(paths, rows, strict=True)]
        (root / f"{name}.csv").write_text("\n".join(["path,labels", *lines]) + "\n", encoding="utf-8")
        both.append(rows)
    return both[0], both[1]


RECIPE = """\
DATA: {{DATASET: csv, DATA_PATH: {root}, MULTI_LABEL: true, IMAGE_SIZE: 16, IMAGE_CHANNELS: 1, BATCH_SIZE: 16,
       CROP: none, FLIP: 0, NUM_WORKERS: 0}}
MODEL: {{NAME: tiny, NUM_CLASSES: auto, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 3, WARMUP_EPOCHS: 1, BASE_LR: 1e-2, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}}
REPORT_FREQ: 5
THREADS: 1
DEVICE: cpu
"""


def write_recipe(root: Path) -> Path:
    path = root / "recipe.yaml"
    path.write_text(RECIPE.format(root=root), encoding="utf-8")
    return path
