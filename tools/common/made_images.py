"""Synthetic JPEG files that decode as slowly as photographs, for benchmarks without photographs.

In photographs neighbouring pixels are similar, and detail decreases with a power of the frequency; edges and sensor
noise come on top. Images made that way compress like photographs: 500 x 375 takes about 100 KB. Plain noise would take
three times as much and smooth gradients a tenth; neither would load a decoder realistically.
"""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from utils.cache import cache_folder
from utils.config import Config
from utils.machine.cpus import cores
from utils.parent import die_with_parent
from utils.seeding import key
from vitamp.files import replacing

CLASSES = 50
QUALITY = (90, 95)


@dataclass(frozen=True)
class Size:
    """A mixture of image sizes (width, height), and the fraction of each."""

    sizes: tuple[tuple[int, int], ...]
    fractions: tuple[float, ...]


SIZES = {
    "small": Size(
        ((500, 375), (375, 500), (500, 333), (333, 500), (500, 400), (500, 500)), (0.5, 0.15, 0.15, 0.06, 0.08, 0.06)
    ),
    "large": Size(((1600, 1200), (1200, 1600)), (0.7, 0.3)),
}


@dataclass(frozen=True)
class _Task:
    path: Path
    seed: int
    number: int
    size: str


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
    root = folder / f"{size}-{count}-seed{seed}"
    tasks = [t for t in _tasks(root / "train", count, size, seed) if not t.path.exists()]
    for parent in {task.path.parent for task in tasks}:
        parent.mkdir(parents=True, exist_ok=True)
    validation = root / "val"
    if not validation.is_symlink():
        validation.symlink_to("train")
    for _ in _make_all(tasks, processes or cores()):
        pass
    return root


def _tasks(part: Path, count: int, size: str, seed: int) -> Iterator[_Task]:
    for number in range(count):
        yield _Task(part / f"class_{number % CLASSES:02d}" / f"{number:06d}.jpg", seed, number, size)


def _make_all(tasks: list[_Task], processes: int) -> Iterator[None]:
    from tqdm import tqdm

    if not tasks:
        return
    # Spawned, not forked: this process may have running threads of torch.
    with multiprocessing.get_context("spawn").Pool(min(processes, len(tasks)), die_with_parent) as pool:
        yield from tqdm(
            pool.imap_unordered(_make, tasks, chunksize=4), "making images", len(tasks), leave=False, disable=None
        )


def _make(task: _Task) -> None:
    encoded = made_jpeg(task.size, task.seed, task.number)
    with replacing(task.path, sync=False) as unfinished:  # which no data set takes for an image
        unfinished.write_bytes(encoded)


def made_jpeg(size: str, seed: int, number: int) -> bytes:
    """Image `number` as a JPEG file of quality 90 to 95 with 4:2:0 chroma, as cameras write them."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, "made image", size, number)))
    chosen = SIZES[size]
    width, height = chosen.sizes[generator.choice(len(chosen.sizes), p=chosen.fractions)]
    file = io.BytesIO()
    quality = int(generator.integers(QUALITY[0], QUALITY[1] + 1))
    _picture(generator, width, height).save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def _picture(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """Clouds of colour, shapes with sharp edges in front of them, and grain over everything."""
    steepness = generator.uniform(0.95, 1.30)
    light = _clouds(generator, width, height, steepness) * generator.uniform(30, 55) + generator.uniform(90, 150)
    # Colour varies more slowly than brightness.
    warm, cold = (_clouds(generator, width, height, steepness + 0.35) * generator.uniform(8, 22) for _ in range(2))
    scene = _as_image(np.stack([light + warm, light - 0.3 * (warm + cold), light + cold], axis=-1))
    scene = _with_shapes(generator, scene)
    grain = _clouds(generator, width, height, 0.5)[..., None] * generator.uniform(4, 11)
    grain = grain + generator.standard_normal((height, width, 3)) * generator.uniform(0.5, 3)
    return _as_image(np.asarray(scene, dtype=np.float64) + grain)


def _clouds(generator: np.random.Generator, width: int, height: int, steepness: float) -> np.ndarray:
    """Noise with amplitude frequency ** -steepness; mean 0, standard deviation 1."""
    vertical, horizontal = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(vertical, horizontal)
    frequency[0, 0] = 1 / max(width, height)
    shape = frequency.shape
    waves = (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)) * frequency**-steepness
    field = np.fft.irfft2(waves, (height, width))
    return (field - field.mean()) / field.std()


def _with_shapes(generator: np.random.Generator, scene: Image.Image) -> Image.Image:
    """Add 3 to 13 ellipses, rectangles and polygons with random opacity, blurred by a random radius."""
    colours, mask = Image.new("RGB", scene.size), Image.new("L", scene.size)
    on_colours, on_mask = ImageDraw.Draw(colours), ImageDraw.Draw(mask)
    for _ in range(generator.integers(3, 14)):
        x, y = generator.integers(0, scene.width), generator.integers(0, scene.height)
        wide = generator.uniform(0.03, 0.28) * min(scene.size)
        high = wide * generator.uniform(0.4, 1.6)
        colour, opacity = tuple(int(v) for v in generator.integers(0, 255, 3)), int(generator.integers(90, 255))
        kind = generator.integers(0, 3)
        corners = [(x + generator.normal(0, wide), y + generator.normal(0, high)) for _ in range(4)]
        for drawing, fill in ((on_colours, colour), (on_mask, opacity)):
            if kind == 0:
                drawing.ellipse((x - wide, y - high, x + wide, y + high), fill=fill)
            elif kind == 1:
                drawing.rectangle((x - wide, y - high, x + wide, y + high), fill=fill)
            else:
                drawing.polygon(corners, fill=fill)
    mask = mask.filter(ImageFilter.GaussianBlur(generator.uniform(0.3, 1.5)))
    return Image.composite(colours, scene, mask)


def _as_image(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
