"""scripts/export.py converts PaddleViT's weights to models with the same outputs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open

from engine.trained.model import load_trained
from models.build import build_model
from models.weights.fit import load_pretrained
from models.weights.paddle_file import read_pdparams
from models.weights.paddle_names import convert, sizes_of_weights, timm_name
from tests.tools.paddle_files import (
    BLOCKS,
    MODELS,
    SWIN,
    TODAY,
    VIT,
    Arrays,
    Tool,
    of_paddle,
    pieces_of,
    state_dict_of,
    tool_of,
    training_of,
    write,
)
from utils.config.model import ModelConfig


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return tool_of(capsys)


@pytest.mark.parametrize("kind", MODELS)
def test_imported_model_has_the_same_outputs(kind: str, tool: Tool, tmp_path: Path) -> None:
    model, arrays = MODELS[kind]()
    code, said = tool(write(tmp_path / "mine.pdparams", state_dict_of(arrays)))
    assert code == 0, said
    again = type(model)(**(SWIN if kind == "swin" else VIT)).eval()
    with safe_open(tmp_path / "mine.safetensors", framework="pt") as file:
        again.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    images = torch.randn(2, 3, 56, 56) if kind == "swin" else torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, found = model(images), again(images)
    assert float((expected - found).abs().max()) < 1e-6
    assert float(expected.std()) > 0.1
    assert "unused (0):" in said
    assert "missing (0):" in said
    assert f"used ({len(model.state_dict())}):" in said


@pytest.mark.parametrize("form", [state_dict_of, training_of, pieces_of])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_every_layout_of_paddle_save_is_read(form: Callable[[Arrays], Any], protocol: int, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    read = read_pdparams(write(tmp_path / "w.pdparams", form(arrays), protocol))
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], array) and read[name].dtype == array.dtype for name, array in arrays.items())


def test_pickles_of_numpy_1_and_python_2_are_read(tmp_path: Path) -> None:
    """numpy 1 has another module name; Python 2 wrote bytes as str."""
    array = np.arange(3, dtype=np.float32)
    content = pickle.dumps({"w": array}, protocol=2)
    for old in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        (tmp_path / "w.pdparams").write_bytes(content.replace(b"numpy._core.multiarray", old))
        assert np.array_equal(read_pdparams(tmp_path / "w.pdparams")["w"], array)
    header = b"\x80\x02}U\x01wcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x03\x85" + kind + b"\x89"
    data = array.tobytes()
    (tmp_path / "w.pdparams").write_bytes(header + state + b"U" + bytes([len(data)]) + data + b"tbs.")
    assert np.array_equal(read_pdparams(tmp_path / "w.pdparams")["w"], array)


def test_model_is_recognised_by_sizes_or_file_name(tool: Tool, tmp_path: Path) -> None:
    """timm and load_trained load the file."""
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10).eval()
    arrays = of_paddle(model, TODAY, BLOCKS)
    found = convert(arrays)
    assert timm_name(found, sizes_of_weights(found)) == "vit_tiny_patch16_224"
    code, said = tool(write(tmp_path / "deit_tiny_patch16_224.pdparams", state_dict_of(arrays)))
    assert (code, "timm's deit_tiny_patch16_224" in said) == (0, True), said
    out = tmp_path / "deit_tiny_patch16_224.safetensors"
    of_timm = timm.create_model("deit_tiny_patch16_224", num_classes=10, checkpoint_path=str(out)).eval()
    trained = load_trained(out, device="cpu")
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(trained.inputs(images))
        assert torch.allclose(of_timm(trained.inputs(images)), expected, atol=1e-6)
    assert torch.allclose(trained.logits(images), expected, atol=1e-5)
    assert trained.config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("kind", ["vit", "distilled", "swin"])
def test_pretrained_reads_pdparams(kind: str, tmp_path: Path) -> None:
    source, arrays = MODELS[kind]()
    write(tmp_path / "mine.pdparams", training_of(arrays))
    sizes: dict[str, Any] = {"EMBED_DIM": 48, "DEPTH": 2, "NUM_HEADS": 3, "PATCH_SIZE": 8}
    named = {"vit": ("vit", "mine"), "distilled": ("deit", "deit_tiny_distilled_patch16_224"), "swin": ("swin", "mine")}
    if kind == "swin":
        sizes = {"EMBED_DIM": 24, "STAGE_DEPTHS": [2, 2], "NUM_HEADS": [2, 4], "WINDOW_SIZE": 7, "PATCH_SIZE": 4}
    config = ModelConfig.model_validate({"TYPE": named[kind][0], "NAME": named[kind][1], "NUM_CLASSES": 5, **sizes})
    model = build_model(config, 56 if kind == "swin" else 32, 3)
    said = load_pretrained(model, str(tmp_path / "mine"), "mine")
    assert "mine.pdparams" in said
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


def test_mismatched_tensors_are_listed_and_nothing_is_written(tool: Tool, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    for change, told in (
        ({"encoder.layers.1.attn.qkv.bias": None}, r"missing \(1\):\n  blocks.1.attn.qkv.bias"),
        ({"encoder.layers.1.gamma": np.ones(48)}, r"unused \(1\):\n  encoder.layers.1.gamma"),
        ({"encoder.layers.1.mlp.fc1.bias": np.ones(7)}, r"of another size \(1\):\n  blocks.1.mlp.fc1.bias  7 in"),
    ):
        content = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        code, said = tool(write(tmp_path / "w.pdparams", content))
        assert code == 1, said
        assert re.search(told, said)
        assert not (tmp_path / "w.safetensors").exists()
    headless = {name: array for name, array in arrays.items() if not name.startswith("classifier")}
    code, said = tool(write(tmp_path / "w.pdparams", {**headless, "classifier.0.weight": np.ones((48, 48))}))
    assert code == 0, said
    assert "missing (2):\n  head.weight\n  head.bias" in said
    assert "no classifier" in said


def test_bad_commands_are_refused(tool: Tool, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    file = write(tmp_path / "w.pdparams", arrays)
    other = write(tmp_path / "other.pdparams", {"conv1.weight": np.ones((2, 2))})
    for words, told in (
        ([tmp_path / "no.pdparams"], "no such file"),
        ([file, "-out", tmp_path / "w.pth"], f"use -out {tmp_path}/w.safetensors"),
        ([file, "-name", "vit_of_mine"], "timm has no model of that name"),
        (
            [other],
            "that can be converted: 1 of 1 tensors match no rule (conv1.weight), and",
        ),
        ([], "-h lists"),
    ):
        code, said = tool(*words)
        assert code == 2, said
        assert told in said
    assert tool(file, "-name", "vit_tiny_patch16_224")[0] == 1
