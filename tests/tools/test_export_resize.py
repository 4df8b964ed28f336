"""export.py -to onnx -with_resize: the file resizes an image of any size as validation does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from datasets.transforms.pixels import Pixels
from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import ROOT, change_settings, run_program
from tools.export import from_image
from tools.export.check import IMAGE, OneLabel
from tools.export.from_image import resize_model
from utils.config.data import DataConfig

Export = Callable[..., tuple[int, str]]
MODEL = ("MODEL.NAME=tiny", "MODEL.NUM_CLASSES=3", "MODEL.PATCH_SIZE=8", "MODEL.EMBED_DIM=32", "MODEL.DEPTH=2")
REST = ("MODEL.NUM_HEADS=2", "DATA.IMAGE_SIZE=32", "TRAIN.NUM_EPOCHS=8", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=0.05")
QUICK = ("-batch_size", 6, "-num_workers", 0, "-device", "cpu", "-amp", "off")
SIZES = ((130, 97), (97, 130), (51, 90), (7, 5), (1, 1), (32, 32), (36, 36), (47, 36))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of three colours, each of another size."""
    place = tmp_path_factory.mktemp("resized")
    for part, count in (("train", 24), ("val", 9)):
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 120, (70 + number, 90 - 2 * number, 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            path = place / "data" / part / f"class{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    data = ("-dataset", "imagefolder", "-data_path", place / "data")
    done = run_program(*data, *MODEL, *REST, *QUICK, "-output", place / "run", streams=place)
    assert done.code == 0, done.text
    return place / "run"


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("mode", "share", "channels"), [("center", 0.875, 3), ("center", 0.9, 1), ("squash", 1.0, 3)])
def test_pixels_are_those_of_validation(interpolation: str, mode: str, share: float, channels: int) -> None:
    values = {"IMAGE_SIZE": 32, "CROP_PCT": share, "CROP_MODE": mode, "INTERPOLATION": interpolation}
    data = DataConfig.model_validate({**values, "IMAGE_CHANNELS": channels})
    session = onnxruntime.InferenceSession(resize_model(data).SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    for wide, high in SIZES:
        image = random.integers(0, 256, (high, wide, 3), dtype=np.uint8)
        wanted = torch.empty(channels, 32, 32, dtype=torch.uint8)
        Pixels(data, train=False)(image, wanted)
        pixels = np.asarray(session.run(None, {IMAGE: image})[0])[0]
        differences = np.abs(pixels.astype(int) - wanted.numpy())
        if interpolation == "bilinear" and mode == "squash":  # beyond the edge, onnxruntime repeats the last pixel
            differences = differences[:, 1:-1, 1:-1]
        assert differences.max() <= 2, (wide, high)
        assert (differences > 0).mean() < 0.2, (wide, high)


def test_documented_code_predicts_from_images_of_any_size(export_tool: Export, run: Path, tmp_path: Path) -> None:
    code, said = export_tool(run, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx")
    assert code == 0, said
    assert "'image' H x W x 3 (uint8, RGB, any size) to 'probabilities' 3" in said
    assert "checked on 25 images of the run's validation split (16 of them resized to be portrait, landscape" in said
    found = re.search(r"pixels differ from those of validation by at most ([012]) of 255", said)
    assert found is not None
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    told = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert (told["input"], told["output"]) == ("image", "probabilities")
    assert told["differences"]["images"] == 25
    assert told["differences"]["pixels"] == int(found[1])
    assert told["differences"]["probabilities"] < 0.01

    trained = load_trained(run, device="cpu", amp="off")
    predicted = validation_predictions(trained)
    assert len(set(predicted.logits.argmax(1).tolist())) == 3, "the model has learned something"
    pictures = [predicted.name(row) for row in range(len(predicted))]
    for row, picture in enumerate(pictures):
        probabilities = np.asarray(session.run(None, {"image": np.asarray(Image.open(picture))})[0])
        wanted = predicted.logits[row].softmax(0).numpy()
        np.testing.assert_allclose(probabilities, wanted, rtol=0, atol=told["differences"]["probabilities"] + 1e-6)
    code_of_page = re.search(
        r"```python\n# (from_image\.py)\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL
    )
    assert code_of_page is not None
    (tmp_path / code_of_page[1]).write_text(code_of_page[2], encoding="utf-8")
    words = [sys.executable, code_of_page[1], "m.onnx", *pictures]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    labels = predicted.logits.argmax(1).tolist()
    assert [line[:2] for line in lines] == [
        [path, f"class{label}"] for path, label in zip(pictures, labels, strict=True)
    ]


def test_file_that_would_predict_otherwise_is_not_written(
    export_tool: Export, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ONNX would swap the colours."""
    plain = from_image.run_onnx
    monkeypatch.setattr(from_image, "run_onnx", lambda *words: [row[:, ::-1].copy() for row in plain(*words)])
    code, said = export_tool(run, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx")
    assert code == 1
    assert "are clearly predicted otherwise than in validation, such as" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_clear() -> None:
    wanted, found = torch.tensor([[0.54, 0.46], [0.6, 0.4], [0.6, 0.4]]), torch.tensor([[0.4, 0.6]] * 2 + [[0.6, 0.4]])
    trained: object = None
    assert OneLabel(trained).clearly_other(wanted, found, 0.1).tolist() == [False, True, False]  # pyright: ignore[reportArgumentType]


def test_what_a_file_cannot_do_is_refused(export_tool: Export, run: Path, tmp_path: Path) -> None:
    for words, expected in (
        (("-to", "onnx,torch", "-out", tmp_path / "m"), "-with_resize: works only with -to onnx; export torch by"),
        (("-to", "onnx", "-with_preprocess", "-out", tmp_path / "m.onnx"), "leave -with_preprocess out"),
    ):
        code, said = export_tool(run, "-with_resize", *words)
        assert code == 2
        assert expected in said
    other = tmp_path / "border"
    shutil.copytree(run, other)
    change_settings(other, {"DATA.CROP_MODE": "border"})
    code, said = export_tool(other, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx")
    assert code == 2
    assert "DATA.CROP_MODE border is not supported, only center and squash. Use -with_preprocess" in said
