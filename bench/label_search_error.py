"""How often check_labels.py says that wrong labels are found where all are right, and which ones it finds.

    python bench/label_search_error.py -mnist DIR -photographs FILE.npz -icons FILE.npz -out label_searches.json

Sets: heavy-tailed clusters (Student's t, 3 degrees of freedom), MNIST's pixels (idx files), scikit-learn's digits,
photographs, icons and others (`features`, `labels`). Each draw is searched with its labels as they are, and with 2 %
changed.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from sys import path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.evaluation.linear import FOLDS, fit
from tools.check_labels.wrong_labels import WRONG, find_wrong, nearest

Table = tuple[np.ndarray, np.ndarray]
"""Features, and right labels"""


def clusters(random: np.random.Generator, images: int, classes: int, width: int, apart: float) -> Table:
    labels = np.arange(images) % classes
    return random.normal(0, apart, (classes, width))[labels] + random.standard_t(3, (images, width)), labels


def some(random: np.random.Generator, features: np.ndarray, labels: np.ndarray, images: int = 1000) -> Table:
    rows = random.permutation(len(labels))[:images]
    return features[rows], labels[rows]


def search(table: Table, fraction: float, seed: int) -> dict[str, object]:
    features = table[0].astype(np.float32)
    right = table[1].astype(np.int64)
    random = np.random.default_rng(seed)
    count = len(right)
    classes = int(right.max()) + 1
    labels = right.copy()
    changed = random.permutation(count)[: round(fraction * count)]
    labels[changed] = (right[changed] + random.integers(1, classes, len(changed))) % classes
    fold_of = np.empty(count, np.int64)
    fold_of[np.argsort(labels, kind="stable")] = np.arange(count) % FOLDS
    logits = fit(features, labels, fold_of, classes, torch.device("cpu"))[1]
    found = find_wrong(logits, labels, seed, near=nearest(features, [np.arange(count)]))
    return {
        "images": count,
        "wrong": len(changed),
        "look_wrong": found.look_wrong,
        "right": int((found.wrong_probability[changed] >= WRONG).sum()),
        "beside_nearest": found.agreed,
        "if_right": found.most_if_right,
        "surer": [*found.surer],
        "found": found.clear,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("-mnist", "-photographs", "-icons", "-out"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("-others", type=Path, nargs="*", default=[], metavar="FILE.npz")
    parser.add_argument("-seeds", type=int, default=10)
    asked = parser.parse_args()
    # The rows of an interrupted command stay.
    about = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    rows = about["rows"]
    done = {(row["data"], row["changed"], row["seed"]) for row in about["rows"]}
    pixels = np.fromfile(asked.mnist / "train-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 784)
    mnist = pixels, np.fromfile(asked.mnist / "train-labels-idx1-ubyte", np.uint8)[8:]
    digits: Any = load_digits()
    sets: dict[str, Callable[[np.random.Generator], Table]] = {
        "clusters, t3, 3 classes": partial(clusters, images=1000, classes=3, width=8, apart=2.0),
        "clusters, t3, 10 classes": partial(clusters, images=1000, classes=10, width=32, apart=1.0),
        "MNIST pixels, 1,000": lambda random: some(random, *mnist),
        "digits, 1,000": lambda random: some(random, digits.data, digits.target),
        "photographs, 1,000": lambda random: some(random, **np.load(asked.photographs)),
        "icons, 1,000": lambda random: some(random, **np.load(asked.icons)),
        "MNIST pixels, 2,500": lambda random: some(random, *mnist, 2500),
        **{f"{file.stem}, 1,000": lambda random, file=file: some(random, **np.load(file)) for file in asked.others},
    }
    for changed, seed, (name, draw) in itertools.product((0.0, 0.02), range(asked.seeds), sets.items()):
        if (name, changed, seed) in done:
            continue
        table = draw(np.random.default_rng(seed))
        rows.append({"data": name, "changed": changed, "seed": seed, **search(table, changed, seed)})
        print(rows[-1], flush=True)
        about |= {"script": "bench/label_search_error.py", "date": time.strftime("%Y-%m-%d")}
        asked.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
