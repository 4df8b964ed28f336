"""scripts/export.py -to hub: timm alone loads the folder and computes what the run computed; -push uploads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from datasets.given import open_given
from engine.saved.predictions import Predictions, validation_predictions
from engine.saved.trained import load_trained
from tests.program import Result, metrics, save_image, train_tiny
from tests.tools.hub_server import TOKEN, FakeHub, serving_hub
from tools.export import command as export

Tool = Callable[..., tuple[int, str]]
NAMES = ["a cat", "dog|wolf", "élan"]

CONSUMER = """\
import sys

import timm
import torch
from PIL import Image

model_name, colours, out, *paths = sys.argv[1:]
model = timm.create_model(model_name, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
images = torch.stack([transform(Image.open(path).convert(colours)) for path in paths])
with torch.no_grad():
    torch.save((model(images), model.pretrained_cfg.get("label_names")), out)
ours = [name for name in ("engine", "models", "tools", "utils") if name in sys.modules]
sys.exit(f"imported {ours}" if ours else 0)
"""


@pytest.fixture
def tool(capfd: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    """Call the tool in this process: exit code and output."""
    threads = torch.get_num_threads()

    def call(*words: object) -> tuple[int, str]:
        capfd.readouterr()
        code = export.main([str(word) for word in words])
        return code, "".join(capfd.readouterr())

    yield call
    torch.set_num_threads(threads)


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
    more += ("DATA.NUM_WORKERS=0", "TRAIN.NUM_EPOCHS=12", "DATA.CROP_SCALE=[0.5,1]", "TRAIN.BASE_LR=5e-3")
    return train_tiny(tmp_path_factory.mktemp("photo_run"), *words, *more)


def in_timm_alone(
    model: str, colours: str, paths: list[Path], place: Path, env: dict[str, str] | None = None
) -> tuple[torch.Tensor, list[str] | None]:
    """Logits and class names, from a process that cannot import vitamp."""
    words = [sys.executable, "-I", "-c", CONSUMER, model, colours, str(place / "logits.pt"), *map(str, paths)]
    done = subprocess.run(
        words, cwd=place, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(place / "logits.pt", weights_only=True)


def pictures_of(found: Predictions, place: Path) -> list[Path]:
    paths = [place / f"{row:03d}.png" for row in range(len(found))]
    for row, path in enumerate(paths):
        found.picture(row).save(path)
    return paths


def check_equal(found: Predictions, logits: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits, found.logits, rtol=0, atol=tolerance)
    assert torch.equal(logits.argmax(1), found.logits.argmax(1))
    assert len(set(logits.argmax(1).tolist())) > 1, "a model that always says the same proves nothing"


def test_digits_are_classified_alike_by_timm_alone(tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vit digits"
    code, said = tool(digits_run, "-to", "hub", "-output", folder, "-check", "all", "-weights", "model")
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit digits"], "nothing else is left"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "curves.png",
        "model.safetensors",
    ]
    assert "checked on 360 images of the run's validation split" in said
    assert f'timm.create_model("local-dir:{folder}", pretrained=True)' in said
    assert "no license is in README.md" in said
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
    assert names == trained.classes


def test_jpeg_files_are_prepared_and_classified_alike_by_timm_alone(
    tool: Tool, photo_run: Path, photos: Path, tmp_path: Path
) -> None:
    code, said = tool(photo_run, "-to", "hub", "-output", tmp_path / "photos", "-license", "cc-by-4.0")
    assert code == 0, said
    assert "no license" not in said
    paths = sorted((photos / "val").rglob("*.jpg"))
    logits, names = in_timm_alone(f"local-dir:{tmp_path / 'photos'}", "RGB", paths, tmp_path)
    assert names == NAMES
    trained = load_trained(photo_run, device="cpu", amp="off")
    # torch's kernel, which resizes by default, rounds a few pixels differently than PIL's, which timm uses.
    for decoder, tolerance in (("pil", 1e-5), ("auto", 2e-3)):
        data = trained.config.DATA.model_copy(update={"DECODER": decoder})
        given = open_given([str(path) for path in paths], data)
        check_equal(validation_predictions(trained, given, workers=0), logits, tolerance)
    right = [path.parent.name == NAMES[label] for path, label in zip(paths, logits.argmax(1).tolist(), strict=True)]
    assert sum(right) >= 7, "the model must have learned something"


def test_card_has_metadata_results_settings_and_no_path(
    tool: Tool, photo_run: Path, photos: Path, tmp_path: Path
) -> None:
    code, said = tool(photo_run, "-to", "hub", "-output", tmp_path / "photos", "-license", "mit", "-check", 2)
    assert code == 0, said
    text = (tmp_path / "photos" / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.get("library_name") == "timm"
    assert card.data.get("license") == "mit"
    assert card.data.get("datasets") == ["imagefolder"]
    assert card.data.get("metrics") == ["accuracy"]
    assert {"image-classification", "timm"} <= set(card.data.get("tags"))
    best = max(line["acc1"] for line in metrics(photo_run, "val"))
    (results,) = yaml.safe_load(text.split("---")[1])["model-index"]
    values = {one["name"]: one["value"] for one in results["results"][0]["metrics"]}
    assert values["top-1 (%)"] == pytest.approx(best, abs=1e-4)
    for expected in (
        f"| top-1 | {best:.2f} % |",
        "| training images | 12 |",
        "`a cat`, `dog\\|wolf`, `élan`",
        "centre cropped to 32 x 32 (`crop_pct` 0.9)",
        "TRAIN.NUM_EPOCHS=12",
        "DATA.IMAGENET_MEAN=[0.4, 0.5, 0.6]",
        "![Loss and accuracy by epoch](curves.png)",
        'timm.create_model("local-dir:photos", pretrained=True)',
    ):
        assert expected in text
    held = text.encode() + (tmp_path / "photos" / "config.json").read_bytes()
    assert not [place for place in (photos, photo_run, tmp_path, sys.prefix) if str(place).encode() in held]


def test_card_names_public_sources_alone(tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    """A data set of the Hub and timm's pretrained weights are named; folders of this machine are not."""
    save_image(tmp_path / "pictures" / "a.jpg", seed=0)
    for data, weights, named in (
        ("hf:ylecun/mnist", "vit_tiny_patch16_224", ("ylecun/mnist", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k")),
        ("hf:/secret/images", "/secret/weights.pth", ("parquet", None)),
        ("cifar10", None, ("uoft-cs/cifar10", None)),
    ):
        moved = tmp_path / "moved"
        shutil.copytree(digits_run, moved, dirs_exist_ok=True)
        for meta in moved.glob("checkpoints/*/meta.json"):
            held = json.loads(meta.read_text())
            held["settings"] |= {"DATA.DATASET": data, "MODEL.PRETRAINED": weights}
            meta.write_text(json.dumps(held))
        words = ("-to", "hub", "-output", tmp_path / "hub", "-overwrite", "-dtype", "bf16")
        code, said = tool(moved, *words, "-images", tmp_path / "pictures")
        assert code == 0, said
        text = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
        card = ModelCard(text).data
        assert (card.get("datasets"), card.get("base_model")) == ([named[0]], named[1])
        assert "They are stored in bf16 here." in text
        assert "secret" not in text


@pytest.mark.slow
def test_code_in_the_card_classifies_images(tool: Tool, photo_run: Path, photos: Path, tmp_path: Path) -> None:
    code, said = tool(photo_run, "-to", "hub", "-output", tmp_path / "photos", "-check", 2)
    assert code == 0, said
    text = (tmp_path / "photos" / "README.md").read_text(encoding="utf-8")
    (code_block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    image = next(photos.rglob("val/*/*.jpg"))
    words = [sys.executable, "-I", "-c", code_block, str(image)]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(re.escape(str(image)) + r" (a cat|dog\|wolf|élan) 0\.\d{3}\n", shown.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        ("MODEL.NAME=swin_tiny_patch4_window7_224", "MODEL.STAGE_DEPTHS=[1,1]", "MODEL.NUM_HEADS=[2,4]"),
        ("MODEL.NAME=deit_tiny_distilled_patch16_224", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2"),
        ("MODEL.NAME=resnet10t", "MODEL.PATCH_SIZE=null", "MODEL.EMBED_DIM=null"),
        ("MODEL.NAME=convnext_atto", "MODEL.PATCH_SIZE=null", "MODEL.EMBED_DIM=null"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_other_models_are_loaded_by_timm_alone(
    vitamp: Callable[..., Result], tool: Tool, photos: Path, tmp_path: Path, model: tuple[str, ...]
) -> None:
    """Squeezed into a square, which PIL computes for vitamp and for timm in the same way."""
    sizes = (
        "-image_size",
        32,
        "MODEL.NUM_CLASSES=3",
        "MODEL.EMBED_DIM=16",
        "MODEL.PATCH_SIZE=4",
        "DATA.CROP=none",
        *model,
    )
    words = ("-dataset", "imagefolder", "-data_path", photos, "-batch_size", 4, "DATA.NUM_WORKERS=0", "-device", "cpu")
    done = vitamp("-output", tmp_path / "run", *words, *sizes, "TRAIN.MAX_UPDATES=2", "THREADS=1")
    assert done.code == 0, done.text
    code, said = tool(tmp_path / "run", "-to", "hub", "-output", tmp_path / "hub")
    assert code == 0, said
    paths = sorted((photos / "val").rglob("*.jpg"))
    logits, _ = in_timm_alone(f"local-dir:{tmp_path / 'hub'}", "RGB", paths, tmp_path)
    trained = load_trained(tmp_path / "run", device="cpu", amp="off")
    data = trained.config.DATA.model_copy(update={"DECODER": "pil"})
    found = validation_predictions(trained, open_given([str(path) for path in paths], data), workers=0)
    torch.testing.assert_close(logits, found.logits, rtol=1e-6, atol=1e-5)


def test_model_that_timm_builds_differently_is_refused(
    tool: Tool, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.export import hub

    right = hub.timm.models.save_for_hf

    def without(key: str) -> Callable[..., None]:
        def save(module: Any, folder: str, **options: Any) -> None:
            right(module, folder, **options)
            path = Path(folder) / "config.json"
            config = json.loads(path.read_text())
            del (config["model_args"] if key in config["model_args"] else config["pretrained_cfg"])[key]
            path.write_text(json.dumps(config))

        return save

    for key, reason in (
        ("depth", "timm cannot load tiny: Error(s) in loading state_dict"),
        ("mean", "timm would prepare images differently: mean (0.485, 0.456, 0.406) instead of (0.5,)"),
    ):
        monkeypatch.setattr(hub.timm.models, "save_for_hf", without(key))
        code, said = tool(digits_run, "-to", "hub", "-output", tmp_path / "hub", "-check", 2)
        assert (code, f"was not written: {reason}" in said) == (1, True), said
        assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_only_files_of_the_export(tool: Tool, digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("old")
    words = (digits_run, "-to", "hub", "-output", folder, "-check", 2)
    code, said = tool(*words)
    assert (code, "is not empty; name another folder, or give -overwrite" in said) == (2, True)
    assert (folder / "README.md").read_text() == "old"
    weights = next(digits_run.glob("checkpoints/step-*/model.safetensors"))
    moved = tmp_path / "alone" / "step-000000001"
    moved.parent.mkdir()
    moved.symlink_to(weights.parent)
    code, said = tool(*words, "-overwrite")
    assert code == 0, said
    assert (folder / "curves.png").exists()
    code, said = tool(moved, *words[1:], "-overwrite")
    assert code == 0, said
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "notes.txt",
    ], "a checkpoint without its run has no curves, and those of the earlier export are gone"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-to", "hub"), "-output is missing: name the folder that -to hub writes"),
        (("-to", "hub", "-out", "m"), "-out m: -to hub writes a folder; name it with -output m"),
        (("-to", "onnx", "-output", "m"), "-output m: is for -to hub"),
        (("-to", "torch,hub", "-output", "m"), "-out is missing: name the file to write"),
        (("-to", "torch", "-out", "m.pt2", "-push", "me/m"), "-push me/m: is for -to hub"),
        (("-to", "hub", "-output", "m", "-push", "m"), "-push m: takes OWNER/NAME, such as me/vit-flowers"),
        (("-to", "hub", "-output", "m", "-public"), "-public: is for -push OWNER/NAME"),
        (("-to", "hub", "-output", "m", "-with_preprocess"), "hub holds only weights"),
        (("-to", "hub", "-output", "m", "-opset", "20"), "only onnx has opsets"),
        (("-to", "hub", "-output", "there/m"), "the folder there does not exist"),
        (("-to", "hub", "-output", "file"), "is a file; name a folder"),
        (("-to", "hub", "-output", "run"), "is the folder of a run"),
    ],
)
def test_bad_command_lines_are_refused(
    tool: Tool, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("run").symlink_to(digits_run)
    code, said = tool(digits_run, *words)
    assert code == 2
    assert expected in said


# -push, to a stand-in for the Hub.


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub for the tool in this process."""
    with serving_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        for key, value in hub.env(tmp_path / "home").items():
            monkeypatch.setenv(key, value)
        yield hub


@pytest.mark.slow
def test_pushed_model_is_loaded_from_the_hub(vitamp: Callable[..., Result], digits_run: Path, tmp_path: Path) -> None:
    """Processes of their own, which find the Hub by HF_ENDPOINT."""
    with serving_hub() as hub:
        env, folder = hub.env(tmp_path / "home"), tmp_path / "digits"
        words = (digits_run, "-to", "hub", "-output", folder, "-check", 8, "-weights", "model", "-push", "me/digits")
        done = vitamp(*words, script="scripts/export.py", env=env, slow_start=True)
        assert done.code == 0, done.text
        assert f"-push me/digits: the repository does not exist on {hub.url}; it is created, private" in done.text
        assert f"{hub.url}/me/digits: pushed, private" in done.text
        assert 'timm.create_model("hf-hub:me/digits", pretrained=True)' in done.text
        assert TOKEN not in done.text
        assert hub.visibility == {"me/digits": "private"}
        assert hub.messages == ["Upload digits, exported by vitamp"]
        assert hub.files["me/digits"] == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert b'create_model("hf-hub:me/digits"' in hub.files["me/digits"]["README.md"]
        found = validation_predictions(load_trained(digits_run, "model", device="cpu", amp="off"))
        paths = pictures_of(found, tmp_path)
        logits, _ = in_timm_alone("hf-hub:me/digits", "L", paths, tmp_path, env | {"HF_HUB_DISABLE_XET": "1"})
        check_equal(found, logits)


def test_public_and_existing_repositories(tool: Tool, digits_run: Path, fake_hub: FakeHub, tmp_path: Path) -> None:
    words = (digits_run, "-to", "hub", "-output", tmp_path / "vit", "-check", 2, "-push", "museum/vit")
    code, said = tool(*words, "-public")
    assert code == 0, said
    assert "it is created, public (-public)" in said
    assert fake_hub.visibility == {"museum/vit": "public"}
    number = len(fake_hub.messages)
    before = fake_hub.requests.copy()
    code, said = tool(digits_run, "-to", "hub", "-output", tmp_path / "other", "-push", "museum/vit")
    assert code == 2
    assert "the repository already has README.md, config.json, curves.png, model.safetensors" in said
    assert not (tmp_path / "other").exists()
    assert not [line for line in fake_hub.requests[len(before) :] if line.startswith("POST")], "nothing was changed"
    code, said = tool(*words, "-overwrite")
    assert code == 0, said
    assert "the repository exists and stays public" in said
    assert len(fake_hub.messages) == number + 1


@pytest.mark.parametrize(
    ("name", "env", "role", "expected"),
    [
        ("me/vit", {"HF_TOKEN": ""}, "write", "there is no token for the Hugging Face Hub"),
        ("me/vit", {"HF_TOKEN": "hf_wrong"}, "write", "does not accept the request"),
        ("me/vit", {}, "read", "the token of me can only read"),
        ("you/vit", {}, "write", "the token cannot write to you; it can write to me, museum"),
        ("me/a--b", {}, "write", "Cannot have -- or .. in repo_id"),
    ],
)
def test_push_that_cannot_succeed_is_refused_before_any_work(
    tool: Tool,
    fake_hub: FakeHub,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    env: dict[str, str],
    role: str,
    expected: str,
) -> None:
    fake_hub.role = role
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    code, said = tool(digits_run, "-to", "hub", "-output", tmp_path / "vit", "-push", name)
    assert code == 2
    assert f"-push {name}: " in said
    assert expected in said
    assert "plain weights" not in said, "the run was not even loaded"
    assert not (tmp_path / "vit").exists()
    assert fake_hub.files == {}


def test_offline_and_unreachable_hubs_are_refused(
    tool: Tool, digits_run: Path, fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (digits_run, "-to", "hub", "-output", tmp_path / "vit", "-push", "me/vit")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, said = tool(*words)
    assert (code, "HF_HUB_OFFLINE is set" in said) == (2, True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, said = tool(*words)
    assert (code, "http://127.0.0.1:9 does not accept the request" in said) == (2, True)
    assert fake_hub.requests == []


def test_failed_upload_keeps_the_folder(tool: Tool, digits_run: Path, fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.refuse = "/commit/"
    folder = tmp_path / "vit"
    code, said = tool(digits_run, "-to", "hub", "-output", folder, "-check", 2, "-push", "me/vit")
    assert code == 1
    assert "-push me/vit: the upload failed (storage quota exceeded)" in said
    assert f"{folder} is complete and checked" in said
    assert (folder / "config.json").exists()
