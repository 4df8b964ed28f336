"""Synthetic JPEG files that decode as slowly as photographs, for benchmarks without photographs.

In photographs neighbouring pixels are similar, and contrast decreases with the size of what is seen. Images made that
way compress like photographs: 500 x 375 takes about 100 KB. Plain noise would take three times as much and smooth
gradients a tenth; neither would load a decoder realistically.
"""

from __future__ import annotations

import io
import multiprocessing
from pathlib import Path

import numpy as np
from PIL import Image

from utils.cache import cache_folder
from utils.config import Config
from utils.machine.cpus import cores
from utils.program import die_with_parent
from utils.seeding import key
from vitamp.files import replacing

CLASSES = 50
QUALITY = (90, 95)


SIZES = {
    "small": (
        ((500, 375), (375, 500), (500, 333), (333, 500), (500, 400), (500, 500)),
        (0.5, 0.15, 0.15, 0.06, 0.08, 0.06),
    ),
    "large": (((1600, 1200), (1200, 1600)), (0.7, 0.3)),
}
"""Image sizes (width, height), and the fraction of each"""


def on_made_images(config: Config, count: int, size: str) -> Config:
    """`config` on JPEGs that are made now, unless they exist."""
    root = make_images(cache_folder(config.DATA, "made"), count, size)
    data = config.DATA.model_copy(update={"DATASET": "imagefolder", "DATA_PATH": str(root)})
    model = config.MODEL.model_copy(update={"NUM_CLASSES": CLASSES})
    return config.model_copy(update={"DATA": data, "MODEL": model})


def make_images(folder: Path, count: int, size: str = "small", seed: int = 0, processes: int | None = None) -> Path:
    """Make `count` images in class folders below `folder`, except those that exist; return the root for `imagefolder`.

    Image n is the same for any `count` and `processes`. The validation split is the training split.
    """
    from tqdm import tqdm

    root = folder / f"{size}-{count}-seed{seed}"
    paths = [root / "train" / f"class_{number % CLASSES:02d}" / f"{number:06d}.jpg" for number in range(count)]
    tasks = [(path, size, seed, number) for number, path in enumerate(paths) if not path.exists()]
    for path, *_ in tasks:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not (root / "val").is_symlink():
        (root / "val").symlink_to("train")
    if tasks:
        # Spawned, not forked: this process may have running threads of torch.
        with multiprocessing.get_context("spawn").Pool(min(processes or cores(), len(tasks)), die_with_parent) as pool:
            made = pool.imap_unordered(_make, tasks, chunksize=4)
            for _ in tqdm(made, "making images", len(tasks), leave=False, disable=None):
                pass
    return root


def _make(task: tuple[Path, str, int, int]) -> None:
    path, size, seed, number = task
    with replacing(path, sync=False) as unfinished:  # which no data set takes for an image
        unfinished.write_bytes(made_jpeg(size, seed, number))


def made_jpeg(size: str, seed: int, number: int) -> bytes:
    """Image `number` as a JPEG file of quality 90 to 95 with 4:2:0 chroma, as cameras write them."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, "made image", size, number)))
    sizes, fractions = SIZES[size]
    width, height = sizes[generator.choice(len(sizes), p=fractions)]
    pixels = np.full((height, width, 3), 128.0) + generator.uniform(-20, 20)
    # From clouds over the whole image to grain, each layer with half the pixels' side and less contrast.
    for side, contrast in ((128, 40.0), (32, 25.0), (8, 14.0), (3, 8.0), (1, 6.5)):
        small = generator.normal(0, contrast, (height // side + 1, width // side + 1, 3)) + generator.normal(
            0, contrast, (height // side + 1, width // side + 1, 1)
        )
        for channel in range(3):
            layer = Image.fromarray(small[:, :, channel].astype(np.float32))
            pixels[:, :, channel] += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC))
    file, quality = io.BytesIO(), int(generator.integers(QUALITY[0], QUALITY[1] + 1))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()
