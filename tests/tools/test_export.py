"""scripts/export.py: exported files agree with the model, here and elsewhere, and others are not left behind."""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from safetensors import safe_open

from datasets.base import background_of
from datasets.transforms.pixels import Pixels
from engine.task.one import OneLabel
from engine.trained.model import load_trained
from tests.datasets.pictures import decoded_by
from tests.predicted import validation_predictions
from tests.program import ROOT, Vitamp, change_settings, metrics, save_image, train_tiny
from tests.tools.timm_alone import Tool, pictures_of
from tools.export import command
from tools.export.check import compare
from tools.export.formats import FORMATS, CheckImages
from utils.config.data import DataConfig
from utils.errors import TrainingError
from vitamp.weights import read_header

PAGE = ROOT / "docs" / "export.md"
NAMES = {"onnx": "m.onnx", "torch": "m.pt2", "safetensors": "m.safetensors"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in bf16, so that attention and patches use vitamp's own code, and with an EMA."""
    words = ("-amp", "bf16", "TRAIN.MODEL_EMA=true", "AMP.FP32_MODULES=['blocks.0.mlp']")
    return train_tiny(tmp_path_factory.mktemp("export"), *words)


def about_of(file: Path) -> dict[str, Any]:
    if file.suffix == ".onnx":
        import onnxruntime

        held = onnxruntime.InferenceSession(str(file)).get_modelmeta().custom_metadata_map
        return {name: json.loads(text) for name, text in held.items()}
    if file.suffix == ".pt2":
        held = {"vitamp.json": ""}
        torch.export.load(file, extra_files=held)
        return json.loads(held["vitamp.json"])
    with safe_open(str(file), framework="pt") as opened:
        return json.loads(opened.metadata()["vitamp"])


def test_three_formats_agree_with_the_model(export_tool: Tool, run: Path, tmp_path: Path) -> None:
    said = export_tool(run, "-to", "onnx,torch,safetensors", "-out", tmp_path / "m", "-check", "all")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES.values()), "no other file is left"
    assert said.count("checked on 360 images of the run's validation split") == 3
    stages = ("to compare with ...", "m.onnx: exporting", "m.onnx: checking it", "m.onnx: 0.", "m.pt2: exporting")
    assert sorted(stages, key=said.index) == [*stages]
    assert said.count(" allowed), no answer changed") == 3
    assert said.count(" times as fast as torch an image at a time (this CPU, 1 thread)") == 2, "weights are torch's own"

    model = load_trained(run, device="cpu", amp="off")
    (tmp_path / "plain").touch()
    for name in NAMES.values():
        told = about_of(tmp_path / name)
        assert told["classes"] == [str(digit) for digit in range(10)]
        assert (told["mean"], told["std"], told["image_size"], told["crop"]) == ([0.5], [0.5], 8, "none")
        assert (told["input"], told["weights"], told["dtype"]) == ("normalised", "model", "fp32")
        assert told["exif_rotate"] is False
        held = (tmp_path / name).read_bytes()
        assert not [place for place in (str(ROOT), sys.prefix, str(tmp_path)) if place.encode() in held]
        assert (tmp_path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it"

    pixels = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    wanted, images = model.logits(pixels), model.inputs(pixels)
    line = re.search(r"timm\.create_model\(.*\)", said)
    assert line is not None
    alone = eval(line[0], {"timm": timm}).eval()
    with torch.no_grad():
        torch.testing.assert_close(alone(images), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(images), wanted, rtol=0, atol=1e-5)


def test_file_with_different_outputs_is_not_left_behind(export_tool: Tool, run: Path, tmp_path: Path) -> None:
    words = ("-to", "safetensors", "-out", tmp_path / "m.safetensors", "-dtype", "fp16")
    said = export_tool(run, *words, "-tolerance", "1e-7", code=1)
    assert "was not written: the outputs differ from the model's by up to" in said
    assert re.search(r"\n  \d+, class \d: -?[\d.]+ instead of -?[\d.]+\n", said), "the largest differences are listed"
    assert list(tmp_path.iterdir()) == []
    said = export_tool(run, *words)
    assert re.search(r"\(0.01 allowed\), .*; fp16 (costs|gains) \d.\d points of top-1 \(95 % interval ", said)
    with safe_open(str(tmp_path / "m.safetensors"), framework="pt") as file:
        assert file.get_tensor("head.weight").dtype is torch.float16


def test_model_with_a_module_in_two_places_is_exported(
    export_tool: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors share memory, as those of CoaT."""

    def shared(*words: Any, **sizes: Any) -> Any:
        model: Any = create_model(*words, **sizes)
        model.blocks[0].norm2 = model.blocks[0].norm1
        return model

    create_model = timm.create_model
    monkeypatch.setattr(timm, "create_model", shared)
    for words in (("-to=safetensors", "-out", tmp_path / "m.safetensors"), ("-to=hub", "-output", tmp_path / "hub")):
        assert "no answer changed" in export_tool(run, *words)


def test_check_on_images_of_a_folder(export_tool: Tool, run: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    for number in range(3):
        save_image(pictures / f"{number}.jpg", seed=number)
    (pictures / "broken.png").write_bytes(b"no image")
    (pictures / "notes.txt").write_text("no image either")
    said = export_tool(run, "-to", "safetensors", "-out", tmp_path / "m.safetensors", "-images", pictures)
    assert f"checked on 3 images in {pictures}" in said
    assert "freshly initialised" not in said, "the weights are loaded"
    assert f"1 images cannot be read and are left out, such as {pictures}/broken.png" in said
    assert about_of(tmp_path / "m.safetensors")["crop"] == "none", "as for digits"


def test_without_data_the_check_uses_noise_and_says_so(export_tool: Tool, run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    change_settings(moved, {"DATA.DATASET": "imagefolder", "DATA.DATA_PATH": str(tmp_path / "gone")})
    said = export_tool(moved, "-to", "safetensors", "-out", tmp_path / "m.safetensors")
    assert f"{tmp_path / 'gone'} does not exist" in said
    assert "images of generated noise, since the real ones cannot be read" in said
    said = export_tool(run, "-to", "safetensors", "-out", tmp_path / "n.safetensors", "-part", "test", code=2)
    assert "the data set digits has no test split; -part val evaluates" in said


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_full_disk_leaves_no_file(export_tool: Tool, run: Path, tmp_path: Path, kind: str) -> None:
    """No file may grow beyond 2,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        said = export_tool(run, "-to", kind, "-out", tmp_path / NAMES[kind], "-check", 4, code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written (File too large)" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-to", "onxn", "-out", "m.onnx"), "'onxn'; formats are onnx, openvino, torch, safetensors and hub"),
        (("-to", "onnx", "-out", "m.pt"), "onnx files end in .onnx; use -out m.onnx"),
        (("-to", "onnx,torch", "-out", "m.onnx"), "give the name without ending, m"),
        (("-to", "onnx", "-out", "large.onnx"), "large.onnx.data: already exists"),
        (("-to", "torch", "-out", "seen.pt2"), "seen.pt2.changed.html: already exists"),
        (("-to", "onnx", "-out", "m.onnx", "-dtype", "bf16"), "use fp16"),
        (("-to", "safetensors", "-out", "m.safetensors", "-with_preprocess"), "holds only weights"),
        (("-to", "onnx,torch", "-out", "m", "-with_resize"), "-with_resize: works only with -to onnx; export torch by"),
        (("-to", "onnx", "-out", "m.onnx", "-with_preprocess", "-with_resize"), "leave -with_preprocess out"),
        (("-to", "torch", "-out", "m.pt2", "-tolerance", "2"), "between 0 and 1"),
        (("-to", "torch", "-out", "m.pt2", "-check", "0"), "or all"),
        (("-to", "torch"), "-out is missing: name the file to write"),
        (("-to", "hub"), "-output is missing: name the folder that -to hub writes"),
        (("-to", "hub", "-out", "m"), "-out m: -to hub writes a folder; name it with -output m"),
        (("-to", "onnx", "-output", "m"), "-output m: works only with -to hub"),
        (("-to", "hub", "-output", "m", "-with_preprocess"), "hub holds only weights"),
        (("-to", "hub", "-output", "there/m"), "the folder there does not exist"),
        (("-to", "hub", "-output", "file"), "is a file; name a folder"),
        (("-to", "hub", "-output", "run"), "is the folder of a run"),
        (("-to", "safetensors", "-out", "checkpoints/a.safetensors", "-overwrite"), "belongs to a checkpoint"),
    ],
)
def test_bad_command_lines_are_refused(
    export_tool: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("large.onnx.data").touch()
    Path("seen.pt2.changed.html").touch()
    Path("file").touch()
    Path("run").symlink_to(run)
    Path("checkpoints").mkdir()
    Path("checkpoints/a.safetensors").touch()
    said = export_tool(run, *words, code=2)
    assert expected in said


def test_missing_package(export_tool: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.PACKAGES, "openvino", ("onnx", "no_such_package"))
    said = export_tool(run, "-to", "onnx,openvino", "-out", tmp_path / "m", code=2)
    assert "-to openvino needs no_such_package: pip install no_such_package" in said


@pytest.mark.skipif(find_spec("openvino") is None, reason="needs openvino")
def test_openvino_reports_nothing_to_its_makers(export_tool: Tool, run: Path, tmp_path: Path) -> None:
    (tmp_path / "m.bin").touch()
    words = (run, "-to", "openvino", "-dtype", "fp16", "-out", tmp_path / "m.xml")
    assert f"{tmp_path / 'm.bin'}: already exists" in export_tool(*words, code=2)
    assert "fp16, 'images' N x 1 x 8 x 8 " in export_tool(*words, "-overwrite")
    assert sys.modules["openvino_telemetry"] is None
    assert b"/" + tmp_path.name.encode() not in (tmp_path / "m.xml").read_bytes()
    (tmp_path / "m.xml").write_text("no model")
    export: Any = None
    with pytest.raises(TrainingError, match=r"m\.xml: OpenVINO cannot run the file: "):
        next(FORMATS["openvino"].run(export, tmp_path / "m.xml", []))


def test_comparison_counts_classes_and_lists_differences() -> None:
    trained = SimpleNamespace(task=OneLabel(3), name_of=lambda label: f"class {label}")
    images = CheckImages(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), ["a", "b"], "of a test")
    export: Any = SimpleNamespace(trained=trained, images=images, dtype="fp32")
    wanted = torch.tensor([[1.0, 0.9999, -4.0], [0.0, 3.0, 1.0]])
    near = wanted + torch.tensor([[-2e-4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    (said,) = compare(export, wanted, near, 1e-3)
    assert said.endswith(", 1 answer changed: a (class 0 to the model, class 1 to the file)")
    with pytest.raises(TrainingError, match=r"Largest differences:\n  a, class class 0: 0.9998 instead of 1"):
        compare(export, wanted, near, 1e-5)
    with pytest.raises(TrainingError, match=r"Largest differences:\n  b, class class 2: nan instead of 1"):
        compare(export, wanted, wanted + torch.tensor([[0.0] * 3, [0.0, 0.0, torch.nan]]), 1e-3)


# The code in docs/export.md, run in processes of its own where none of vitamp's modules can be imported.


@pytest.fixture(scope="module")
def consumers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    programs = ("onnxruntime", "openvino", "torch", "timm")
    wanted = ["prepare.py", *(f"with_{program}.py" for program in programs), "from_image.py"]
    assert [name for name, _ in blocks] == wanted
    for name, code in blocks:
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def consumer_says(folder: Path, script: str, model: Path, pictures: list[Path]) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = "import importlib.util as i, sys; sys.exit(any(map(i.find_spec, ['engine', 'models', 'utils', 'scripts'])))"
    subprocess.run([sys.executable, "-c", alone], cwd=folder, env=clean, check=True)
    words = [sys.executable, script, str(model), *map(str, pictures)]
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == [str(path) for path in pictures]
    return [said for _, said in lines]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[str]]:
    """A run that has learned something, its validation images as files, and its prediction for each."""
    place = tmp_path_factory.mktemp("digits")
    words = ("TRAIN.NUM_EPOCHS=8", "MODEL.DEPTH=2", "MODEL.EMBED_DIM=32", "-amp", "bf16")
    trained = load_trained(train_tiny(place, *words), device="cpu", amp="off")
    found = validation_predictions(trained)
    pictures = pictures_of(found, place)
    said = [trained.name_of(int(label)) for label in found.logits.argmax(1)]
    right = np.mean([int(name) for name in said] == found.labels.numpy())
    assert right > 0.7, "the model must have learned something"
    assert len(pictures) == 360
    return place / "run", pictures, said


DISC = Image.radial_gradient("L").resize((40, 31))
ODD_FILES: dict[str, Image.Image] = {
    "16 bits": Image.fromarray(np.asarray(DISC).astype(np.uint16) * 200 + 77),
    "alpha": Image.merge("RGBA", (DISC, DISC.rotate(90), DISC.rotate(180), DISC)),
    "grey and alpha": Image.merge("LA", (DISC, DISC.rotate(90))),
}
ODD_FILES["16 bits"].info["transparency"] = int(np.asarray(ODD_FILES["16 bits"])[15, 20])


PREPARED = [
    (kind, {"IMAGE_SIZE": 16, "IMAGE_CHANNELS": channels, "CROP_PCT": 0.9, "BACKGROUND": background})
    for kind in ODD_FILES
    for background in ("white", "drop", (10, 200, 30))
    for channels in (1, 3)
] + [
    (size, {"IMAGE_SIZE": side, "CROP_PCT": share, "CROP_MODE": mode, "IMAGENET_MEAN": (0.3, 0.5, 0.8)})
    for side in (32, (24, 48))
    for mode in ("center", "squash", "border")
    for size in ((70, 41), (41, 70))
    for share in (0.9, 1.0, 1.2)
]


@pytest.mark.parametrize(("kind", "values"), PREPARED, ids=str)
def test_documented_code_prepares_images_as_validation_does(
    consumers: Path, tmp_path: Path, kind: str | tuple[int, int], values: dict[str, Any]
) -> None:
    """Odd files, or a photograph of this size."""
    odd = isinstance(kind, str)
    (ODD_FILES[kind] if odd else ODD_FILES["alpha"].convert("RGB").resize(kind)).save(tmp_path / "a.png")
    data = DataConfig.model_validate(values)
    wanted = torch.empty(data.shape, dtype=torch.uint8)
    with contextlib.nullcontext() if odd else decoded_by("pil"):
        Pixels(data, train=False)((tmp_path / "a.png").read_bytes(), wanted)
    about = {"crop": "middle", "interpolation": "bicubic", "input": "pixels", "image_size": data.IMAGE_SIZE}
    about |= {"channels": data.IMAGE_CHANNELS, "crop_pct": data.CROP_PCT, "background": background_of(data)}
    about |= {"mean": values.get("IMAGENET_MEAN", [0.5] * data.IMAGE_CHANNELS)}
    about |= {} if odd else {"crop_mode": data.CROP_MODE}
    code = "import json, sys, prepare; print(prepare.prepare(sys.argv[1], json.loads(sys.argv[2])).tolist())"
    words = [sys.executable, "-c", code, str(tmp_path / "a.png"), json.dumps(about)]
    done = subprocess.run(words, cwd=consumers, capture_output=True, text=True, check=True)
    prepared = torch.tensor(json.loads(done.stdout)).expand_as(wanted)
    assert (prepared - wanted.int()).abs().max() <= (1 if odd else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(), ("-with_preprocess",), ("-dtype", "fp16"), ("-dtype", "bf16"), ("-int8",), ("-int8", "-with_preprocess")],
    ids=["plain", "pixels", "fp16", "bf16", "int8", "int8 of pixels"],
)
def test_documented_code_predicts_as_the_model_does(
    export_tool: Tool,
    digits: tuple[Path, list[Path], list[str]],
    consumers: Path,
    tmp_path: Path,
    more: tuple[str, ...],
) -> None:
    run, pictures, wanted = digits
    scripts = {} if "bf16" in more else {"onnx": "with_onnxruntime.py"}
    scripts |= {"openvino": "with_openvino.py"} if find_spec("openvino") and not {"-int8", "bf16"} & {*more} else {}
    scripts |= {} if "-int8" in more else {"torch": "with_torch.py"}
    scripts |= {} if "-int8" in more or "-with_preprocess" in more else {"safetensors": "with_timm.py"}
    out = tmp_path / ("m.onnx" if len(scripts) == 1 else "m")
    exported = export_tool(run, "-to", ",".join(scripts), "-out", out, "-check", "all", *more)
    # A lower precision may swap two classes that are nearly equal: so many answers of each file changed.
    changed = re.findall(r"(\d+|no) answers? changed", exported)
    for (kind, script), number in zip(scripts.items(), changed, strict=True):
        got = consumer_says(consumers, script, tmp_path / NAMES.get(kind, "m.xml"), pictures)
        different = [path.name for path, one, other in zip(pictures, wanted, got, strict=True) if one != other]
        assert len(different) == int(number.replace("no", "0")), (kind, different)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        ("MODEL.NAME=swin_tiny_patch4_window7_224", "MODEL.STAGE_DEPTHS=[1,1]", "MODEL.NUM_HEADS=[2,4]"),
        ("MODEL.NAME=deit_tiny_distilled_patch16_224", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2"),
        ("MODEL.NAME=resnet10t",),
    ],
    ids=["swin", "deit", "resnet"],
)
def test_other_models_are_exported(
    vitamp: Vitamp, export_tool: Tool, consumers: Path, imagenet: Path, tmp_path: Path, model: tuple[str, ...]
) -> None:
    """Trained in pure bf16, from photographs that have to be resized and cropped."""
    sizes = ("-image_size", 32, "MODEL.NUM_CLASSES=4", "MODEL.EMBED_DIM=16", "MODEL.PATCH_SIZE=4")
    sizes = sizes if len(model) > 1 else sizes[:3]
    words = ("-dataset", "imagefolder", "-data_path", imagenet, "-batch_size", 8, "-device", "cpu")
    rest = ("TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0", "-amp", "O3", "AMP.DTYPE=bf16", "-num_workers", 0)
    vitamp(*words, *sizes, *model, *rest, "-output", tmp_path / "run", code=0)
    export_tool(tmp_path / "run", "-to", "onnx,torch,safetensors", "-out", tmp_path / "m")
    trained = load_trained(tmp_path / "run", device="cpu", amp="off")
    found = validation_predictions(trained)
    pictures = [Path(found.name(row)) for row in range(len(found))]
    wanted = [trained.name_of(int(label)) for label in found.logits.argmax(1)]
    for kind, script in (("onnx", "with_onnxruntime.py"), ("safetensors", "with_timm.py")):
        assert consumer_says(consumers, script, tmp_path / NAMES[kind], pictures) == wanted


@pytest.mark.slow
def test_weights_beyond_two_gigabytes_are_in_a_second_file(
    export_tool: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered to a kilobyte here."""
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
    said = export_tool(run, "-to", "onnx", "-out", tmp_path / "m.onnx")
    assert "opset " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert about_of(tmp_path / "m.onnx")["model"] == "tiny"
    monkeypatch.undo()
    (tmp_path / "m.onnx.changed.html").touch()
    export_tool(run, "-to", "onnx", "-out", tmp_path / "m.onnx", "-overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"], "what only the earlier one had is gone"


# vitamp's own tools.


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_image(path := tmp_path_factory.mktemp("image") / "x.jpg", seed=0)
    return path


@pytest.fixture
def exported(export_tool: Tool, digits_run: Path, tmp_path: Path) -> Path:
    out = tmp_path / "mine.safetensors"
    export_tool(digits_run, "-to", "safetensors", "-out", out, "-check", 8)
    return out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predict_and_evaluate_load_an_export(
    export_tool: Tool, vitamp: Vitamp, digits_run: Path, image: Path, tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "vit.safetensors"
    words = ("-to", "safetensors", "-out", out, "-dtype", dtype, "-weights", "ema", "-check", 8)
    export_tool(digits_run, *words)
    assert str(digits_run) not in str(read_header(out)), "no paths of this machine"
    best = metrics(digits_run, "val")[-1]
    found = vitamp(out, "-json", tmp_path / "eval.json", script="scripts/evaluate.py", code=0)
    assert f"vit.safetensors, EMA weights, top-1 {best['ema_acc1']:.2f} %" in found.out
    acc1 = json.loads((tmp_path / "eval.json").read_text())["figures"]["ema"]["acc1"]
    assert acc1 == pytest.approx(best["ema_acc1"], abs=0 if dtype == "fp32" else 1)
    said = [
        vitamp(path, image, "-weights", "ema", "-format", "jsonl", script="scripts/predict.py", code=0)
        for path in (digits_run, out)
    ]
    if dtype == "fp32":
        assert said[0].out == said[1].out


def test_export_is_a_teacher(vitamp: Vitamp, exported: Path, tiny: Path, tmp_path: Path) -> None:
    words = ("TRAIN.DISTILLATION_TYPE=soft", f"TRAIN.TEACHER_MODEL={exported}", "-dry_run")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    assert f"Teacher {exported}: mine.safetensors, plain weights" in done.out


def test_unusable_weights_are_refused_with_working_advice(
    vitamp: Vitamp, digits_run: Path, exported: Path, image: Path, tmp_path: Path
) -> None:
    header, tensors = read_header(exported), safetensors.torch.load_file(exported)
    unneeded = {key: header[key] for key in header if key not in ("settings", "choices", "fp32_modules", "metrics")}
    older, foreign = tmp_path / "older.safetensors", tmp_path / "foreign.safetensors"
    safetensors.torch.save_file(tensors, older, metadata={"vitamp": json.dumps(unneeded)})
    safetensors.torch.save_file(tensors, foreign)
    (tmp_path / "x.onnx").write_bytes(b"x")
    for file, reason in (
        (older, "its header was not written by `python scripts/checkpoint.py strip` or `python scripts/export.py"),
        (foreign, "its header was not written by"),
        (tmp_path / "x.onnx", "an exported program, not weights for vitamp"),
    ):
        done = vitamp(file, image, script="scripts/predict.py", code=2)
        assert f"{file}: {reason}" in done.err
    done = vitamp(older, image, script="scripts/predict.py")
    (command,) = re.findall(r"python (main_single_gpu\.py -cfg CONFIG\.yaml -eval -pretrained \S+)", done.err)
    words = shlex.split(command.replace("CONFIG.yaml", str(digits_run / "config.yaml")))
    vitamp(*words[1:], "-output", tmp_path / "eval", code=0)
    assert metrics(tmp_path / "eval", "val")[0]["acc1"] == metrics(digits_run, "val")[-1]["acc1"]
