"""MODEL.LORA: which weights are trained, what a layer with adapters computes, and in which models it is refused."""

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from engine.speed.fused_mlp import FusedMlps
from engine.speed.packed_attention import use_packed
from engine.speed.speedup import attention_layers
from models.build import check_model
from models.lora import add_adapters
from models.parts import base_weights
from tests.engine.small import BF16, CPU, build, built_of, train
from tests.engine.test_freeze import AMP, EMA, FP8, copies, moved
from tests.engine.test_freeze import HOW as FREEZE_HOW
from tests.refused import refusal
from utils.config.model import LORA_TARGETS, LoraConfig, ModelConfig
from utils.errors import UserError
from vitamp.tensors import Merged, is_adapter

RANK, ALPHA, WIDTH = 2, 6.0, 24
FACTOR = ALPHA / RANK
ROWS = {"q": slice(0, WIDTH), "k": slice(WIDTH, 2 * WIDTH), "v": slice(2 * WIDTH, 3 * WIDTH)}
LAYERS = {"q": "attn.qkv", "k": "attn.qkv", "v": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
RANDOM = {"MODEL__DROPOUT": 0.1, "MODEL__DROPPATH": 0.2, "MODEL__DEPTH": 2}


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()


def adapted(targets: tuple[str, ...]) -> nn.Module:
    """The small ViT with adapters that have been trained: B is not zero."""
    model = small_vit()
    add_adapters(model, LoraConfig.model_validate({"RANK": RANK, "ALPHA": ALPHA, "TARGETS": targets}), seed=1)
    for name, weight in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(weight, std=0.5)
    return model


def by_hand(model: nn.Module, targets: tuple[str, ...]) -> dict[str, Tensor]:
    """W + alpha / rank B A, written out for each target."""
    saved = model.state_dict()
    plain = {name: weight.clone() for name, weight in saved.items() if "lora" not in name}
    for block in ("blocks.0", "blocks.1"):
        for target in targets:
            layer = f"{block}.{LAYERS[target]}"
            product = saved[f"{layer}.lora_{target}_B"] @ saved[f"{layer}.lora_{target}_A"]
            plain[f"{layer}.weight"][ROWS.get(target, slice(None))] += FACTOR * product
    return plain


@pytest.mark.parametrize("targets", [("q", "v"), ("k",), ("proj", "fc2"), LORA_TARGETS], ids="-".join)
def test_adapters_compute_what_the_merged_weights_compute(targets: tuple[str, ...]) -> None:
    model, plain, images = adapted(targets), small_vit(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        before, logits = plain(images), model(images)
        expected = by_hand(model, targets)
        merged = Merged(model.state_dict(), FACTOR)
        assert merged.keys() == plain.state_dict().keys()
        for name, weight in merged.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
        plain.load_state_dict(dict(merged))
        torch.testing.assert_close(plain(images), logits, rtol=0, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3, "the adapters change something"


def test_training_begins_at_the_pretrained_model_and_with_the_same_numbers_each_time() -> None:
    first, second, images = small_vit(), small_vit(), torch.randn(2, 3, 16, 16)
    before = first(images)
    add_adapters(first, LoraConfig(RANK=RANK), seed=1)
    torch.rand(7)
    add_adapters(second, LoraConfig(RANK=RANK, TARGETS=("v", "fc1")), seed=1)
    assert torch.equal(first(images), before)
    own, other = first.state_dict(), second.state_dict()
    assert torch.equal(own["blocks.1.attn.qkv.lora_v_A"], other["blocks.1.attn.qkv.lora_v_A"])
    assert not torch.equal(own["blocks.0.attn.qkv.lora_v_A"], own["blocks.1.attn.qkv.lora_v_A"])
    assert own["blocks.0.attn.qkv.lora_q_A"].abs().max() <= WIDTH**-0.5


HOW = {
    **{name: words for name, words in FREEZE_HOW.items() if name not in ("a block in fp32", "patches by a product")},
    "linear layers in fp32": {**AMP, "AMP__DTYPE": "bf16", "AMP__FP32_MODULES": "Linear"},
    "layer decay": {"TRAIN__LAYER_DECAY": 0.7},
    "another optimiser": {"TRAIN__OPTIMIZER__NAME": "LAMB"},
}
COMPILED = pytest.param({"TRAIN__COMPILE": "blocks"}, marks=pytest.mark.slow)


def merged_logits(ready: ReadyToTrain, images: Tensor) -> Tensor:
    plain = copy.deepcopy(ready.model)
    for name, _ in list(plain.named_parameters()):
        if is_adapter(name):
            layer, _, own = name.rpartition(".")
            delattr(plain.get_submodule(layer), own)
            plain.get_submodule(layer).__class__ = nn.Linear
    plain.load_state_dict(dict(Merged(ready.model.state_dict(), 1.0)))
    return plain.eval()(images)


@pytest.mark.parametrize("how", [*HOW.values(), FP8, COMPILED], ids=[*HOW, "fp8", "compiled"])
def test_only_adapters_and_classifier_are_trained(tiny: Path, tmp_path: Path, how: dict[str, object]) -> None:
    words = {**RANDOM, **EMA, "MODEL__LORA__RANK": RANK, "TRAIN__BASE_LR": 0.05, **how}
    file = tmp_path / "base.safetensors"
    sizes = {key: value for key, value in how.items() if key == "MODEL__EMBED_DIM"}
    save_file(build(tiny, MODEL__DEPTH=2, SEED=9, **sizes).model.state_dict(), file)
    ready = build(tiny, MODEL__PRETRAINED=file, **words)
    ema = ready.parts.callback(Ema)
    assert ema is not None
    before = copies(ready.model)
    trained = {f"blocks.{n}.attn.qkv.lora_{part}_{matrix}" for n in (0, 1) for part in "qv" for matrix in "AB"}
    trained |= {"head.weight", "head.bias"}
    assert {name for name, weight in ready.model.named_parameters() if weight.requires_grad} == trained
    in_optimizer = {id(weight) for group in ready.parts.optimizer.param_groups for weight in group["params"]}
    assert in_optimizer == {id(ready.model.get_parameter(name)) for name in trained}
    train(ready, 4)
    assert moved(ready.model, before) == trained
    assert moved(ema.module, before) == trained
    shared = dict(ema.module.named_parameters())
    assert all(shared[name].data_ptr() == weight.data_ptr() for name, weight in base_weights(ready.model).items())
    images = torch.randn(4, 1, 8, 8)
    if not how.keys() & {"AMP__LEVEL", "AMP__DTYPE"}:
        with torch.no_grad():
            torch.testing.assert_close(ready.model.eval()(images), merged_logits(ready, images), rtol=0, atol=1e-5)


def test_packed_attention_sees_the_adapters() -> None:
    model, images = adapted(("q", "v")), torch.randn(2, 3, 16, 16)
    expected = model(images)
    for layer in attention_layers(model):
        use_packed(layer)
        assert layer.packed
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-6)


def test_fused_mlp_is_refused_where_it_would_leave_adapters_out() -> None:
    bf16 = Precision(BF16, CPU)
    for targets, expected in ((("fc2",), "MODEL.LORA has adapters in fc1 or fc2"), (("q",), "need an NVIDIA GPU")):
        built = built_of(adapted(targets), bf16, SPEED=["+fused_mlp"], MODEL={"NUM_CLASSES": 5})
        assert expected in refusal(FusedMlps().choose, built)


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("resnet18", {}, "MODEL.LORA.TARGETS q: ResNet has no such linear layer; LoRA is for transformers"),
        ("convnext_tiny", {"TARGETS": "fc1"}, None),
        ("vit_tiny_patch16_224", {"RANK": 192}, "MODEL.LORA.RANK 192: must be below 192, because the matrices in "),
        ("beit_base_patch16_224", {}, "Beit does not call its layer blocks.0.attn.qkv, but computes with its weight"),
        ("beit_base_patch16_224", {"TARGETS": ["proj", "fc1"]}, None),
        ("convnext_tiny", {"TARGETS": "proj"}, "TARGETS proj: ConvNeXt has no such linear layer; it has fc1"),
        ("tiny_vit_5m_224", {}, "MODEL.LORA.TARGETS q: TinyVit has no such linear layer"),
        ("swin_tiny_patch4_window7_224", {}, None),
        ("cait_xxs24_224", {}, None),
    ],
)
def test_a_model_that_adapters_cannot_act_in_is_refused(model: str, words: dict[str, Any], said: str | None) -> None:
    settings = ModelConfig.model_validate({"TYPE": "other", "NAME": model, "LORA": {"RANK": 4, **words}})
    with pytest.raises(UserError, match=re.escape(said)) if said else contextlib.nullcontext():
        check_model(settings, 224, 3)
