"""Weights are loaded from every kind of file, or refused with the mismatched tensors."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from models.build import build_model
from models.parts import classifiers, pretrained_cfg
from models.weights.fit import load_pretrained
from tests.models.test_model_build import TINY_SWIN, TINY_VIT
from utils.config.model import ModelConfig
from utils.errors import UserError
from vitamp.checkpoints import folder_name, shard_name

SWIN = {**TINY_SWIN, "DEPTH": None}


def build(seed: int = 0, image_size: int = 32, channels: int = 3, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(ModelConfig(**{**TINY_VIT, **settings}), image_size, channels).eval()


def load(source: Path, **settings: Any) -> tuple[nn.Module, str]:
    module = build(1, **settings)
    return module, load_pretrained(module, str(source), "tiny")


def refusal(source: Path, **settings: Any) -> str:
    module = build(1, **settings)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_pretrained(module, str(source), "tiny")
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items()), "half loaded"
    return str(caught.value)


def assert_equal_weights(ours: nn.Module, theirs: nn.Module, but: tuple[str, ...] = ()) -> None:
    for key, value in theirs.state_dict().items():
        if key not in but:
            assert torch.equal(ours.state_dict()[key], value), key


@pytest.fixture
def donor() -> nn.Module:
    """A model in which every tensor, including norms and biases, has different values."""
    module = build()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.fixture
def weights(donor: nn.Module, tmp_path: Path) -> Path:
    save_file(donor.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_safetensors_file_is_loaded(donor: nn.Module, weights: Path) -> None:
    ours, said = load(weights)
    assert_equal_weights(ours, donor)
    assert f"32 of 32 tensors from {weights}" in said
    donor, ours = (nn.ModuleDict({"decoder": nn.Linear(1, 1), "head": nn.Linear(1, 1)}) for _ in range(2))
    save_file(donor.state_dict(), weights)
    load_pretrained(ours, str(weights), "own")
    assert_equal_weights(ours, donor)


@pytest.mark.parametrize("ending", [".pth", ".pt", ".bin", ".pth.tar"])
@pytest.mark.parametrize("wrapped", [None, "model", "state_dict", "model_ema", "state_dict_ema"])
def test_torch_files_are_loaded(donor: nn.Module, tmp_path: Path, ending: str, wrapped: str | None) -> None:
    tensors = donor.state_dict()
    content = {wrapped: tensors, "epoch": 3, "args": argparse.Namespace(lr=1.0)} if wrapped else tensors
    for zipped in (True, False):  # torch's older format is no zip file
        torch.save(content, tmp_path / f"w{ending}", _use_new_zipfile_serialization=zipped)
        assert_equal_weights(load(tmp_path / f"w{ending}")[0], donor)


def test_ema_in_a_checkpoint_is_used_and_logged(
    donor: nn.Module, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    plain, file = build(seed=9), tmp_path / "w.pth"
    torch.save({"model": plain.state_dict(), "model_ema": AveragedModel(donor).state_dict()}, file)  # torchvision's
    assert_equal_weights(load(file)[0], donor)
    assert f"{file} holds model_ema and model: the EMA is used." in said.text


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_ddp_and_compile_prefixes_are_removed(donor: nn.Module, tmp_path: Path, prefix: str) -> None:
    torch.save({prefix + key: value for key, value in donor.state_dict().items()}, tmp_path / "w.pth")
    assert_equal_weights(load(tmp_path / "w.pth")[0], donor)


@pytest.mark.parametrize(("best", "taken"), [(1, 1), (None, 2), ("not a name", 2)])
def test_run_folder_loads_its_best_checkpoint(tmp_path: Path, best: object, taken: int) -> None:
    made = {number: build(seed) for seed, number in enumerate((1, 2), start=5)}
    for number, module in made.items():
        folder = tmp_path / "checkpoints" / folder_name(number)
        folder.mkdir(parents=True)
        save_file(module.state_dict(), folder / "model.safetensors")
    index = {"last": folder_name(2), "best": folder_name(best) if isinstance(best, int) else best}
    (tmp_path / "checkpoints" / "index.json").write_text(json.dumps(index))
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert_equal_weights(load(folder)[0], made[taken])


def test_weights_in_shards_are_joined(donor: nn.Module, tmp_path: Path) -> None:
    """As FSDP saves them: the rows of each tensor, one file after the other."""
    for nth in range(2):
        parts = {name: tensor.chunk(2)[nth:] for name, tensor in donor.state_dict().items()}
        rows = {name: part[0].contiguous() for name, part in parts.items() if part}
        save_file(rows, tmp_path / shard_name("model.safetensors", nth, 2))
    assert_equal_weights(load(tmp_path)[0], donor)


def test_weights_without_a_classifier_are_loaded(donor: nn.Module, tmp_path: Path) -> None:
    body = {key: value for key, value in donor.state_dict().items() if "head" not in key}
    save_file(body, tmp_path / "w.safetensors")
    ours, said = load(tmp_path / "w.safetensors")
    assert "the file has no head" in said
    assert_equal_weights(ours, donor, but=("head.weight", "head.bias"))


def test_weights_are_adapted_to_other_images_and_windows(donor: nn.Module, weights: Path) -> None:
    ours, said = load(weights, image_size=64)
    assert "pos_embed resized from 1x17x16 to 1x65x16" in said
    assert torch.equal(ours.pos_embed[:, 0], donor.pos_embed[:, 0])  # pyright: ignore
    assert ours.pos_embed.shape == (1, 65, 16)  # pyright: ignore
    assert_equal_weights(ours, donor, but=("pos_embed",))
    ours, said = load(weights, channels=1)
    assert "patch_embed.proj.weight resized from 16x3x8x8 to 16x1x8x8" in said
    grey = torch.rand(1, 1, 32, 32)
    with torch.no_grad():  # a grey image and its three-channel copy give the same output
        torch.testing.assert_close(ours(grey), donor(grey.expand(-1, 3, -1, -1)))
    save_file(build(0, **SWIN).state_dict(), weights)
    _, said = load(weights, **{**SWIN, "WINDOW_SIZE": 2})
    assert "relative_position_bias_table resized from 49x2 to 9x2" in said


def test_other_architecture_is_refused_with_mismatched_tensors(weights: Path) -> None:
    said = refusal(weights, EMBED_DIM=32)
    assert "differ (31):" in said
    assert "cls_token: 1x1x16 in the file, 1x1x32 in the model" in said
    assert "and 26 more" in said
    said = refusal(weights, DEPTH=1)
    assert "unknown to the model (12):" in said
    assert "    blocks.1.attn.proj.bias\n" in said
    said = refusal(weights, DEPTH=3)
    assert "missing in the file (12):" in said
    assert "blocks.2.norm1.weight" in said
    assert "do not fit tiny: they may be of another model, which -model names" in refusal(weights, **SWIN)
    donor, ours = (build_model(ModelConfig(NAME="convit_tiny", NUM_CLASSES=size), size, 3) for size in (32, 64))
    save_file(donor.state_dict(), weights)
    with pytest.raises(UserError, match=r"fit convit_tiny: timm cannot resize .* DATA\.IMAGE_SIZE of the weights"):
        load_pretrained(ours, str(weights), "convit_tiny")


def augreg(module: Any) -> dict[str, np.ndarray]:
    """The layout of Google's files: kernels are (in, ..., out), attention is split by head."""
    width, heads = module.embed_dim, module.blocks[0].attn.num_heads

    def array(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().numpy().copy()

    def norm(part: Any, prefix: str) -> dict[str, np.ndarray]:
        return {f"{prefix}/scale": array(part.weight), f"{prefix}/bias": array(part.bias)}

    def dense(part: Any, prefix: str) -> dict[str, np.ndarray]:
        return {f"{prefix}/kernel": array(part.weight.T), f"{prefix}/bias": array(part.bias)}

    found = {
        "embedding/kernel": array(module.patch_embed.proj.weight.permute(2, 3, 1, 0)),
        "embedding/bias": array(module.patch_embed.proj.bias),
        "cls": array(module.cls_token),
        "Transformer/posembed_input/pos_embedding": array(module.pos_embed),
        **norm(module.norm, "Transformer/encoder_norm"),
        **dense(module.head, "head"),
    }
    for i, block in enumerate(module.blocks):
        prefix = f"Transformer/encoderblock_{i}"
        attention = f"{prefix}/MultiHeadDotProductAttention_1"
        found |= norm(block.norm1, f"{prefix}/LayerNorm_0") | norm(block.norm2, f"{prefix}/LayerNorm_2")
        found |= dense(block.mlp.fc1, f"{prefix}/MlpBlock_3/Dense_0")
        found |= dense(block.mlp.fc2, f"{prefix}/MlpBlock_3/Dense_1")
        for n, name in enumerate(("query", "key", "value")):
            rows = slice(n * width, (n + 1) * width)
            found[f"{attention}/{name}/kernel"] = array(block.attn.qkv.weight[rows].T.reshape(width, heads, -1))
            found[f"{attention}/{name}/bias"] = array(block.attn.qkv.bias[rows].reshape(heads, -1))
        found[f"{attention}/out/kernel"] = array(block.attn.proj.weight.T.reshape(heads, -1, width))
        found[f"{attention}/out/bias"] = array(block.attn.proj.bias)
    return found


@pytest.fixture
def npz(donor: nn.Module, tmp_path: Path) -> Path:
    np.savez(tmp_path / "w.npz", **augreg(donor))  # pyright: ignore[reportArgumentType]
    return tmp_path / "w.npz"


def test_npz_is_loaded(donor: nn.Module, npz: Path) -> None:
    ours, said = load(npz)
    assert_equal_weights(ours, donor)
    assert not re.search("freshly initialised|resized", said)
    image = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(image), donor(image))


def test_npz_with_other_head_and_image_size_is_adapted(donor: nn.Module, npz: Path) -> None:
    ours, said = load(npz, NUM_CLASSES=7, image_size=64)
    assert "head freshly initialised (5 classes in the file, 7 in the model)" in said
    assert "pos_embed resized from 1x17x16 to 1x65x16" in said
    assert torch.equal(ours.head.weight, build(1, NUM_CLASSES=7, image_size=64).head.weight)  # pyright: ignore
    assert_equal_weights(ours, donor, but=("head.weight", "head.bias", "pos_embed"))


def test_npz_of_other_depth_width_or_model_is_refused(npz: Path, tmp_path: Path) -> None:
    for depth in (1, 3):
        assert f"2 blocks in the file, {depth} in the model (MODEL.DEPTH)" in refusal(npz, DEPTH=depth)
    assert "do not fit tiny" in refusal(npz, EMBED_DIM=32)
    resnet = build_model(ModelConfig(NAME="resnet10t"), 32, 3)
    with pytest.raises(UserError, match="for ViTs; resnet10t is a ResNet"):
        load_pretrained(resnet, str(npz), "resnet10t")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    assert "other.npz" in refusal(tmp_path / "other.npz")


def test_weights_with_code_or_without_tensors_are_refused(donor: nn.Module, tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    assert re.search("no tensors.*epoch", refusal(tmp_path / "w.pth"), re.DOTALL)
    torch.save(donor, tmp_path / "whole.pth")
    assert re.search(r"whole\.pth.*could run malicious code", refusal(tmp_path / "whole.pth"), re.DOTALL)


def test_damaged_weights_are_refused(donor: nn.Module, weights: Path, npz: Path, tmp_path: Path) -> None:
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    for good in (weights, npz, tmp_path / "w.pth"):
        content = bytearray(good.read_bytes())
        cut = good.with_name(f"cut{good.suffix}")
        cut.write_bytes(content[: len(content) // 2])
        assert f"{cut}: the file is damaged" in refusal(cut)
    # The container is intact, its contents are not.
    content = bytearray(npz.read_bytes())
    start = content.find(b"Transformer/posembed_input") + 300
    content[start : start + 40] = bytes(40)
    (tmp_path / "inside.npz").write_bytes(content)
    assert "inside.npz" in refusal(tmp_path / "inside.npz")


FAMILIES: dict[str, dict[str, Any]] = {
    "vit": TINY_VIT,
    "deit": {**TINY_VIT, "TYPE": "deit", "NAME": "deit_tiny_distilled_patch16_224"},
    "swin": TINY_SWIN,
    "resnet": {"TYPE": "resnet", "NAME": "test_resnet"},
}


@pytest.mark.parametrize(("classes", "asked"), [(5, True), (7, False), (7, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_classifier_keeps_the_models_own(tmp_path: Path, family: str, classes: int, asked: bool) -> None:
    def made(seed: int, classes: int) -> nn.Module:
        torch.manual_seed(seed)
        settings = {**FAMILIES[family], "NUM_CLASSES": classes, "FREEZE": ("backbone",)}
        model = build_model(ModelConfig(**settings), 32, 3)
        vars(model)["pretrained_cfg"] = {} if family == "resnet" else pretrained_cfg(model)  # as one of the user's own
        return model

    donor = made(0, 5)
    older = {name: tensor for name, tensor in donor.state_dict().items() if tensor.is_floating_point()}  # no counters
    for tensor in older.values():
        nn.init.normal_(tensor)
    save_file(older, tmp_path / "w.safetensors")
    ours, untouched = made(1, classes), made(1, classes)
    said = load_pretrained(ours, str(tmp_path / "w.safetensors"), family, new_classifier=asked)
    heads = classifiers(ours)
    assert len(heads) == (2 if family == "deit" else 1)
    for name, tensor in ours.state_dict().items():
        fresh = name.startswith(heads)
        expected = (untouched if fresh else donor).state_dict()[name]
        assert torch.equal(tensor, expected), name
    assert all(weight.requires_grad is name.startswith(heads) for name, weight in ours.named_parameters())
    for head in heads:
        assert f"{head} {'left as ' * asked}freshly initialised{' (5 classes in the file, 7' * (not asked)}" in said


def test_new_classifier_with_npz_weights(donor: nn.Module, npz: Path, weights: Path) -> None:
    ours = build(1)
    fresh = ours.state_dict()["head.weight"].clone()
    assert "head left as freshly initialised" in load_pretrained(ours, str(npz), "vit", new_classifier=True)
    assert torch.equal(ours.state_dict()["head.weight"], fresh)
    assert_equal_weights(ours, donor, but=("head.weight", "head.bias"))
    for file, asked in ((npz, True), (weights, False)):
        with pytest.raises(UserError, match=r"Linear's classifier is unknown; (if )?get_classifier"):
            load_pretrained(nn.Linear(1, 1), str(file), "linear", new_classifier=asked)
