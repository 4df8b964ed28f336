"""Images that are not square, from the command line to an exported file."""

import functools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import yaml
from PIL import Image

import vitamp as package
from tests.models.test_image_shapes import CAIT, EVA, SWIN, model_of, saved
from tests.package.test_load import in_program
from tests.program import Result, metrics, run_program
from tests.tools.timm_alone import Tool

WIDE = ("-image_size", "16,32")


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 32 x 16 pixels of noise whose class is the end that is bright; the other end is dark."""
    root, random = tmp_path_factory.mktemp("far"), np.random.default_rng(0)
    for part, count in (("train", 100), ("val", 20)):
        for label, name in enumerate(("left", "right")):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (16, 32, 3), dtype=np.uint8)
                for end, columns in enumerate((slice(0, 6), slice(26, 32))):
                    pixels[:, columns] = random.integers(*((200, 256) if end == label else (0, 56)), (16, 6, 3))
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def train(far: Path, folder: Path, *words: object, code: int = 0) -> Result:
    model = ("-model", "vit", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=48", "MODEL.DEPTH=2", "MODEL.NUM_HEADS=3")
    data = ("-data_path", far, "-num_classes", 2, "DATA.FLIP=0", "DATA.CROP_PCT=1", "DATA.CROP_SCALE=[0.6,1]")
    how = ("-batch_size", 20, "-epochs", 6, "-lr", "1e-3", "TRAIN.WARMUP_EPOCHS=1", "DATA.NUM_WORKERS=0")
    of_machine = ("-threads", 1, "-device", "cpu", "-output", folder / "run")
    folder.mkdir(exist_ok=True)
    return run_program(*model, *data, *how, *of_machine, *words, streams=folder, code=code)


@pytest.fixture(scope="module")
def wide_run(far: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    said = train(far, folder, *WIDE)
    assert "200 training and 40 validation images of 16 x 32 x 3" in said.text
    return folder / "run"


def test_a_class_at_the_far_ends_is_learnt_from_whole_images_alone(far: Path, wide_run: Path, tmp_path: Path) -> None:
    train(far, tmp_path, "-image_size", 16)
    square, wide = (max(one["acc1"] for one in metrics(run, "val")) for run in (tmp_path / "run", wide_run))
    assert square < 75
    assert wide == 100
    settings = [yaml.safe_load((run / "config.yaml").read_text())["DATA"] for run in (tmp_path / "run", wide_run)]
    assert [one["IMAGE_SIZE"] for one in settings] == [16, [16, 32]]


def test_program_package_and_onnx_predict_alike(far: Path, wide_run: Path, export_tool: Tool, tmp_path: Path) -> None:
    said = export_tool(wide_run, "-to", "onnx", "-out", tmp_path / "a.onnx")
    assert "'images' N x 3 x 16 x 32 (float32, normalised)" in said
    export_tool(wide_run, "-to", "onnx", "-with_resize", "-out", tmp_path / "b.onnx")
    export_tool(wide_run, "-to", "hub", "-output", tmp_path / "hub")  # which timm's transform must prepare alike
    plain, whole = (onnxruntime.InferenceSession(str(tmp_path / name)) for name in ("a.onnx", "b.onnx"))
    model, transform = package.load(wide_run)
    for size in ((32, 16), (61, 35), (35, 61)):
        image = Image.open(far / "val" / "left" / "0.png").resize(size)
        image.save(tmp_path / "a.png")
        pixels = transform(image)[None]
        with torch.no_grad():
            logits = model(pixels)
        assert pixels.shape == (1, 3, 16, 32)
        same = size == (32, 16)  # resizing rounds pixels, by at most one shade
        close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6 if same else 0.05)
        close(in_program(wide_run, tmp_path / "a.png"), logits)
        (of_file,) = plain.run(None, {"images": pixels.numpy()})
        torch.testing.assert_close(torch.as_tensor(of_file), logits, rtol=0, atol=1e-6)
        (probabilities,) = whole.run(None, {"image": np.asarray(image)})
        close(torch.as_tensor(probabilities), logits.softmax(1)[0])
    with pytest.raises(Exception, match="Got: 32 Expected: 16"):
        plain.run(None, {"images": np.zeros((1, 3, 32, 16), np.float32)})


@pytest.mark.parametrize("name", [SWIN, EVA, CAIT])
def test_runs_with_weights_of_squares_predict_as_timm(name: str, far: Path, export_tool: Tool, tmp_path: Path) -> None:
    """After an update that changes nothing. CaiT's weights are of the same shape: timm cannot resize them."""
    size = (112, 224)
    file = saved(model_of(name, size if name == CAIT else 224, classes=2), None, tmp_path / "a.safetensors")
    words = ("-model", name, "-pretrained", file, "-dataset", "synthetic", "-num_classes", 2, "-image_size", "112,224")
    data = ("DATA.SYNTHETIC_TRAIN=2", "DATA.SYNTHETIC_VAL=2", "-batch_size", 2)
    how = ("-epochs", 1, "-lr", "1e-30", "TRAIN.WARMUP_EPOCHS=0", "-threads", 1, "-device", "cpu")
    run_program(*words, *data, *how, "-output", tmp_path / "run", streams=tmp_path, code=0)
    export_tool(tmp_path / "run", "-to", "onnx", "-out", tmp_path / "a.onnx", "-check", 2)
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file), "num_classes": 2}}
    image, (model, transform) = far / "val" / "left" / "0.png", package.load(tmp_path / "run")
    pixels = transform(Image.open(image))[None]
    with torch.no_grad():
        theirs = timm.create_model(name, num_classes=2, img_size=size, **own).eval()(pixels)
        loaded = model(pixels)
    (of_file,) = onnxruntime.InferenceSession(str(tmp_path / "a.onnx")).run(None, {"images": pixels.numpy()})
    for ours in (loaded, torch.as_tensor(of_file), in_program(tmp_path / "run", image)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_other_shapes_are_refused(far: Path, wide_run: Path, tmp_path: Path) -> None:
    said = run_program("-resume", wide_run, "-image_size", "32,16", "-epochs", 7, streams=tmp_path, code=2)
    assert "DATA.IMAGE_SIZE: the run was trained with [16, 32], but it is [32, 16] now" in said.text
    said = train(far, tmp_path, "-image_size", "18,32", code=2)
    assert "possible: IMAGE_SIZE [16, 32] or [20, 32], or another PATCH_SIZE" in said.text
    said = train(far, tmp_path, *WIDE, "TRAIN.SIZE_SCHEDULE=[[0,8],[2,16]]", code=2)
    assert "ends with size 16; it must end with DATA.IMAGE_SIZE [16, 32]" in said.text


def test_growing_images_token_dropping_and_masking_keep_the_shape(far: Path, wide_run: Path, tmp_path: Path) -> None:
    words = ("TRAIN.SIZE_SCHEDULE=[[0,[8,16]],[1,[16,32]]]", "TRAIN.TOKEN_DROP=0.5", "TRAIN.TOKEN_DROP_TAIL=1")
    mixing = (
        "TRAIN.CUTMIX_MINMAX=[0.2,0.8]",
        "TRAIN.RANDOM_ERASE_PROB=0.5",
        "DATA.ROTATE=20",
        "TRAIN.RAND_AUGMENT=true",
    )
    said = train(far, tmp_path, *WIDE, *words, *mixing, "-epochs", 2, "-pretrained", wide_run)
    assert "images of [8, 16] from epoch 1, [16, 32] from epoch 2" in said.text
    lines = metrics(tmp_path / "run", "train")
    assert {(one["image_height"], one["image_width"]) for one in lines} == {(8, 16), (16, 32)}
    hidden = ("-mae_pretrain", "MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1", "MODEL.DECODER.NUM_HEADS=2")
    train(far, tmp_path / "masked", *WIDE, *hidden, "-epochs", 1)
    said = train(far, tmp_path / "tuned", "-epochs", 1, "-pretrained", tmp_path / "masked" / "run")
    assert "validation images of 16 x 32 x 3" in said.text, "the size of the weights"
