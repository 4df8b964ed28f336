"""export.py -to hub, which timm alone loads, and -to onnx -with_resize, which resizes an image as validation does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from datasets.given import open_given
from datasets.transforms.pixels import Pixels
from engine.trained.model import load_trained
from tests.datasets.pictures import decoded_by
from tests.predicted import validation_predictions
from tests.program import ROOT, Vitamp, change_settings, metrics, save_image, train_tiny
from tests.tools.timm_alone import Tool, check_equal, in_timm_alone, pictures_of
from tools.checkpoint import command as checkpoint
from tools.export import from_image
from tools.export.formats import IMAGE
from tools.export.from_image import resize_model
from utils.config.data import DataConfig

NAMES = ["a cat", "dog|wolf", "élan"]
SIZES = ((130, 97), (97, 130), (51, 90), (7, 5), (1, 1), (32, 32), (36, 36), (47, 36))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files in class folders, of several sizes, which must be resized and cropped. A class has a colour."""
    root = tmp_path_factory.mktemp("photos")
    for part, count in (("train", 12), ("val", 9)):
        for number in range(count):
            path = root / part / NAMES[number % 3] / f"{number}.jpg"
            save_image(path, seed=number, size=(68 + 7 * number, 61 + 3 * (number % 2)))
            image, tint = Image.open(path), ((250, 30, 30), (30, 250, 30), (30, 30, 250))[number % 3]
            image = Image.blend(image, Image.new("RGB", image.size, tint), 0.4)
            (image.convert("L") if number == 4 else image).save(path)
    return root


@pytest.fixture(scope="module")
def photo_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("-dataset", "imagefolder", "-data_path", photos, "-image_size", 32, "DATA.IMAGE_CHANNELS=3")
    more = ("MODEL.NUM_CLASSES=3", "DATA.IMAGENET_MEAN=[0.4,0.5,0.6]", "DATA.BATCH_SIZE=4", "DATA.CROP_PCT=0.9")
    more += (
        "DATA.NUM_WORKERS=0",
        "TRAIN.NUM_EPOCHS=12",
        "DATA.CROP_SCALE=[0.5,1]",
        "TRAIN.BASE_LR=5e-3",
        "DATA.RANGE=[10,240]",
    )
    return train_tiny(tmp_path_factory.mktemp("photo_run"), *words, *more)


def test_digits_are_classified_alike_by_timm_alone(export_tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vit digits"
    said = export_tool(digits_run, "-to", "hub", "-output", folder, "-check", "all", "-weights", "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit digits"], "nothing else is left"
    files = {"README.md", "config.json", "curves.png", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == files
    assert "checked on 360 images of the run's validation split" in said
    assert f'timm.create_model("local-dir:{folder}", pretrained=True)' in said
    assert "README.md has no license" in said
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["label_names"] == [str(digit) for digit in range(10)]
    assert config["num_classes"] == 10
    about = config["pretrained_cfg"]
    assert (about["mean"], about["std"], about["input_size"]) == ([0.5], [0.5], [1, 8, 8])
    assert (about["crop_mode"], about["crop_pct"], about["interpolation"]) == ("squash", 1.0, "bicubic")

    trained = load_trained(digits_run, "model", device="cpu", amp="off")
    found = validation_predictions(trained)
    logits, names = in_timm_alone(f"local-dir:{folder}", "L", pictures_of(found, tmp_path), tmp_path)
    check_equal(found, logits)
    assert names == trained.chosen.classes
    code = (folder / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    words = [sys.executable, "-I", "-c", code, *(f"{row:03d}.png" for row in range(40))]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    for row, line in enumerate(told):
        chances = found.logits[row].softmax(0)
        name, label, chance = line.split()
        assert (name, label) == (words[4 + row], trained.name_of(int(chances.argmax())))
        assert float(chance) == pytest.approx(float(chances.max()), abs=6e-4)
    assert len(told) == 40


@pytest.mark.slow
def test_jpeg_files_are_prepared_and_classified_alike_by_timm_alone(
    export_tool: Tool, photo_run: Path, photos: Path, tmp_path: Path
) -> None:
    said = export_tool(photo_run, "-to", "hub", "-output", tmp_path / "photos", "-license", "cc-by-4.0")
    assert "no license" not in said
    paths = sorted((photos / "val").rglob("*.jpg"))
    logits, names = in_timm_alone(f"local-dir:{tmp_path / 'photos'}", "RGB", paths, tmp_path)
    assert names == NAMES
    trained = load_trained(photo_run, device="cpu", amp="off")
    # torch's kernel, which resizes by default, rounds a few pixels differently than PIL's, which timm uses.
    for decoder, tolerance in (("pil", 1e-5), ("simplejpeg", 2e-3)):
        with decoded_by(decoder):
            given = open_given([str(path) for path in paths], trained.config.DATA)
        check_equal(validation_predictions(trained, given, workers=0), logits, tolerance)
    right = [path.parent.name == NAMES[label] for path, label in zip(paths, logits.argmax(1).tolist(), strict=True)]
    assert sum(right) >= 7, "the model must have learned something"


def test_card_has_metadata_results_settings_and_no_path(
    export_tool: Tool, photo_run: Path, photos: Path, tmp_path: Path
) -> None:
    export_tool(photo_run, "-to", "hub", "-output", tmp_path / "photos", "-license", "mit", "-check", 2)
    text = (tmp_path / "photos" / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.get("library_name") == "timm"
    assert card.data.get("license") == "mit"
    assert card.data.get("datasets") is None, "imagefolder is a layout"
    assert card.data.get("metrics") == ["accuracy"]
    assert {"image-classification", "timm"} <= set(card.data.get("tags"))
    best = max(line["acc1"] for line in metrics(photo_run, "val"))
    (results,) = yaml.safe_load(text.split("---")[1])["model-index"]
    values = {one["name"]: one["value"] for one in results["results"][0]["metrics"]}
    assert values.keys() == {"top-1 (%)", "balanced accuracy (%)", "macro F1 (%)"}, "top-5 of 3 classes says nothing"
    assert values["top-1 (%)"] == pytest.approx(best, abs=1e-4)
    for expected in (
        f"| top-1 | {best:.2f} % |",
        "| training images | 12 |",
        "`a cat`, `dog\\|wolf`, `élan`",
        "centre cropped to 32 x 32 (`crop_pct` 0.9)",
        "![Loss and accuracy by epoch](curves.png)",
        "## How far to trust this\n\n- Perhaps too high: at least ",
        " points too high: chance, on ",
        'timm.create_model("local-dir:photos", pretrained=True)',
    ):
        assert expected in text
    assert "More of them" not in text, "no advice, whose commands may name files of this machine"
    held = text.encode() + (tmp_path / "photos" / "config.json").read_bytes()
    assert not [place for place in (photos, photo_run, tmp_path, sys.prefix) if str(place).encode() in held]


def test_card_names_public_sources_alone(export_tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    """A data set of the Hub and timm's pretrained weights are named; folders of this machine are not."""
    save_image(tmp_path / "pictures" / "a.jpg", seed=0)
    for data, weights, named in (
        ("hf:ylecun/mnist", "vit_tiny_patch16_224", ("ylecun/mnist", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k")),
        ("hf:/secret/images", "/secret/weights.pth", (None, None)),
        ("csv:/secret/images.csv", None, (None, None)),
        ("cifar10", None, (None, None)),
        ("imagenet2012", None, (None, None)),
        ("digits", None, (None, None)),
    ):
        moved = tmp_path / "moved"
        shutil.copytree(digits_run, moved, dirs_exist_ok=True)
        secret = {"TRAIN.CLASS_WEIGHTS": "/secret/classes.txt"}
        change_settings(moved, {"DATA.DATASET": data, "MODEL.PRETRAINED": weights, **secret})
        words = ("-to", "hub", "-output", tmp_path / "hub", "-overwrite", "-dtype", "bf16")
        export_tool(moved, *words, "-images", tmp_path / "pictures")
        text = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
        card = ModelCard(text).data
        assert (card.get("datasets"), card.get("base_model")) == (named[0] and [named[0]], named[1])
        assert "ILSVRC" not in text
        assert ("trained with vitamp on" in text) == (data in ("digits", "cifar10") or "mnist" in data)
        assert "They are stored in bf16 here." in text
        assert "secret" not in text


def test_overwrite_replaces_only_files_of_the_export(export_tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("old")
    words = (digits_run, "-to", "hub", "-output", folder, "-check", 2)
    assert "is not empty; name another folder, or give -overwrite" in export_tool(*words, code=2)
    assert (folder / "README.md").read_text() == "old"
    weights = next(digits_run.glob("checkpoints/step-*/model.safetensors"))
    moved = tmp_path / "alone" / weights.parent.name
    shutil.copytree(weights.parent, moved)
    export_tool(*words, "-overwrite")
    assert (folder / "curves.png").exists()
    stripped = tmp_path / "stripped.safetensors"
    assert checkpoint.main(["strip", str(moved), "-out", str(stripped)]) == 0
    for without_run in (moved, stripped):
        export_tool(without_run, *words[1:], "-overwrite")
        # Weights without their run have no curves, and those of the earlier export are gone.
        files = {"README.md", "config.json", "model.safetensors", "notes.txt"}
        assert {path.name for path in folder.iterdir()} == files


# -with_resize


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


def test_documented_code_predicts_from_images_of_any_size(
    vitamp: Vitamp, export_tool: Tool, photo_run: Path, tmp_path: Path
) -> None:
    said = export_tool(photo_run, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx")
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

    trained = load_trained(photo_run, device="cpu", amp="off")
    predicted = validation_predictions(trained)
    assert len(set(predicted.logits.argmax(1).tolist())) == 3, "the model has learned something"
    pictures = [predicted.name(row) for row in range(len(predicted))]
    for row, picture in enumerate(pictures):
        probabilities = np.asarray(session.run(None, {"image": np.asarray(Image.open(picture).convert("RGB"))})[0])
        wanted = predicted.logits[row].softmax(0).numpy()
        np.testing.assert_allclose(probabilities, wanted, rtol=0, atol=told["differences"]["probabilities"] + 1e-6)
    pattern = r"```python\n# from_image\.py\n(.*?)```"
    (code_of_page,) = re.findall(pattern, (ROOT / "docs/export.md").read_text(encoding="utf-8"), re.DOTALL)
    words = [sys.executable, "-c", code_of_page, str(tmp_path / "m.onnx"), *pictures]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    words = (photo_run, *pictures, "-format", "jsonl", "-topk", 1)
    rows = [json.loads(row) for row in vitamp(*words, script="scripts/predict.py").expect(0).out.splitlines()]
    for line, row in zip(done.stdout.splitlines(), rows, strict=True):
        said, _, probability = line.rpartition(" ")
        assert said == f"{row['image']} {row['guesses'][0]['class']}"
        assert abs(float(probability) - row["guesses"][0]["probability"]) < told["differences"]["probabilities"] + 1e-3


def test_file_that_would_predict_otherwise_is_not_written(
    export_tool: Tool, photo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ONNX would swap the colours."""
    plain = from_image.run_onnx
    monkeypatch.setattr(from_image, "run_onnx", lambda *words: [row[:, ::-1].copy() for row in plain(*words)])
    said = export_tool(photo_run, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx", code=1)
    assert "are clearly predicted otherwise than in validation, such as" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_clear() -> None:
    wanted, found = torch.tensor([[0.54, 0.46], [0.6, 0.4], [0.6, 0.4]]), torch.tensor([[0.4, 0.6]] * 2 + [[0.6, 0.4]])
    assert from_image.clearly_other(None, wanted, found).tolist() == [False, True, False]


def test_resize_with_a_border_is_refused(export_tool: Tool, photo_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "border"
    shutil.copytree(photo_run, other)
    for key, value, words in (
        ("DATA.CROP_PCT", 1.15, "DATA.CROP_PCT 1.15 is not supported, only up to 1. Use -with_preprocess"),
        ("DATA.CROP_MODE", "border", "DATA.CROP_MODE border is not supported, only center and squash. Use"),
    ):
        change_settings(other, {"DATA.CROP_PCT": 0.9, key: value})
        said = export_tool(other, "-to", "onnx", "-with_resize", "-out", tmp_path / "m.onnx", code=2)
        assert words in said
