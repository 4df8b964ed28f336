"""check_data.py finds copies that were encoded again, resized or made brighter, and tells similar images apart."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from tests.datasets.pictures import picture
from tests.program import Result
from tools.check_data.scan import MOST_BITS, SIDE, Thumbnails, near_pairs


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "encoded again": lambda image: as_jpeg(image, 60),
    "halved": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "doubled": lambda image: image.resize((image.width * 2, image.height * 2), Image.Resampling.BILINEAR),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.07),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.9),
}


def glyph(character: str) -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    font = ImageFont.load_default(48)
    ImageDraw.Draw(image).text((32, 32), character, fill="black", font=font, anchor="mm")
    return image


def icon(level: int, colour: str) -> Image.Image:
    """A battery that is more or less full, which is how icons differ: by a small mark."""
    image = Image.new("RGB", (48, 48), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 14, 38, 34), outline="black", width=2)
    draw.rectangle((39, 20, 42, 28), fill="black")
    draw.rectangle((11, 17, 11 + 3 * level, 31), fill=colour)
    return image


def thumbnails(images: list[Image.Image]) -> Thumbnails:
    pixels = [np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images]
    return Thumbnails(np.stack(pixels).transpose(0, 3, 1, 2))


def pairs(images: list[Image.Image]) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in near_pairs(thumbnails(images)).tolist()]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found(change: str) -> None:
    originals = [picture(200, 150, seed) for seed in range(60)] + [glyph(c) for c in "abdefghkmnpqrstuwxyzABCDEFGHKMN"]
    copies = [CHANGES[change](image) for image in originals]
    count = len(originals)
    found = pairs([*originals, *copies])
    assert sum((index, index + count) in found for index in range(count)) >= 0.97 * count
    assert [pair for pair in found if pair[1] - pair[0] != count] == [], "different images"


def test_similar_images_are_told_apart() -> None:
    icons = [icon(level, colour) for level in range(9) for colour in ("green", "red")]
    glyphs = [glyph(c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?+-=<>()[]"]
    flat = [Image.new("RGB", (32, 32), (shade, shade, 255)) for shade in range(0, 250, 5)]
    images = [*icons, *glyphs, *flat]
    assert pairs(images) == []
    assert thumbnails(images).flat.sum() == len(flat)


def marked(image: np.ndarray, by: float, side: int = 1) -> np.ndarray:
    """With one of the 64 blocks, or a square of more, brighter by this fraction of the contrast."""
    changed = image.copy()
    changed[:, 8 : 8 + 4 * side, 8 : 8 + 4 * side] += by * image.std()
    return changed


ALIKE = {
    "the same": (lambda image: image, True),
    "20 shades brighter": (lambda image: image + 20, True),
    "45 shades brighter": (lambda image: image + 45, False),
    "less contrast": (lambda image: (image - 128) * 0.85 + 128, True),
    "half the contrast": (lambda image: (image - 128) * 0.5 + 128, False),
    "twice the contrast": (lambda image: (image - 128) * 2 + 128, False),
    "a faint mark": (lambda image: marked(image, 0.1), True),
    "a small mark": (lambda image: marked(image, 0.37), False),
    "a large pale mark": (lambda image: marked(image, 0.29, side=2), False),
}
"""What is done to an image of noise, and whether that is nearly the same. All have nearly the same code."""


@pytest.mark.parametrize("change", ALIKE)
def test_each_limit_tells_images_apart(change: str) -> None:
    image = np.random.default_rng(0).integers(96, 160, (3, SIDE, SIDE)).astype(np.float32)
    altered, alike = ALIKE[change]
    for pair in ((image, altered(image)), (altered(image), image)):
        both = Thumbnails(np.stack(pair).round().clip(0, 255).astype(np.uint8))
        assert np.bitwise_count(both.codes[0] ^ both.codes[1]) <= MOST_BITS - 1
        assert len(near_pairs(both)) == alike


def test_images_of_nearly_one_colour_have_no_near_copies() -> None:
    image = np.random.default_rng(0).integers(96, 104, (3, SIDE, SIDE)).astype(np.uint8)
    both = Thumbnails(np.stack([image, image]))
    assert both.flat.all()
    assert len(near_pairs(both)) == 0


def test_every_pair_of_near_codes_is_compared() -> None:
    """Noise that puts images just inside the bound, among many others."""
    generator = np.random.default_rng(0)
    first = generator.integers(60, 196, (400, 3, SIDE, SIDE)).astype(np.float32)
    second = first + 0.1 * first.std() * generator.standard_normal(first.shape)
    both = Thumbnails(np.concatenate([first, second]).round().astype(np.uint8))
    found = near_pairs(both).tolist()
    assert len(found) >= 0.99 * 400
    assert all(b - a == 400 for a, b in found)


@pytest.fixture
def leaks(tmp_path: Path) -> Path:
    """Five changed copies of validation images in training, one with another label; icons on transparent ground."""
    root = tmp_path / "data"
    for split, first in (("train", 0), ("val", 100)):
        for number in range(12 if split == "train" else 6):
            place = root / split / ("ant", "bee")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            picture(120, 100, first + number).save(place / f"{number}.png")
    for number, change in enumerate(CHANGES.values()):
        with Image.open(root / f"val/{('ant', 'bee')[number % 2]}/{number}.png") as image:
            change(image).save(root / f"train/bee/leak{number}.png")
    with Image.open(root / "train/ant/0.png") as image:
        as_jpeg(image, 70).save(root / "train/ant/again.jpg")
    shutil.copyfile(root / "val/bee/5.png", root / "train/bee/exact.png")
    (root / "train/few").mkdir()
    (root / "val/few").mkdir()
    for number, place in enumerate(("train/few/0.png", "train/few/1.png", "val/few/2.png")):
        icon(3 * number, "red").convert("RGBA").save(root / place)
    white = np.full((20, 20, 4), 255, dtype=np.uint8)
    white[:, :, 3] = np.random.default_rng(0).integers(0, 2, (20, 20)) * 255  # a white drawing on white
    Image.fromarray(white).save(root / "train/bee/white.png")
    return root


def test_fix_removes_from_training_what_validation_has(
    leaks: Path, vitamp: Callable[..., Result], tmp_path: Path
) -> None:
    words = ("-dataset", "imagefolder", "-data_path", leaks, "-num_classes", 3, "-image_size", 64, "-num_workers", 0)
    found, listed = tmp_path / "found.json", tmp_path / "fix.txt"
    done = vitamp(*words, "-json", found, "-fix", listed, script="scripts/check_data.py")
    assert done.code == 1, done.text
    told = json.loads(found.read_text())
    near = {Path(one["name"]).name: one["about"] for one in told["defects"]["nearly_in_both_parts"]}
    assert set(near) == {f"leak{number}.png" for number in range(5)}
    assert near["leak0.png"].endswith("val/ant/0.png, but bee instead of ant")
    assert near["leak1.png"].endswith("val/bee/1.png")
    assert [Path(one["name"]).name for one in told["notes"]["nearly_duplicate"]] == ["again.jpg"]
    assert [Path(one["name"]).name for one in told["notes"]["of_one_colour"]] == ["white.png"]
    assert told["notes"]["tiny_classes"] == ["few (2)"]
    assert "5 training images: nearly the same as an image in validation" in done.out
    assert "1 training images: also in validation, byte for byte" in done.out
    removed = {line.split("  # ")[0] for line in listed.read_text().splitlines()[1:]}
    assert removed == {*(f"train/bee/leak{number}.png" for number in range(5)), "train/bee/exact.png"}
    done = vitamp(*words, f"DATA.EXCLUDE={listed}", script="scripts/check_data.py")
    assert done.code == 0, done.text
