"""scripts/export.py converts PaddleViT's weights to models with the same outputs, and runs nothing that is in the file.

Each file of paddle_logits has the names and shapes of the tensors of one of PaddleViT's other models, and what it
computed in PaddlePaddle 3.3 with the weights and images that `weights_of` and `images_of` make again here.
"""

import io
import itertools
import os
import pickle
import re
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors import safe_open
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitamp
from engine.trained.model import load_trained
from models.weights.fit import load_pretrained
from models.weights.paddle import all_rules, convert, read_pdparams, rules_of, sizes_of_weights, timm_name
from tests.program import Calls
from tests.tools.timm_alone import Tool
from utils.config.paddlevit import families
from utils.errors import UserError

Arrays = dict[str, np.ndarray]

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
SECOND = TODAY | {"cls_token": "patch_embedding.cls_token", "pos_embed": "patch_embedding.position_embeddings"}
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


def random_weights(model: nn.Module) -> nn.Module:
    """Random values in every tensor, also norms and biases."""
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def of_paddle(model: nn.Module, names: dict[str, str], blocks: dict[str, str]) -> Arrays:
    """Weights in PaddleViT's names and layout: the inverse of the conversion."""
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
    model = random_weights(SwinTransformer(**SWIN))
    arrays = of_paddle(model, OF_SWIN, {})
    arrays["stages.0.blocks.1.attn_mask"] = np.zeros((4, 49, 49), np.float32)
    arrays["stages.0.blocks.0.attn.relative_position_index"] = np.zeros((49, 49), np.int64)
    return model, arrays


MODELS: dict[str, Callable[[], tuple[nn.Module, Arrays]]] = {
    "vit": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "vit, second": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, SECOND, BLOCKS)),
    "vit, first": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, FIRST, BLOCKS)),
    "distilled": lambda: (model := random_weights(VisionTransformerDistilled(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "distilled, first": lambda: (
        model := random_weights(VisionTransformerDistilled(**VIT)),
        of_paddle(model, FIRST_DEIT, {}),
    ),
    "swin": swin_of_paddle,
}


class Tensor:
    """Tensor as newer versions of paddle.save pickle it: a tuple of its name in the graph and its array."""

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
    """Arrays of more than 60 numbers in pieces, as paddle.save cuts those beyond 1 GiB."""
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
def tool(export_tool: Tool) -> Tool:
    return lambda *words, code=0: export_tool(*words, "-to", "safetensors", code=code)


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_imported_model_has_the_same_outputs(kind: str, tool: Tool, tmp_path: Path) -> None:
    """So has a model that reads the file by -pretrained."""
    model, arrays = MODELS[kind]()
    again = type(model)(**(SWIN if kind == "swin" else VIT)).eval()
    write(tmp_path / "training.pdparams", training_of(arrays))
    assert "training.pdparams" in load_pretrained(again, str(tmp_path / "training"), "mine")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    said = tool(write(tmp_path / "mine.pdparams", state_dict_of(arrays)))
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
    (tmp_path / "w.pdparams").write_bytes(header + state + b"U\x0c" + array.tobytes() + b"tbs.")
    assert np.array_equal(read_pdparams(tmp_path / "w.pdparams")["w"], array)


def test_model_is_recognised_by_sizes_or_file_name(tool: Tool, tmp_path: Path) -> None:
    """timm and load_trained load the file."""
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10).eval()
    arrays = of_paddle(model, TODAY, BLOCKS)
    found = convert(arrays)
    assert timm_name(found, sizes_of_weights(found)) == "vit_tiny_patch16_224"
    said = tool(write(tmp_path / "deit_tiny_patch16_224.pdparams", state_dict_of(arrays)))
    assert "timm's deit_tiny_patch16_224" in said
    out = tmp_path / "deit_tiny_patch16_224.safetensors"
    of_timm = timm.create_model("deit_tiny_patch16_224", num_classes=10, checkpoint_path=str(out)).eval()
    trained = load_trained(out, device="cpu")
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(trained.inputs(images))
        assert torch.allclose(of_timm(trained.inputs(images)), expected, atol=1e-6)
        assert torch.allclose(vitamp.load(out)[0](trained.inputs(images)), expected, atol=1e-6)
    assert torch.allclose(trained.logits(images), expected, atol=1e-5)
    assert trained.config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)


def test_mismatched_tensors_are_listed_and_nothing_is_written(tool: Tool, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    for change, told in (
        ({"encoder.layers.1.attn.qkv.bias": None}, r"missing \(1\):\n  blocks.1.attn.qkv.bias"),
        ({"encoder.layers.1.gamma": np.ones(48)}, r"unused \(1\):\n  encoder.layers.1.gamma"),
        ({"encoder.layers.1.mlp.fc1.bias": np.ones(7)}, r"of another size \(1\):\n  blocks.1.mlp.fc1.bias  7 in"),
    ):
        content = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        said = tool(write(tmp_path / "w.pdparams", content), code=1)
        assert re.search(told, said)
        assert not (tmp_path / "w.safetensors").exists()
    headless = {name: array for name, array in arrays.items() if not name.startswith("classifier")}
    said = tool(write(tmp_path / "w.pdparams", {**headless, "classifier.0.weight": np.ones((48, 48))}))
    assert "missing (2):\n  head.weight\n  head.bias" in said
    assert "no classifier" in said


def test_bad_commands_are_refused(tool: Tool, tmp_path: Path) -> None:
    _, arrays = MODELS["vit"]()
    file = write(tmp_path / "w.pdparams", arrays)
    other = write(tmp_path / "other.pdparams", {"conv1.weight": np.ones((2, 2))})
    for words, told in (
        ([tmp_path / "no.pdparams"], "no such file"),
        ([file, "-out", tmp_path / "w.pth"], "name a file that ends in .safetensors, such as w.safetensors."),
        ([file, "-name", "vit_of_mine"], "timm has no model of that name"),
        ([other], "that can be converted: 1 of 1 tensors match no rule (conv1.weight), and"),
        ([], "-h lists"),
    ):
        said = tool(*words, code=2)
        assert told in said
    tool(file, "-name", "vit_tiny_patch16_224", code=1)


class WithId(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return Calls(os.system, "touch ran") if isinstance(obj, set) else None


def by_persistent_id() -> bytes:
    stream = io.BytesIO()
    WithId(stream, 2).dump({"w": {1}})
    return stream.getvalue()


MALICIOUS: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps({"w": Calls(os.system, "touch ran")}), "posix.system"),
    "os.system, protocol 0": (pickle.dumps({"w": Calls(os.system, "touch ran")}, 0), "posix.system"),
    "numpy's own": (pickle.dumps({"w": Calls(np.load, "ran")}), "numpy.load"),
    "nested": (pickle.dumps({"model": {"w": [({"a": Calls(eval, "open('ran', 'w')")},)]}}), "builtins.eval"),
    "in a persistent id": (by_persistent_id(), "posix.system"),
    "a persistent id": (b"\x80\x02}U\x01wU\x01xQs.", "persistent ids"),
    "an array of objects": (pickle.dumps({"w": np.array([Calls(os.system, "touch ran"), 1], dtype=object)}), "'O8'"),
    "an array of records": (pickle.dumps({"w": np.zeros(2, [("a", "f4")])}), "'V4'"),
    "an instance": (b"(iposix\nsystem\np0\n.", "posix.system"),
    "an object": (b"(cposix\nsystem\nS'touch ran'\no.", "posix.system"),
    "a subclass in the array's place": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\nK\x00\x85U\x01btR.",
        "in another way than numpy does",
    ),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_pickle_is_refused_and_not_executed(
    kind: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = MALICIOUS[kind]
    (tmp_path / "w.pdparams").write_bytes(content)
    said = tool(tmp_path / "w.pdparams", code=2)
    assert told in said
    assert "nothing in it was run" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pdparams"]
    with pytest.raises(UserError, match=r"w\.pdparams"):
        load_pretrained(nn.Linear(1, 1), str(tmp_path / "w.pdparams"), "linear")
    assert not (tmp_path / "ran").exists()


def huge(size: int) -> bytes:
    """Array of three numbers whose shape claims `size` numbers."""
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
    "a call of what is no function": b"\x80\x02U\x01x)R.",
    "an extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_file_is_refused(kind: str, tmp_path: Path, tool: Tool) -> None:
    (tmp_path / "w.pdparams").write_bytes(BROKEN[kind])
    said = tool(tmp_path / "w.pdparams", code=2)
    assert str(tmp_path / "w.pdparams") in said


def test_small_file_cannot_expand(tmp_path: Path) -> None:
    """One array under a thousand names."""
    array = np.arange(10_000.0)
    write(tmp_path / "w.pdparams", {str(n): array for n in range(1000)})
    with pytest.raises(UserError, match="larger than the file"):
        read_pdparams(tmp_path / "w.pdparams")


CASES = Path(__file__).with_name("paddle_logits")
LARGE = ("halonet", "halonet_silu", "levit_192", "mobileone_branches", "mobileone_se", "pvtv2", "regnet")
NAMES = [
    pytest.param(file.stem, marks=pytest.mark.slow) if file.stem in LARGE else file.stem
    for file in sorted(CASES.glob("*.yaml"))
]
VARIED = ("halonet", "levit", "mobile", "regnet")
"""Models that timm does not build in other sizes"""


def case_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CASES / f"{name}.yaml").read_text(encoding="utf-8"))


def rows_of(case: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape, and whether it is a table of whole numbers; `[0-2]` in a name are three names."""
    for line in case["tensors"].splitlines():
        name, shape, *whole = line.split()
        sides = tuple(int(side) for side in shape.split("x"))
        pieces = re.split(r"\[(\d+)-(\d+)\]", name)
        ranges = [range(int(a), int(b) + 1) for a, b in zip(pieces[1::3], pieces[2::3], strict=True)]
        for numbers in itertools.product(*ranges):
            yield (
                "".join(map(str, [*itertools.chain(*zip(pieces[::3], numbers, strict=False)), pieces[-1]])),
                sides,
                bool(whole),
            )


def weights_of(case: dict[str, Any]) -> Arrays:
    """Random values that depend on the name; those that timm shares are equal."""
    arrays: Arrays = {}
    for name, shape, whole in rows_of(case):
        if whole:
            arrays[name] = np.zeros(shape, np.int64)
            continue
        rng = np.random.RandomState(zlib.crc32(re.sub(r"\.mlp[34]\.", ".mlp2.", name).encode()) & 0x7FFFFFFF)
        kind = name.rpartition(".")[2]
        if kind == "_variance":
            values = rng.uniform(0.5, 1.5, shape)
        elif kind == "weight" and len(shape) == 1:
            values = (1 + 0.2 * rng.randn(*shape)) * case.get("norms", 1)
        elif kind == "weight":
            values = rng.randn(*shape) / np.sqrt(shape[0] if len(shape) == 2 else np.prod(shape[1:]))
        else:
            values = 0.3 * rng.randn(*shape)
        arrays[name] = values.astype("float32")
    return arrays


def images_of(case: dict[str, Any]) -> torch.Tensor:
    size = case["image"]
    return torch.from_numpy(np.random.RandomState(0).randn(2, 3, size, size).astype("float32"))


def built(case: dict[str, Any]) -> nn.Module:
    """timm's model in the sizes of the case: its entry point takes few of them, its class all."""
    name, arguments, classes = case["model"], case.get("arguments", {}), case.get("classes", 7)
    if any(word in name for word in VARIED):
        return timm.create_model(name, num_classes=classes)
    entry, made = timm.models.model_entrypoint(name), []

    def build(kind: Any, _variant: str, _pretrained: bool = False, **given: Any) -> None:
        own = {key: value for key, value in given.items() if not key.startswith(("pretrained_", "feature_cfg"))}
        made.append(kind(**{**own, **arguments, "num_classes": classes}))

    with mock.patch.object(sys.modules[entry.__module__], "build_model_with_cfg", build):
        entry()
    return made[0]


@pytest.mark.parametrize("name", NAMES)
def test_converted_weights_compute_what_paddlevit_computes(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    model = built(case).eval()
    file = write(tmp_path / "weights.pdparams", weights_of(case))
    load_pretrained(model, str(file), case["model"])
    with torch.no_grad():
        logits = model(images_of(case))
    found = logits[:, : len(case["logits"][0])].numpy()
    np.testing.assert_allclose(found, case["logits"], atol=1e-4 * max(1, np.abs(case["logits"]).max()))
    assert abs(found[0] - found[1]).max() > 1e-3, "the images matter"


def test_every_family_of_timm_converts_or_says_why_not() -> None:
    """Besides BEiT and the others in paddle_logits, none is left out."""
    rules = {one.family: one for one in all_rules()}
    of_timm = {word: family for word, family in families().items() if family.models}
    assert len(of_timm) > 20
    for word, family in of_timm.items():
        names = {other for other, one in families().items() if one.title == family.title}
        assert names & rules.keys(), f"{word}: no rules"
    named = [rules_of([name for name, *_ in rows_of(case_of(file.stem))]) for file in CASES.glob("*.yaml")]
    assert {one.family for one in named} == {word for word, one in rules.items() if not (one.refused or one.closed)}
    assert {word for word, one in rules.items() if one.refused} == {"mobilevit", "poolformer"}


def test_families_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    numbers = np.ones((2, 2), np.float32)
    for name, said in (
        ("mvit_block_1.transformer.norm.weight", "MobileViT cannot be converted: its attention has 8 heads"),
        ("network.0.0.layer_scale_1", "PaddleViT's PoolFormer cannot be converted: it normalises the feature map"),
    ):
        file = write(tmp_path / "weights.pdparams", {name: numbers})
        with pytest.raises(UserError, match=said):
            load_pretrained(nn.Linear(1, 1), str(file), "any")


def test_trained_weights_that_timm_shares_are_refused() -> None:
    arrays = weights_of(case_of("coat"))
    arrays["parallel_blocks.0.mlp3.fc1.bias"] = arrays["parallel_blocks.0.mlp3.fc1.bias"] + 1
    with pytest.raises(UserError, match=r"mlp3\.fc1\.bias differs from parallel_blocks\.0\.mlp2\.fc1\.bias"):
        convert(arrays)


def test_export_finds_the_model_and_counts_what_does_not_match(tool: Tool, tmp_path: Path) -> None:
    arrays = weights_of(case_of("pvtv2"))
    said = tool(write(tmp_path / "mine.pdparams", arrays))
    assert "timm's pvt_v2_b0 has its tensors" in said
    assert "MODEL.TYPE=pvtv2 MODEL.NAME=pvt_v2_b0 DATA.IMAGE_SIZE=224" in said
    model = timm.create_model("pvt_v2_b0", num_classes=7, checkpoint_path=str(tmp_path / "mine.safetensors"))
    assert torch.equal(model.state_dict()["stages.3.norm.weight"], torch.from_numpy(arrays["norm4.weight"]))

    del arrays["norm4.weight"]
    arrays["extra.weight"] = np.ones(3, np.float32)
    said = tool(write(tmp_path / "less.pdparams", arrays), "-name", "pvt_v2_b0", code=1)
    assert "2 of 178 tensors do not match this model (extra.weight, stages.3.norm.weight): nothing was written" in said
    assert not (tmp_path / "less.safetensors").exists()
