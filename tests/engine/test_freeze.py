"""MODEL.FREEZE: what is frozen does not move, learns nothing by the way, and keeps nothing for the backward pass."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from engine.amp.precision import Precision, choose
from engine.checkpoint.restore import log_resumption, restore
from engine.evaluation.features import _pools, see_features
from engine.evaluation.start import start_at_probe
from engine.machine.device import Run
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain, _model
from models.build import build_without_weights
from models.freeze import freeze
from models.masked import masked_autoencoder
from models.parts import classifiers, frozen_weights
from tests.engine.checkpoint.test_restore import PER_EPOCH, save
from tests.engine.small import CPU, build, saved_bytes, train, windows
from tests.refused import refusal
from utils.config import load_config
from utils.config.model import DecoderConfig, ModelConfig
from utils.distributed.world import ALONE
from utils.errors import UserError
from vitamp.pooling import POOLED, pool_by, pooled_features, pools_of

BACKBONE = {"MODEL__FREEZE": "backbone"}
RANDOM = {"MODEL__DEPTH": 3, "MODEL__DROPOUT": 0.2, "MODEL__ATTENTION_DROPOUT": 0.1, "MODEL__DROPPATH": 0.3}
EMA = {"TRAIN__MODEL_EMA": "true"}
AMP = {"AMP__ENABLED": "true", "AMP__INIT_LOSS_SCALING": 1024}
HOW = {
    "fp32": {},
    "bf16": {**AMP, "AMP__DTYPE": "bf16"},
    "fp16, accumulated": {**AMP, "AMP__DTYPE": "fp16", "TRAIN__ACCUM_ITER": 2},
    "O2": {**AMP, "AMP__DTYPE": "bf16", "AMP__LEVEL": "O2"},
    "NAIVE": {**AMP, "AMP__DTYPE": "bf16", "AMP__LEVEL": "NAIVE"},
    "recomputed blocks": {"TRAIN__GRAD_CHECKPOINT": "blocks"},
    "a block in fp32": {**AMP, "AMP__DTYPE": "bf16", "AMP__FP32_MODULES": "blocks.1"},
    "plain attention": {"SPEED": "-fused"},
    "patches by a product": {"SPEED": "+linear_patches"},
}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def kept_for_backward(ready: ReadyToTrain) -> int:
    """Bytes of what is computed; the weights and statistics themselves are there anyway."""
    parts = ready.parts
    _, batch = next(iter(next(windows(ready))))
    there = [tensor for model in (parts.model, parts.forward) for tensor in (*model.parameters(), *model.buffers())]
    return saved_bytes(parts.compute, batch, known=there)


FP8 = pytest.param({**AMP, "AMP__DTYPE": "fp8", "MODEL__EMBED_DIM": 32}, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [*HOW.values(), FP8], ids=[*HOW, "fp8"])
def test_frozen_backbone_does_not_change_and_saves_no_activations(tiny: Path, how: dict[str, object]) -> None:
    ready = build(tiny, **how, **RANDOM, **EMA, **BACKBONE)
    ema = ready.parts.callback(Ema)
    assert ema is not None
    assert kept_for_backward(ready) < 0.1 * kept_for_backward(build(tiny, TRAIN__GRAD_CHECKPOINT="none", **RANDOM))
    before = copies(ready.model)
    train(ready, 3)
    assert moved(ready.model, before) == {"head.weight", "head.bias"}
    assert moved(ema.module, before) == {"head.weight", "head.bias"}
    groups = ready.parts.optimizer.param_groups
    head = [ready.model.get_parameter(name) for name in ("head.bias", "head.weight")]
    assert [id(weight) for group in groups for weight in group["params"]] == [id(weight) for weight in head]
    assert all(weight.grad is None for weight in ready.model.parameters())


def training_parts(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if name and module.training}


def test_dropout_is_off_in_frozen_modules_and_on_before_the_classifier() -> None:
    model = timm.create_model("test_vit", num_classes=3, drop_rate=0.5, proj_drop_rate=0.1, drop_path_rate=0.1)
    freeze(model, ["backbone"])
    for _ in range(2):
        model.eval()
        assert training_parts(model) == set()
        model.train()
        assert training_parts(model) == {"fc_norm", "head_drop", "head"}
    images = torch.randn(2, 3, 160, 160)
    features: Any = model.forward_features
    assert torch.equal(features(images), features(images))
    assert not torch.equal(model(images), model(images)), "the classifier's own dropout"


@pytest.mark.parametrize(
    ("name", "heads", "trained"),
    [
        ("vit_tiny_patch16_224", ("head",), 192 * 256 + 256),
        ("deit_tiny_distilled_patch16_224", ("head", "head_dist"), 2 * (192 * 256 + 256)),
        ("swin_tiny_patch4_window7_224", ("head.fc",), 768 * 256 + 256),
        ("resnet50", ("fc",), 524_544),
        ("convnext_atto", ("head.fc",), 320 * 256 + 256),
    ],
)
def test_freeze_backbone_leaves_the_classifier_of_each_family(name: str, heads: tuple[str, ...], trained: int) -> None:
    model = build_without_weights(ModelConfig(TYPE="timm", NAME=name, NUM_CLASSES=256, FREEZE=("backbone",)), 224, 3)
    assert classifiers(model) == heads
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == trained
    frozen = {id(module) for part in model.frozen_parts for module in model.get_submodule(part).modules()}  # type: ignore
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(id(norm) in frozen for norm in norms)


@pytest.mark.parametrize(
    ("patterns", "is_frozen"),
    [
        ("patch_embed,blocks,*_*,norm", lambda name: not name.startswith("head.")),
        ("blocks.[0-1].*", lambda name: name.startswith(("blocks.0.", "blocks.1."))),
        ("LayerNorm", lambda name: "norm" in name),
        ("*.bias", lambda name: name.endswith(".bias")),
    ],
)
def test_freeze_globs_match_weights_modules_and_classes(
    tiny: Path, patterns: str, is_frozen: Callable[[str], bool]
) -> None:
    model = build(tiny, MODEL__FREEZE=patterns, MODEL__DEPTH=3).model
    assert set(frozen_weights(model)) == {name for name, _ in model.named_parameters() if is_frozen(name)}


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("blocks.7.*", "'blocks.7.*' matches no weight"),
        ("pos_embd", "Did you mean pos_embed?"),
        ("backbones", "Did you mean backbone?"),
        ("pos_drop", "'pos_drop' matches no weight"),
        ("*", "leaves no weights of VisionTransformer to train"),
    ],
)
def test_freeze_pattern_without_match_is_an_error(tiny: Path, patterns: str, said: str) -> None:
    refused = refusal(build, tiny, MODEL__FREEZE=patterns)
    assert "MODEL.FREEZE" in refused
    assert said in refused


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "LAMB"])
def test_moments_survive_thawing_and_freezing_again(
    tiny: Path, tmp_path: Path, optimizer: str, said: pytest.LogCaptureFixture
) -> None:
    words = {"TRAIN__OPTIMIZER__NAME": optimizer, "MODEL__DEPTH": 2, "TRAIN__WARMUP_EPOCHS": 0}
    head = build(tiny, **words, **BACKBONE)
    train(head, 3)
    checkpoint = save(head, tmp_path / "a", 3)
    checkpoint.meta["frozen"] = frozen_weights(head.model)
    thawed = build(tiny, **words, MODEL__FREEZE="patch_embed")
    position, _ = restore(thawed.parts, checkpoint, PER_EPOCH)
    assert equal_moments(head, thawed, "head.weight")
    log_resumption(checkpoint, load_config(str(tiny)).config, thawed.parts, position)
    assert "trained from now on (MODEL.FREEZE): 28 tensors: cls_token, pos_embed, blocks.0.norm1.weight" in said.text
    before = copies(thawed.model)
    train(thawed, 2, done=3)
    assert moved(thawed.model, before) == set(before) - {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    again = build(tiny, **words, MODEL__FREEZE="blocks.*")
    restore(again.parts, save(thawed, tmp_path / "b", 5), PER_EPOCH)
    assert equal_moments(thawed, again, "head.weight")
    assert equal_moments(thawed, again, "norm.bias")
    train(again, 1, done=5)


def equal_moments(one: ReadyToTrain, other: ReadyToTrain, name: str) -> bool:
    states = [ready.parts.optimizer.state[ready.model.get_parameter(name)] for ready in (one, other)]
    tensors = [{key: value for key, value in state.items() if isinstance(value, Tensor)} for state in states]
    return bool(tensors[0]) and all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p16_224", "convit_tiny", "mvitv2_tiny"])
def test_models_have_every_pooling_that_they_promise(name: str) -> None:
    size: Any = {} if name == "mvitv2_tiny" else {"depth": 1}
    model, pixels = timm.create_model(name, img_size=64, **size).eval(), torch.rand(2, 3, 64, 64)
    table = pooled_features(model, pixels, *dict.fromkeys((POOLED, pools_of(model)[-1])))
    for pool, columns in _pools(model, table.shape[1]).items():
        torch.testing.assert_close(table[:, columns], pooled_features(model, pixels, pool))


@pytest.mark.parametrize("own", ["avg", "map"])
def test_weights_that_another_pooling_leaves_out_are_frozen(own: str) -> None:
    model, encoder = (timm.create_model("test_vit", global_pool=own, num_classes=classes) for classes in (3, 0))
    pool_by(model, "both")
    for one in (model, masked_autoencoder(encoder, ModelConfig(DECODER=DecoderConfig(DEPTH=1)))):
        one(torch.rand(1, 3, 160, 160)).sum().backward()
        assert all((weight.grad is None) != weight.requires_grad for weight in one.parameters())


@pytest.mark.parametrize("name", ["levit_128s", "repvgg_b0"])
def test_freezing_batch_norms_spares_the_classifier_and_stochastic_depth(name: str) -> None:
    model = build_without_weights(ModelConfig(NAME=name, DROPPATH=0.1, FREEZE=("batch_norm",)), 224, 3).train()
    assert {name.split(".")[0] for name in frozen_weights(model)} == {"stem", "stages"}
    assert all(part.training for name, part in model.named_modules() if "drop_path" in name)


def test_every_layer_of_a_new_classifier_is_zero(tmp_path: Path) -> None:
    torch.save(timm.create_model("crossvit_tiny_240").state_dict(), tmp_path / "w.pth")
    words = {"MODEL.NAME": "crossvit_tiny_240", "DATA.IMAGE_SIZE": "240", "MODEL.NEW_CLASSIFIER": "zero"}
    model = _model(load_config(words={**words, "MODEL.PRETRAINED": str(tmp_path / "w.pth")}).config, CPU, False)
    assert not any(weight.any() for head in classifiers(model) for weight in model.get_submodule(head).parameters())


class Doubled(VisionTransformer):
    """Its classifier sees twice its features."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        features = super().forward_head(x, pre_logits=True)
        return features if pre_logits else self.head(2 * features)


@pytest.mark.parametrize("deviation", [1.0, 0.0])
def test_features_are_not_kept_where_the_classifier_sees_others(
    deviation: float, tiny: Path, said: pytest.LogCaptureFixture
) -> None:
    """Nor with a classifier of zeros (MODEL.NEW_CLASSIFIER), whose outputs would be the same."""
    config = load_config(str(tiny), words={"MODEL.FREEZE": "[backbone]", "TRAIN.NUM_EPOCHS": "0"}).config
    assert config.trains_on_features
    model = Doubled(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=16, depth=1, num_heads=2)
    nn.init.normal_(model.get_parameter("head.weight"), std=deviation)
    precision = Precision(config.AMP, CPU, choose(config.AMP, CPU))
    ready: Any = SimpleNamespace(model=model, inputs=nn.Identity(), precision=precision)
    unused: Any = None
    assert see_features(Run(config, ALONE, CPU, threads=1), ready, unused, unused, dry=False) is None
    assert "The features of this Doubled are not kept: its classifier is not applied to them alone." in said.text
    with pytest.raises(UserError, match=r"Doubled's classifier is not one linear layer .* use zero or true"):
        start_at_probe(Run(config, ALONE, CPU, threads=1), ready)
