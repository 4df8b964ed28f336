"""The same images after scripts/pack_images.py, to show what packing gains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from datasets import ImageDataset, open_dataset
from datasets.images import Images
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import TrainingError
from utils.parent import as_child

PACK_IMAGES = Path(__file__).parents[2] / "scripts" / "pack_images.py"
QUALITY = 90
SUFFIX = {"train": True, "val": False}

Packed = dict[str, dict[bool, Images]]
"""Kind of packing -> training split (True) and validation split (False)."""


def pack(parts: dict[bool, Images], orders: dict[bool, np.ndarray], changes: TrainConfig, folder: Path) -> Packed:
    """Write the chosen samples to `folder`, pack them as JPEG and raw, and open the results."""
    source = folder / "images"
    for name, train in SUFFIX.items():
        _write(parts[train], orders[train], source / name / "images")
    data = parts[True].data
    side = round(256 * max(1.0, data.IMAGE_SIZE / 224))
    kinds = {
        f"packed ({side}, quality {QUALITY})": ["-quality", str(QUALITY)],
        f"packed ({side}, raw)": ["-raw"],
    }
    opened: Packed = {}
    for number, (kind, words) in enumerate(kinds.items()):
        packed = folder / str(number)
        how = ["-dataset", "imagefolder", "-short_side", str(side), f"DATA.IMAGE_CHANNELS={data.IMAGE_CHANNELS}"]
        command = [sys.executable, str(PACK_IMAGES), str(source), str(packed), *words, *how]
        # Show only errors: the packed images are temporary.
        if subprocess.run(command, env=as_child(), stdout=subprocess.DEVNULL, check=False).returncode:
            raise TrainingError(
                "packing failed, see the error above; -parts train,val,stages,loader measures everything else."
            )
        opened[kind] = _open(data, changes, packed)
    return opened


def _write(part: Images, order: np.ndarray, folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, index in enumerate(order.tolist()):
        content = part.samples.read(index)
        assert isinstance(content, bytes), "decoded pixels gain nothing from packing"
        # PIL recognises the format by its content, whatever the ending.
        suffix = Path(part.samples.name(index)).suffix or ".jpg"
        (folder / f"{number:06d}{suffix}").write_bytes(content)


def _open(data: DataConfig, changes: TrainConfig, folder: Path) -> dict[bool, Images]:
    shards = data.model_copy(update={"DATASET": "shards", "DATA_PATH": str(folder), "EXCLUDE": None})
    splits: dict[bool, Images] = {}
    for train in (True, False):
        part: ImageDataset = open_dataset(shards, train, 1, 0, torch.device("cpu"))
        part = part.augment(changes) if train else part
        assert isinstance(part, Images)
        splits[train] = part
    return splits
