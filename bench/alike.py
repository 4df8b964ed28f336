"""Which copies of images the search for near copies finds, and which different images it takes for copies.

    python bench/alike.py -name after -photographs DIR -bees DIR -hands DIR -icons DIR -out docs/results/alike.json
    python bench/alike.py -name before -code OTHER_CHECKOUT ... -out docs/results/alike.json

Sets: photographs, also cut to squares of 64 and of 32 pixels; bees and ants; hands that sign digits before one
background; icons of a desktop on white; scikit-learn's digits; marks drawn on equal batteries; and grey images of one
anatomy, smooth fields of which each image bends and shades another. Copies are made of some images of each set.
False pairs: of originals, or of an original and a copy of another one. Originals with equal pixels are one image.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance
from scipy.ndimage import gaussian_filter, map_coordinates
from sklearn.datasets import load_digits

COPIED = 200
"""Images of each set"""
MOST_ICONS = 700
"""Of each size"""
ANATOMY = 160
"""Pixels along each side"""
SEED = 0

Picture = Image.Image


def as_jpeg(image: Picture, quality: int) -> Picture:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    copy = Image.open(file)
    copy.info["file"] = file.getvalue()
    return copy


def resized(image: Picture, times: float, by: Image.Resampling = Image.Resampling.BICUBIC) -> Picture:
    return image.resize((max(1, round(image.width * times)), max(1, round(image.height * times))), by)


def cropped(image: Picture, fraction: float) -> Picture:
    wide = round(image.width * fraction / 2)
    high = round(image.height * fraction / 2)
    return image.crop((wide, high, image.width - wide, image.height - high))


COPIES: dict[str, Callable[[Picture], Picture]] = {
    "JPEG 95": partial(as_jpeg, quality=95),
    "JPEG 75": partial(as_jpeg, quality=75),
    "JPEG 50": partial(as_jpeg, quality=50),
    "halved": partial(resized, times=0.5),
    "doubled": partial(resized, times=2),
    "halved bilinear": partial(resized, times=0.5, by=Image.Resampling.BILINEAR),
    "doubled nearest": partial(resized, times=2, by=Image.Resampling.NEAREST),
    "halved, JPEG 75": lambda image: as_jpeg(resized(image, 0.5), 75),
    "5 % brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.05),
    "10 % less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.9),
    "cropped 2 %": partial(cropped, fraction=0.02),
}


def of_folder(folder: Path) -> Iterator[Picture]:
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in (".jpg", ".jpeg", ".png"):
            with Image.open(file) as image:
                yield image.convert("RGB")


def squares(images: Iterator[Picture], side: int) -> Iterator[Picture]:
    for image in images:
        short = min(image.size)
        left = (image.width - short) // 2
        top = (image.height - short) // 2
        square = image.crop((left, top, left + short, top + short))
        yield square.resize((side, side), Image.Resampling.LANCZOS)


def icons(folder: Path, side: int) -> Iterator[Picture]:
    """Those of one size, on white."""
    files = sorted(folder.glob(f"**/{side}x{side}/**/*.png"))
    for index in np.sort(np.random.default_rng(SEED).permutation(len(files))[:MOST_ICONS]):
        with Image.open(files[index]) as image:
            ground = Image.new("RGBA", image.size, "white")
            yield Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def digits() -> Iterator[Picture]:
    found: Any = load_digits()
    for image in found.images:
        yield Image.fromarray((image * 15.9).astype(np.uint8))


def batteries() -> Iterator[Picture]:
    """Each differs from others by one mark: a level, a colour, or a sign in a corner."""
    colours = ("green", "red", "orange", "gray")
    for level in range(9):
        for colour in colours:
            for sign in range(9):
                image = Image.new("RGB", (48, 48), "white")
                draw = ImageDraw.Draw(image)
                draw.rectangle((8, 14, 38, 34), outline="black", width=2)
                draw.rectangle((39, 20, 42, 28), fill="black")
                draw.rectangle((11, 17, 11 + 3 * level, 31), fill=colour)
                if sign:
                    left = 10 + 9 * (sign % 4)
                    top = 4 if sign <= 4 else 38
                    draw.ellipse((left, top, left + 5, top + 5), fill="blue")
                yield image


def anatomies() -> Iterator[Picture]:
    """Grey images of one anatomy: two lungs, a heart and ribs, which each image bends, shades and grains."""
    rng = np.random.default_rng(SEED)
    down, right = np.mgrid[-1 : 1 : ANATOMY * 1j, -1 : 1 : ANATOMY * 1j]
    body = 150 - 60 * right**2 - 20 * down**2
    for side in (-0.42, 0.42):
        body = body - 90 * np.exp(-(((right - side) / 0.25) ** 4) - ((down / 0.6) ** 4))
    body = body + 50 * np.exp(-(((right - 0.12) / 0.22) ** 2) - (((down - 0.25) / 0.35) ** 2))
    body = body + 12 * np.cos(14 * down + 3 * right**2)
    rows, columns = np.mgrid[:ANATOMY, :ANATOMY].astype(float)

    def field(width: float, strength: float) -> np.ndarray:
        smooth = gaussian_filter(rng.standard_normal((ANATOMY, ANATOMY)), width)
        return smooth / smooth.std() * strength

    for _ in range(600):
        bent = map_coordinates(body, [rows + field(25, 3), columns + field(25, 3)], order=1, mode="nearest")
        shaded = bent + field(30, 8) + field(6, 3) + field(1, 2)
        yield Image.fromarray(shaded.clip(0, 255).astype(np.uint8))


def encoded(image: Picture) -> bytes:
    if "file" in image.info:  # a JPEG stays one
        return image.info["file"]
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def measure(images: Iterator[Picture], channels: int) -> dict[str, Any]:
    """Of one set, by the code that `sys.path` names first."""
    from datasets.base import Samples
    from tools.check_data.near import near_pairs
    from tools.check_data.scan import scan_split, thumbnails_of
    from utils.config.data import DataConfig

    class InMemory(Samples):
        def __init__(self, files: list[bytes]) -> None:
            self.files = files
            self.labels = np.zeros(len(files), np.int64)

        def read(self, index: int) -> bytes:
            return self.files[index]

        def name(self, index: int) -> str:
            return f"{index}"

    different = {image.tobytes(): image for image in images}
    originals = list(different.values())
    files = [encoded(image) for image in originals]
    of = list(range(len(originals)))
    kinds = [""] * len(originals)
    copied = np.random.default_rng(SEED).permutation(len(originals))[:COPIED].tolist()
    for kind, change in COPIES.items():
        for index in copied:
            files.append(encoded(change(originals[index])))
            of.append(index)
            kinds.append(kind)
    scans = scan_split("images", InMemory(files), DataConfig().changed(IMAGE_CHANNELS=channels), 2).scans
    begin = time.process_time()
    pairs = near_pairs(thumbnails_of(scans))
    seconds = time.process_time() - begin

    count = len(originals)
    found = dict.fromkeys(COPIES, 0)
    false = set[tuple[int, int]]()
    false_originals = 0
    for one, other in pairs.tolist():
        if of[one] != of[other]:
            false.add((min(of[one], of[other]), max(of[one], of[other])))
            false_originals += other < count
        elif one < count:
            found[kinds[other]] += 1
    return {
        "originals": count,
        "copied": len(copied),
        "found_percent": {kind: round(100 * number / len(copied), 1) for kind, number in found.items()},
        "false_pairs_of_originals": false_originals,
        "false_pairs": len(false),
        "cpu_seconds_per_1000": round(1000 * seconds / len(files), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("-photographs", "-bees", "-hands", "-icons", "-out"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("-name", required=True, help="of the code in the table")
    parser.add_argument("-code", type=Path, default=Path(__file__).resolve().parents[1], help="checkout")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.code))
    sets: dict[str, tuple[Iterator[Picture], int]] = {
        "photographs": (of_folder(asked.photographs), 3),
        "photographs of 64 pixels": (squares(of_folder(asked.photographs), 64), 3),
        "photographs of 32 pixels": (squares(of_folder(asked.photographs), 32), 3),
        "bees and ants": (of_folder(asked.bees), 3),
        "hands": (of_folder(asked.hands), 3),
        "icons of 48 pixels": (icons(asked.icons, 48), 3),
        "icons of 96 pixels": (icons(asked.icons, 96), 3),
        "batteries": (batteries(), 3),
        "digits of 8 pixels": (digits(), 1),
        "one anatomy": (anatomies(), 1),
    }
    about: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"sets": {}}
    about |= {"script": "bench/alike.py", "date": time.strftime("%Y-%m-%d")}
    for name, (images, channels) in sets.items():
        found = measure(images, channels)
        about["sets"].setdefault(name, {})[asked.name] = found
        print(name, found, flush=True)
        asked.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
