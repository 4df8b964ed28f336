"""vitamp.load gives the model that predict.py uses, as timm builds it, and the transform of validation."""

import hashlib
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.transforms import v2

import vitamp
from datasets.given import open_given
from engine.inputs.batches import Inputs, input_of
from engine.trained.model import load_trained
from models.weights.find import local_weights
from models.weights.fit import load_pretrained
from tests.program import change_meta, write_meta
from tools.checkpoint import command as checkpoint
from tools.export import command as export
from utils.config.data import DataConfig
from utils.errors import UserError
from vitamp.timm_model import transform_of


def in_program(run: Path, image: Path, weights: str = "auto") -> Tensor:
    """Logits of one image, computed as by predict.py in fp32."""
    trained = load_trained(run, weights, device="cpu", amp="off")
    data = trained.config.DATA
    pixels = torch.empty(data.shape, dtype=torch.uint8)
    open_given([], data).pixels(image.read_bytes(), pixels)
    return trained.logits(pixels[None])


def loaded(path: Path, image: Path, weights: str = "auto") -> Tensor:
    model, transform = vitamp.load(path, weights)
    return logits_of(model, transform(Image.open(image)))


def origin_of(model: nn.Module) -> Any:
    return model.vitamp


def logits_of(model: nn.Module, image: Tensor) -> Tensor:
    with torch.no_grad():
        return model(image[None])


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 20, 3), dtype=np.uint8)).save(path)
    return path


def test_two_models_side_by_side_have_the_logits_of_the_program(digits_run: Path, image: Path) -> None:
    state = torch.get_rng_state()
    models = {weights: vitamp.load(digits_run, weights) for weights in ("model", "ema")}
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers"
    for weights, (model, transform) in models.items():
        assert type(model) is VisionTransformer
        assert not model.training
        found = logits_of(model, transform(Image.open(image)))
        assert torch.allclose(found, in_program(digits_run, image, weights), rtol=0, atol=1e-6)
    origin = origin_of(vitamp.load(str(digits_run))[0])
    chosen = load_trained(digits_run).chosen
    assert (origin.path, origin.weights) == (chosen.place, chosen.which.name)
    assert origin.classes == vitamp.load(digits_run).classes == [str(digit) for digit in range(10)]
    assert origin.why == chosen.words
    assert " (the run's best), " in origin.why
    assert origin_of(vitamp.load(chosen.place / "ema.safetensors")[0]).weights == "ema"


def test_files_of_weights_are_loaded(digits_run: Path, image: Path, tmp_path: Path) -> None:
    expected = in_program(digits_run, image, "ema")
    stripped, exported = tmp_path / "stripped.safetensors", tmp_path / "exported.safetensors"
    words = [str(digits_run), "-weights", "ema"]
    assert checkpoint.main(["strip", *words, "-out", str(stripped)]) == 0
    assert export.main([*words, "-to", "safetensors", "-out", str(exported), "-check", "8"]) == 0
    for file in (stripped, exported):
        assert torch.allclose(loaded(file, image), expected, rtol=0, atol=1e-6)
        assert origin_of(vitamp.load(file)[0]).weights == "ema"
    with pytest.raises(ValueError, match="has no plain weights"):
        vitamp.load(stripped, "model")
    assert origin_of(vitamp.load(stripped.rename(tmp_path / "model.safetensors"))[0]).weights == "ema"


def test_shards_are_joined_and_calibrations_found(digits_run: Path, image: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    origin = origin_of(vitamp.load(run, "model")[0])
    meta = json.loads((origin.path / "meta.json").read_text(encoding="utf-8"))
    of_fit = {"checkpoint": "", "weights": "model", "data": "", "precision": "", "before": {}, "crossfitted": {}}
    sha256 = [meta["files"]["model.safetensors"]["sha256"]]
    fitted = {"temperature": 1.5, "images": 9, "sha256": sha256, **of_fit}
    (run / "calibration.json").write_text(json.dumps({"temperatures": [fitted]}), encoding="utf-8")
    assert [origin_of(vitamp.load(run, weights)[0]).temperature for weights in ("model", "ema")] == [1.5, 1.0]
    tensors = safetensors.torch.load_file(origin.path / "model.safetensors")
    halves = {name: tensor.chunk(2) for name, tensor in tensors.items()}
    for nth in range(2):
        name = f"model.shard-{nth + 1}-of-2.safetensors"
        rows = {key: parts[nth].contiguous() for key, parts in halves.items() if nth < len(parts)}
        safetensors.torch.save_file(rows, origin.path / name)
        sha256 = hashlib.sha256((origin.path / name).read_bytes()).hexdigest()
        meta["files"][name] = {"size": (origin.path / name).stat().st_size, "sha256": sha256}
    del meta["files"]["model.safetensors"]
    write_meta(origin.path / "meta.json", meta)
    assert torch.equal(loaded(run, image, "model"), loaded(digits_run, image, "model"))
    (run / "calibration.json").write_text("{")
    with pytest.raises(ValueError, match=r"calibration\.json"):
        vitamp.load(run)


def test_a_run_with_a_truncated_index_and_a_copy_of_the_users_has_one_answer(
    digits_run: Path, image: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    checkpoints = run / "checkpoints"
    last = sorted(checkpoints.glob("step-*"))[-1]
    shutil.copytree(last, checkpoints / "step-999999999.mine")
    (checkpoints / "index.json").write_text((checkpoints / "index.json").read_text()[:20])
    assert origin_of(vitamp.load(run)[0]).path == load_trained(run).chosen.place == last
    assert torch.allclose(loaded(run, image, "ema"), in_program(run, image, "ema"), rtol=0, atol=1e-6)
    assert (found := local_weights(str(run)))
    assert found.file.parent == last


def test_what_cannot_be_loaded_names_the_way_on(digits_run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(load_trained(digits_run).chosen.place, tmp_path / "checkpoint")

    def error() -> str:
        with pytest.raises(ValueError, match=r"checkpoint") as caught:
            vitamp.load(copied)
        return str(caught.value)

    meta = json.loads((copied / "meta.json").read_text(encoding="utf-8"))
    change_meta(copied, timm=None)
    export = f"python scripts/export.py {copied}"
    assert error().endswith(f"Export it, and load the file: {export} -to safetensors -out model.safetensors")
    change_meta(copied, own_code=[{"file": "small.py"}])
    assert f"{export} -trust -to torch -out model.pt2" in error()
    change_meta(copied, settings=meta["settings"] | {"MODEL.MAE_PRETRAIN": True})
    assert "learned without labels" in error()
    assert error().endswith(f"-pretrained {copied}")
    wider = {"name": meta["timm"]["name"], "arguments": meta["timm"]["arguments"] | {"embed_dim": 32}}
    change_meta(copied, timm=wider, settings=meta["settings"])
    assert "do not fit timm's plain model" in error()
    change_meta(copied, timm=meta["timm"], format=2)
    assert "written in format 2" in error()
    change_meta(copied, format=1)
    vitamp.load(copied)
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"damaged, the contents of model\.safetensors"):
        vitamp.load(copied, "model")
    with pytest.raises(UserError, match=r"model\.safetensors: damaged, its contents are not"):
        load_pretrained(nn.Linear(1, 1), f"{file}", "mine")
    file.unlink()
    with pytest.raises(ValueError, match="no checkpoint found"):
        vitamp.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        vitamp.load(tmp_path / "gone")
    with pytest.raises(ValueError, match="takes 'auto', 'model' or 'ema'"):
        vitamp.load(tmp_path, "best")


SIZES = ((130, 97), (97, 130), (7, 5), (32, 32), (47, 36))
MODES = ("RGB", "L", "RGBA", "P", "I;16")


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    ("values", "most"),
    [
        ({"CROP_PCT": 0.875}, 1),
        ({"CROP_PCT": 0.9, "IMAGE_CHANNELS": 1, "IMAGENET_MEAN": [0.5], "IMAGENET_STD": [0.25]}, 1),
        ({"CROP_MODE": "squash", "CROP_PCT": 1.0, "BACKGROUND": "white"}, 1),
        ({"CROP_MODE": "border", "CROP_PCT": 0.9, "BACKGROUND": "mean"}, 1),
        ({"CROP": "none", "EXIF_ROTATE": True, "BACKGROUND": "drop"}, 1),
        ({"DATASET": "cifar10", "CROP_PCT": 0.8}, 0),
        ({"RANGE": [10, 138], "CROP_MODE": "border"}, 1),
    ],
)
def test_transform_is_that_of_validation(values: dict[str, Any], most: int, interpolation: str, tmp_path: Path) -> None:
    data = DataConfig.model_validate({"IMAGE_SIZE": 32, "INTERPOLATION": interpolation, **values})
    transform, inputs = transform_of(json.loads(json.dumps(input_of(data)))), Inputs(data)
    random = np.random.default_rng(0)
    differing = total = 0
    for (wide, high), mode in itertools.product(SIZES, MODES):
        channels = {"RGB": 3, "RGBA": 4}.get(mode)
        shape = (high, wide) if channels is None else (high, wide, channels)
        if mode == "I;16":
            image = Image.fromarray(random.integers(0, 65536, shape, dtype=np.uint16))
        else:
            image = Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(tmp_path / "x.png", exif=exif)
        pixels = torch.empty(data.IMAGE_CHANNELS, 32, 32, dtype=torch.uint8)
        open_given([], data).pixels((tmp_path / "x.png").read_bytes(), pixels)
        found = transform(Image.open(tmp_path / "x.png"))
        resize, normalise = v2.Compose(transform.transforms[:-1]), transform.transforms[-1]
        before = resize(Image.open(tmp_path / "x.png"))
        apart = (before.short() - pixels.short()).abs()
        assert int(apart.max()) <= most, (wide, high, mode)
        differing, total = differing + int((apart > 0).sum()), total + apart.numel()
        assert torch.equal(normalise(pixels), inputs(pixels[None])[0])
        assert found.shape == (data.IMAGE_CHANNELS, 32, 32)
    assert differing <= 0.01 * total


def test_decorators_do_nothing_outside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "utils.own_code", raising=False)

    def mine(logits: Tensor, targets: Tensor) -> Tensor:
        return logits - targets

    for decorate in (vitamp.loss, vitamp.model, vitamp.augmentation, vitamp.dataset):
        assert decorate(mine) is mine
