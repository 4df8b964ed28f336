"""Maps of where a model looks find a marker that alone carries the class: in predict.py, the report and vitamp.load."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitamp as package
from tests.program import Result, run_program
from tools.common.command_line import EXIT_DONE
from vitamp.explain import maps_of

SIDE = 16
MARKER = 4
"""Pixels of a white or black square at the top left of noise"""
Vitamp = Callable[..., Result]
VIT = "MODEL.PATCH_SIZE=4 MODEL.EMBED_DIM=16 MODEL.DEPTH=1 MODEL.NUM_HEADS=2 MODEL.NAME=vit"


def write_images(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(160):
        part = "train" if number < 120 else "val"
        label = number % 2
        pixels = random.integers(64, 192, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[:MARKER, :MARKER] = 255 * label
        file = folder / part / ("black", "white")[label] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    return folder


@pytest.fixture(scope="module", params=[VIT, "-model test_resnet"], ids=["vit", "resnet"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned the markers."""
    root = tmp_path_factory.mktemp("marked")
    words = f"DATA.IMAGE_SIZE={SIDE} DATA.CROP=none DATA.FLIP=0 DATA.BATCH_SIZE=20 DATA.NUM_WORKERS=0 THREADS=1"
    words += " TRAIN.NUM_EPOCHS=20 TRAIN.WARMUP_EPOCHS=1 TRAIN.BASE_LR=0.005 MODEL.NUM_CLASSES=2 -device cpu"
    words += f" {request.param}"
    run_program(
        "-data_path", write_images(root / "data"), *words.split(), "-output", root / "run", streams=root, code=0
    )
    return root / "run"


def in_corner(found: np.ndarray) -> float:
    """The fraction of a map in the top left quarter."""
    height, width = found.shape
    return float(found[: height // 2, : width // 2].sum() / max(found.sum(), 1e-9))


def colour_of(picture: Path) -> np.ndarray:
    """How colourful each pixel is: the picture is grey, and the map is not."""
    pixels = np.asarray(Image.open(picture)).astype(float)
    return np.maximum(pixels.max(2) - pixels.min(2) - 20, 0)


def test_predict_colours_the_marker(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    words = (run, "-part", "val", "-topk", 1, "-explain", tmp_path / "maps")
    done = vitamp(*words, script="scripts/predict.py", code=EXIT_DONE)
    assert done.out.count(" %") == 40, "the classes as without -explain"
    pictures = sorted((tmp_path / "maps").iterdir())
    assert len(pictures) == 40
    assert pictures[0].name == "01_120_black.jpg"
    found = [in_corner(colour_of(picture)) > 0.5 for picture in pictures]
    assert np.mean(found) > 0.8


def test_load_explains_in_the_size_of_the_image(run: Path) -> None:
    loaded = package.load(run)
    file = run.parent / "data" / "val" / "white" / "121.png"
    pixels = np.asarray(Image.open(file))
    found = loaded.explain(file)
    assert found.shape == (SIDE, SIDE)
    assert (found.min(), found.max()) == (0, pytest.approx(1, abs=0.2))
    assert in_corner(found) > 0.5
    assert np.array_equal(found, loaded.explain(pixels))
    assert np.array_equal(found, loaded.explain(Image.fromarray(pixels), label=1))
    for label in (-1, 2):
        with pytest.raises(ValueError, match=f"label={label}: the model has 2 classes"):
            loaded.explain(pixels, label=label)
    larger = loaded.explain(Image.fromarray(pixels).resize((60, 100)))
    assert larger.shape == (100, 60)
    assert in_corner(larger) > 0.5


def test_report_shows_maps_of_classes(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    vitamp(run, "-out", tmp_path / "r.html", script="scripts/report.py", code=EXIT_DONE)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert re.findall('alt="mean map of ([^"]*)"', page) == ["black", "white"]


def bright_place(pixels: Tensor) -> Tensor:
    """Logits of two classes: how bright rows 4 and 5, columns 10 and 11 are, and how dark."""
    brightness = pixels[:, 0, 4:6, 10:12].float().mean((1, 2))
    return torch.stack((brightness, -brightness), 1)


@pytest.mark.parametrize("one_label", [False, True])
def test_map_is_where_the_score_comes_from(one_label: bool) -> None:
    pixels = torch.full((1, 16, 16), 9, dtype=torch.uint8)
    mean = torch.zeros(1, 1, 1)
    of_bright, of_dark = maps_of(bright_place, pixels, [0, 1], mean, one_label, batch=7)
    assert of_bright.max() == of_bright[4:6, 10:12].min() == 1
    assert of_bright[:, :6].max() == of_bright[0].max() == of_bright[10:].max() == 0
    assert of_dark.max() == 0, "hiding it makes the class more likely"


@pytest.mark.parametrize(("one_label", "fall"), [(False, 0.09), (True, 0.18)])
def test_map_stays_dark_if_the_odds_do_not_halve(one_label: bool, fall: float) -> None:
    pixels = torch.full((1, 16, 16), 9, dtype=torch.uint8)
    mean = torch.zeros(1, 1, 1)
    found = maps_of(lambda images: bright_place(images) / 100, pixels, [0], mean, one_label, batch=64)
    nearest = 0.875**2  # The nearest pixel is a quarter of a cell away from the middle of the brightest cell.
    assert found.max() == pytest.approx(nearest * fall / math.log(2), abs=1e-5)
