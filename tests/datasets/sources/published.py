"""Small generated trees in the layouts of the published data sets."""

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


PythonsPickler: Any = vars(pickle)["_Pickler"]
"""Python's own pickler, because the C version cannot be told how to write text."""


class PythonTwo(PythonsPickler):
    """Writes text as Python 2 did, like bytes."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, str | bytes):
            super().save(obj, save_persistent_id)
            return
        raw = obj.encode("latin1") if isinstance(obj, str) else obj
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)


def python_two(value: object) -> bytes:
    """A pickle like the CIFAR files, with the names of older numpy versions."""
    stream = io.BytesIO()
    PythonTwo(stream, 2).dump(value)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def image(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 24), (shade % 256, 100, 50)).save(path)


def cifar_pixels(images: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (images, 3072), dtype=np.uint8)


def cifar10(root: Path, images: int = 4) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        labels = [(seed + number) % 10 for number in range(images)]
        names = [f"{CIFAR10_CLASSES[label]}_s_{number:06d}.png" for number, label in enumerate(labels)]
        table = {"batch_label": name, "labels": labels, "data": cifar_pixels(images, seed), "filenames": names}
        (folder / name).write_bytes(python_two(table))
    meta = {"num_cases_per_batch": 10000, "label_names": CIFAR10_CLASSES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(python_two(meta))


def cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for seed, (name, images) in enumerate([("train", 12), ("test", 5)]):
        labels = [(7 * number + seed) % 100 for number in range(images)]
        coarse = [label // 5 for label in labels]
        table = {"data": cifar_pixels(images, seed), "fine_labels": labels, "coarse_labels": coarse}
        (folder / name).write_bytes(python_two(table))
    meta = {"fine_label_names": [f"thing_{k:02d}" for k in range(100)], "coarse_label_names": ["group"] * 20}
    (folder / "meta").write_bytes(python_two(meta))


def caltech101(root: Path) -> None:
    folder = root / "caltech101" / "101_ObjectCategories"
    for name, images in (("BACKGROUND_Google", 4), ("Faces", 8), ("accordion", 6), ("wild_cat", 6)):
        for number in range(1, images + 1):
            image(folder / name / f"image_{number:04d}.jpg", 20 * number)


def caltech256(root: Path) -> None:
    folder = root / "caltech256" / "256_ObjectCategories"
    for label, name in enumerate(("001.ak47", "002.american-flag", "257.clutter")):
        for number in range(1, 7):
            image(folder / name / f"{label + 1:03d}_{number:04d}.jpg", 20 * number)
    (folder / "002.american-flag" / "RENAME2").write_text("a script that lies in the real one too")


MAKERS: dict[str, Callable[[Path], None]] = {
    "caltech101": caltech101,
    "caltech256": caltech256,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
FOLDERS = {
    "caltech101": "caltech101",
    "caltech256": "caltech256",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}
FETCHERS = {"caltech101": "Caltech101", "caltech256": "Caltech256", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
"""Classes in torchvision.datasets"""


def torchvisions(monkeypatch: Any, name: str, root: Path, train: bool) -> Any:
    """The data set as torchvision reads it, without its checks of checksums, which a generated tree cannot have."""
    import torchvision.datasets as theirs

    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    part = {"train": train}
    return getattr(theirs, FETCHERS[name])(str(root), **part)
