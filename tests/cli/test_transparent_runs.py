"""Images with transparent pixels in whole runs: what is said, and what a run from before DATA.BACKGROUND keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.program import Result, change_settings, metrics, train_tiny

WHITE = "composited on white (DATA.BACKGROUND)"
DROPPED = "their transparency is dropped, and the colours stored under it appear (DATA.BACKGROUND: drop)"
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


def of_icons(icons: Path) -> list[object]:
    words = ["-dataset", "imagefolder", "-data_path", icons, "DATA.IMAGE_CHANNELS=3", "MODEL.NUM_CLASSES=2"]
    return [*words, "-batch_size", 4, "DATA.CROP=none", "DATA.NUM_WORKERS=1", "SAVE_FREQ=1"]


@pytest.fixture(scope="module")
def dropping(icons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an earlier version, which did not have the key."""
    run = train_tiny(tmp_path_factory.mktemp("dropping"), *of_icons(icons), f"{KEY}=drop", "TRAIN.NUM_EPOCHS=1")
    change_settings(run, {}, without=KEY)
    return run


def test_new_runs_composite_on_white_and_say_how_many(icons: Path, tmp_path: Path) -> None:
    run = train_tiny(tmp_path, *of_icons(icons))
    log = (run / "log.txt").read_text()
    assert log.count(f"8 of 24 training images have transparent pixels: {WHITE}") == 1
    assert log.count(f"2 of 6 evaluated images have transparent pixels: {WHITE}") == 1
    assert "BACKGROUND: white" in (run / "config.yaml").read_text()


def test_a_run_from_before_the_key_resumes_as_it_was(
    vitamp: Callable[..., Result], icons: Path, dropping: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(dropping, run)
    done = vitamp("-resume", run, "-output", run, "-epochs", 2)
    assert done.code == 0, done.text
    assert f"{KEY} drop (white now)" in done.out
    assert f"  changed since: {KEY}" not in done.out
    assert f"8 of 24 training images have transparent pixels: {DROPPED}" in done.out
    whole = train_tiny(tmp_path, *of_icons(icons), f"{KEY}=drop", "-output", tmp_path / "whole")
    assert metrics(run, "val")[-1] == metrics(whole, "val")[-1], "as if it had never been interrupted"


def test_tools_read_a_run_from_before_the_key_as_it_was(
    vitamp: Callable[..., Result], icons: Path, dropping: Path, tmp_path: Path
) -> None:
    done = vitamp(dropping, script="scripts/evaluate.py")
    assert done.code == 0, done.text
    assert f"2 of 6 evaluated images have transparent pixels: {DROPPED}" in done.text
    done = vitamp(dropping, icons / "val", "-format", "csv", script="scripts/predict.py")
    assert done.code == 0, done.text
    assert f"2 of 6 evaluated images have transparent pixels: {DROPPED}" in done.err

    file = tmp_path / "m.safetensors"
    done = vitamp(dropping, "-to", "safetensors", "-out", file, script="scripts/export.py")
    assert done.code == 0, done.text
    found = vitamp(file, icons / "val", "-format", "csv", script="scripts/predict.py")
    assert f"2 of 6 evaluated images have transparent pixels: {DROPPED}" in found.err
    white = vitamp(dropping, f"{KEY}=white", script="scripts/evaluate.py")
    assert f"2 of 6 evaluated images have transparent pixels: {WHITE}" in white.text


def test_packed_images_are_composited_and_kept_ones_follow_the_training(
    vitamp: Callable[..., Result], icons: Path, tmp_path: Path
) -> None:
    done = vitamp(icons, tmp_path / "raw", "-dataset", "imagefolder", "-raw", script="scripts/pack_images.py")
    assert done.code == 0, done.text
    assert f"10 images have transparent pixels: {WHITE}" in done.text
    done = vitamp("-verify", tmp_path / "raw", script="scripts/pack_images.py")
    assert done.code == 0, done.text
    done = vitamp(
        *(icons, tmp_path / "raw", "-dataset", "imagefolder", "-raw", f"{KEY}=drop"), script="scripts/pack_images.py"
    )
    assert done.code == 2
    assert f"packed with {KEY} white, not drop" in done.text

    keep = (icons, tmp_path / "keep", "-dataset", "imagefolder", "-keep")
    done = vitamp(*keep, f"{KEY}=black", script="scripts/pack_images.py")
    assert (done.code, "set it when training" in done.text) == (2, True), done.text
    done = vitamp(*keep, script="scripts/pack_images.py")
    assert done.code == 0, done.text
    assert f"Train with: -dataset shards -data_path {tmp_path / 'keep'}" in done.out
    run = train_tiny(tmp_path, *of_icons(tmp_path / "keep"), "-dataset", "shards", f"{KEY}=black")
    assert "8 of 24 training images have transparent pixels: composited on black" in (run / "log.txt").read_text()
