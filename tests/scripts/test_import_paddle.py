"""PaddleViT's weights become timm's, with the same outputs; and a pickle that wants anything else is refused."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from engine.trained import load_trained
from models import build_model, load_pretrained
from models.paddle_file import read_pdparams
from models.paddle_names import convert, sizes_of_weights, timm_name
from scripts import import_paddle
from utils.config.model import ModelConfig
from utils.errors import UserError

Arrays = dict[str, np.ndarray]
Tool = Callable[..., tuple[int, str]]

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
SWIN: dict[str, Any] = {"img_size": 56, "window_size": 7, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
SWIN |= {"num_classes": 5}
BLOCKS = {"norm1": "attn_norm", "norm2": "mlp_norm", "attn.proj": "attn.out"}
TODAY = {
    "cls_token": "cls_token",
    "dist_token": "dist_token",
    "pos_embed": "position_embedding",
    "patch_embed.proj": "patch_embedding.patch_embedding",
    "norm": "encoder.encoder_norm",
    "head": "classifier",
    "head_dist": "classifier_dist",
    "blocks": "encoder.layers",
}
SECOND = TODAY | {
    "cls_token": "patch_embedding.cls_token",
    "pos_embed": "patch_embedding.position_embeddings",
}
FIRST = TODAY | {
    "cls_token": "transformer.embeddings.cls_token",
    "pos_embed": "transformer.embeddings.position_embeddings",
    "patch_embed.proj": "transformer.embeddings.patch_embeddings",
    "norm": "transformer.encoder.encoder_norm",
    "blocks": "transformer.encoder.layers",
}
FIRST_DEIT = {
    "cls_token": "class_token",
    "dist_token": "distill_token",
    "pos_embed": "pos_embed",
    "patch_embed.proj": "patch_embed.proj",
    "norm": "norm",
    "head": "head",
    "head_dist": "head_distill",
    "blocks": "layers",
}
OF_SWIN = {"patch_embed.proj": "patch_embedding.patch_embed", "patch_embed.norm": "patch_embedding.norm"}
OF_SWIN |= {"norm": "norm", "head.fc": "fc"}


def drawn(model: nn.Module) -> nn.Module:
    """Every tensor with values of its own, norms and biases too."""
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def of_paddle(model: nn.Module, names: dict[str, str], blocks: dict[str, str]) -> Arrays:
    """The weights as PaddleViT has them: the inverse of the renaming."""
    arrays = {}
    for key, value in model.state_dict().items():
        place, _, kind = key.rpartition(".")
        if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", place):
            name = f"{names['blocks']}.{block[1]}.{blocks.get(block[2], block[2])}.{kind}"
        elif block := re.fullmatch(r"layers\.(\d+)\.downsample(.+)", place):
            name = f"stages.{int(block[1]) - 1}.downsample{block[2]}.{kind}"
        elif key.startswith("layers."):
            name = key.replace("layers.", "stages.", 1)
        else:
            name = f"{names[place]}.{kind}" if place else names[key]
        array = value.numpy()
        linear = kind == "weight" and array.ndim == 2
        arrays[name] = np.ascontiguousarray(array.T) if linear else array
    return arrays


def swin_of_paddle() -> tuple[nn.Module, Arrays]:
    model = drawn(SwinTransformer(**SWIN))
    arrays = of_paddle(model, OF_SWIN, {})
    arrays["stages.0.blocks.1.attn_mask"] = np.zeros((4, 49, 49), np.float32)
    arrays["stages.0.blocks.0.attn.relative_position_index"] = np.zeros((49, 49), np.int64)
    return model, arrays


MODELS: dict[str, Callable[[], tuple[nn.Module, Arrays]]] = {
    "vit": lambda: (model := drawn(VisionTransformer(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "vit, second": lambda: (model := drawn(VisionTransformer(**VIT)), of_paddle(model, SECOND, BLOCKS)),
    "vit, first": lambda: (model := drawn(VisionTransformer(**VIT)), of_paddle(model, FIRST, BLOCKS)),
    "distilled": lambda: (model := drawn(VisionTransformerDistilled(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "distilled, first": lambda: (model := drawn(VisionTransformerDistilled(**VIT)), of_paddle(model, FIRST_DEIT, {})),
    "swin": swin_of_paddle,
}


class Tensor:
    """As newer versions of paddle.save write one: by a call of tuple, with the tensor's name in its graph."""

    def __init__(self, name: str, data: np.ndarray) -> None:
        self.name, self.data = name, data

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self.name, self.data),)


def state_dict_of(arrays: Arrays) -> dict[str, Any]:
    return {**arrays, "StructuredToParameterName@@": {name: f"linear_{n}.w_0" for n, name in enumerate(arrays)}}


def training_of(arrays: Arrays) -> dict[str, Any]:
    tensors = OrderedDict((name, Tensor(f"p_{n}", array)) for n, (name, array) in enumerate(arrays.items()))
    rate = {"last_epoch": 3, "last_lr": np.float64(0.1), "betas": (0.9, None)}
    return {"model": tensors, "optimizer": {"LR_Scheduler": rate, "m": Tensor("m", np.ones(3))}, "epoch": 3}


def pieces_of(arrays: Arrays) -> dict[str, Any]:
    """Arrays of more than 60 numbers in pieces, as those of more than a GiB are."""
    content, cut = dict[str, Any](), {}
    for name, array in arrays.items():
        if array.size <= 60:
            content[name] = array
            continue
        flat = array.flatten()
        slices = {f"{name}@@.{n}": flat[n * 60 : (n + 1) * 60] for n in range(-(-flat.size // 60))}
        content |= slices
        cut[name] = {"OriginShape": array.shape, "slices": list(slices)}
    return {**content, "UnpackBigParamInfor@@": cut, "StructuredToParameterName@@": {}}


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run it in this process: its exit code, and what it said."""

    def call(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = import_paddle.main([str(word) for word in words])
        return code, "".join(capsys.readouterr())

    return call


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_the_imported_model_gives_the_same_outputs(kind: str, tool: Tool, tmp_path: Path) -> None:
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
def test_all_forms_that_paddle_writes_are_read(form: Callable[[Arrays], Any], protocol: int, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    read = read_pdparams(write(tmp_path / "w.pdparams", form(arrays), protocol))
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], array) and read[name].dtype == array.dtype for name, array in arrays.items())


def test_other_kinds_of_numbers_and_orders(tmp_path: Path) -> None:
    grid = np.arange(6.0).reshape(2, 3)
    arrays = {"half": grid.astype("f2"), "big": grid.astype(">f4"), "columns": np.asfortranarray(grid)}
    arrays |= {"flags": grid > 2, "one": np.array(3.5), "none": grid.astype("i8")[:, :0]}
    read = read_pdparams(write(tmp_path / "w.pdparams", arrays))
    assert all(np.array_equal(read[name], array) for name, array in arrays.items() if array.size)


def test_names_of_before_numpy_2_and_of_python_2(tmp_path: Path) -> None:
    """The former differ in one word; the latter wrote strings for bytes."""
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


def test_the_published_model_is_known_by_its_sizes_or_its_file(tool: Tool, tmp_path: Path) -> None:
    """And the file says enough for timm, for -pretrained, and for the tools that use a model."""
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
def test_pretrained_takes_the_file_as_it_is(kind: str, tmp_path: Path) -> None:
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


def test_what_is_missing_or_left_over_is_told_and_nothing_written(tool: Tool, tmp_path: Path) -> None:
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


def test_commands_that_cannot_work(tool: Tool, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    file = write(tmp_path / "w.pdparams", arrays)
    (tmp_path / "there.safetensors").touch()
    other = write(tmp_path / "other.pdparams", {"conv1.weight": np.ones((2, 2))})
    for words, told in (
        ([tmp_path / "no.pdparams"], "there is no such file"),
        ([file, "-out", tmp_path / "w.pth"], "name it w.safetensors"),
        ([file, "-out", tmp_path / "there.safetensors"], "is there already"),
        ([file, "-out", tmp_path / "no" / "w.safetensors"], "does not exist"),
        ([file, "-name", "vit_of_mine"], "timm has no model of that name"),
        ([other], "not weights of PaddleViT's ViT, DeiT or Swin"),
        ([], "-h shows"),
    ):
        code, said = tool(*words)
        assert code == 2, said
        assert told in said
    assert tool(file, "-name", "vit_tiny_patch16_224")[0] == 1


class Calls:
    """A pickle that calls what it likes."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class WithId(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return Calls(os.system, "touch ran") if isinstance(obj, set) else None


def by_persistent_id() -> bytes:
    stream = io.BytesIO()
    WithId(stream, 2).dump({"w": {1}})
    return stream.getvalue()


def objects() -> np.ndarray:
    return np.array([Calls(os.system, "touch ran"), 1], dtype=object)


MALICIOUS: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps({"w": Calls(os.system, "touch ran")}), "posix.system"),
    "os.system, protocol 0": (pickle.dumps({"w": Calls(os.system, "touch ran")}, 0), "posix.system"),
    "eval": (pickle.dumps({"w": Calls(eval, "open('ran', 'w')")}), "builtins.eval"),
    "getattr": (pickle.dumps([Calls(getattr, "x", "join")]), "builtins.getattr"),
    "numpy's own": (pickle.dumps({"w": Calls(np.load, "ran")}), "numpy.load"),
    "nested": (pickle.dumps({"model": {"w": [({"a": Calls(os.system, "touch ran")},)]}}), "posix.system"),
    "as a key": (pickle.dumps({("w", 1): 1}), "a dict by tuple"),
    "in a persistent id": (by_persistent_id(), "posix.system"),
    "a persistent id": (b"\x80\x02}U\x01wU\x01xQs.", "persistent ids"),
    "an array of objects": (pickle.dumps({"w": objects()}), "'O8'"),
    "an array of records": (pickle.dumps({"w": np.zeros(2, [("a", "f4")])}), "'V4'"),
    "an instance": (b"(iposix\nsystem\np0\n.", "posix.system"),
    "an object": (b"(cposix\nsystem\nS'touch ran'\no.", "posix.system"),
    "an extension": (b"\x80\x02\x82\x01.", "extensions"),
    "a call of what is no function": (b"\x80\x02U\x01x)R.", "no function"),
    "a change of a function": (b"\x80\x02cnumpy\nndarray\n}U\x04callU\x01xsb.", "no array"),
    "a subclass in the array's place": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\nK\x00\x85U\x01btR.",
        "in a way that numpy does not",
    ),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_what_is_no_array_is_refused_and_nothing_is_run(
    kind: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = MALICIOUS[kind]
    (tmp_path / "w.pdparams").write_bytes(content)
    code, said = tool(tmp_path / "w.pdparams")
    assert code == 2, said
    assert told in said
    assert "nothing in it was run" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pdparams"]
    with pytest.raises(UserError, match=r"w\.pdparams"):
        load_pretrained(nn.Linear(1, 1), str(tmp_path / "w.pdparams"), "linear")
    assert not (tmp_path / "ran").exists()


def huge(size: int) -> bytes:
    """An array whose shape says so much, over three numbers."""
    content = pickle.dumps({"w": np.arange(3, dtype=np.float32)}, protocol=2)
    assert content.count(b"K\x03\x85") == 1
    return content.replace(b"K\x03\x85", b"\x8a\x05" + size.to_bytes(5, "little") + b"\x85")


BROKEN: dict[str, bytes] = {
    "no pickle": b"PK\x03\x04 what is this",
    "empty": b"",
    "cut off": pickle.dumps({"w": np.arange(300.0)})[:-500],
    "no dict": pickle.dumps([1, 2]),
    "no arrays": pickle.dumps({"epoch": 3}),
    "a shape without numbers": huge(2**38),
    "bytes that are not there": b"\x80\x04}U\x01w\x8e" + struct.pack("<Q", 2**40) + b"x",
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    "a place in the memo": b"\x80\x02}r\xff\xff\xff\xff.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_told_and_takes_no_memory(kind: str, tmp_path: Path, tool: Tool) -> None:
    import tracemalloc

    (tmp_path / "w.pdparams").write_bytes(BROKEN[kind])
    tracemalloc.start()
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "w.pdparams"))):
        read_pdparams(tmp_path / "w.pdparams")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert tool(tmp_path / "w.pdparams")[0] == 2


def test_a_small_file_does_not_grow(tmp_path: Path) -> None:
    """The same numbers by a thousand names, and the same text made bytes a thousand times."""
    array = np.arange(10_000.0)
    write(tmp_path / "w.pdparams", {str(n): array for n in range(1000)})
    with pytest.raises(UserError, match="larger than the file"):
        read_pdparams(tmp_path / "w.pdparams")
    text = "x" * 100_000
    again = b"c_codecs\nencode\nh\x00U\x06latin1\x86R0" * 1000
    (tmp_path / "w.pdparams").write_bytes(
        b"\x80\x02X" + struct.pack("<I", len(text)) + text.encode() + b"q\x000" + again + b"N."
    )
    with pytest.raises(UserError, match="more bytes than it holds"):
        read_pdparams(tmp_path / "w.pdparams")
