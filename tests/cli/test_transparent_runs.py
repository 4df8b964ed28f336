"""Images with transparent pixels, packed and trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.program import Vitamp, train_tiny

KEY = "DATA.BACKGROUND"


@pytest.fixture(scope="module")
def icons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Icons of two classes. A third of them are transparent outside a disc, with black stored there."""
    root = tmp_path_factory.mktemp("icons")
    y, x = np.mgrid[:16, :16] - 7.5
    for part, count in (("train", 24), ("val", 6)):
        for number in range(count):
            pixels = np.zeros((16, 16, 4), dtype=np.uint8)
            inside = np.hypot(x, y) < 4 + number % 3
            pixels[inside] = (250, 120 * (number % 2), 40, 255)
            image = Image.fromarray(pixels)
            path = root / part / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            (image if number % 3 == 0 else image.convert("RGB")).save(path)
    return root


def test_packed_images_are_composited_and_kept_ones_follow_the_training(
    vitamp: Vitamp, icons: Path, tmp_path: Path
) -> None:
    raw = (icons, tmp_path / "raw", "-dataset", "imagefolder", "-raw")
    vitamp(*raw, script="scripts/pack_images.py", code=0)
    done = vitamp(*raw, f"{KEY}=drop", script="scripts/pack_images.py", code=2)
    assert f"packed with {KEY} white, not drop" in done.text

    keep = (icons, tmp_path / "keep", "-dataset", "imagefolder", "-keep")
    done = vitamp(*keep, f"{KEY}=black", script="scripts/pack_images.py", code=2)
    assert "set it when training" in done.text
    done = vitamp(*keep, script="scripts/pack_images.py", code=0)
    assert f"Train with: -dataset shards -data_path {tmp_path / 'keep'}" in done.out
    words = ("-dataset", "shards", "-data_path", tmp_path / "keep", "DATA.IMAGE_CHANNELS=3", "MODEL.NUM_CLASSES=2")
    words += ("-batch_size", 4, "DATA.CROP=none", "DATA.NUM_WORKERS=1", "SAVE_FREQ=1")
    run = train_tiny(tmp_path, *words, f"{KEY}=black")
    assert "With an alpha channel (DATA.BACKGROUND=black): 8 of 24" in (run / "log.txt").read_text()
