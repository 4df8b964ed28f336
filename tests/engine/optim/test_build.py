"""Which weights decay, which kernels step, and that timm's optimisers work in the update."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.optim.build import build_optimizer, describe_optimizer
from engine.update import train_update
from tests.engine.small import CPU, FP16, Scale, build, flat, parts_of, train, window_of
from utils.config import OptimizerConfig, TrainConfig
from utils.errors import UserError


def optimizer_of(model: nn.Module, name: str = "AdamW", **settings: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainConfig(OPTIMIZER=OptimizerConfig(NAME=name, **settings)), 1e-3, CPU)


def decays(tiny: Path, **words: object) -> dict[str, float]:
    """Each weight's decay, by its name."""
    parts = build(tiny, **words).parts
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in parts.optimizer.param_groups for p in group["params"]}


def test_biases_norms_and_embeddings_do_not_decay(tiny: Path) -> None:
    found = decays(tiny, TRAIN__WEIGHT_DECAY=0.3)
    free = {"pos_embed", "cls_token"} | {name for name in found if name.endswith("bias") or "norm" in name}
    assert {name for name, decay in found.items() if decay == 0} == free
    assert {decay for name, decay in found.items() if name not in free} == {0.3}
    assert {"pos_embed", "cls_token", "norm.weight", "blocks.0.norm1.weight", "head.bias"} <= free
    assert {"head.weight", "patch_embed.proj.weight"} <= set(found) - free


def test_weight_decay_all_decays_every_weight(tiny: Path) -> None:
    found = decays(tiny, TRAIN__WEIGHT_DECAY=0.3, TRAIN__WEIGHT_DECAY_ALL="true")
    assert set(found.values()) == {0.3}
    assert set(found) == set(decays(tiny)), "and none is forgotten"


def test_sgd_is_momentum_without_nesterov() -> None:
    sgd = optimizer_of(nn.Linear(2, 2), "SGD")
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["nesterov"], sgd.defaults["momentum"]) == (False, 0.9)
    assert optimizer_of(nn.Linear(2, 2), "nesterov").defaults["nesterov"] is True


@pytest.mark.parametrize("name", ["AdamW", "adam", "SGD", "Nesterov"])
def test_common_optimizers_are_fused(name: str) -> None:
    assert optimizer_of(nn.Linear(2, 2), name).defaults["fused"] is True


def test_settings_override_the_optimizers_defaults() -> None:
    made = optimizer_of(nn.Linear(2, 2), "AdaBelief", EPS=1e-8, BETAS=(0.8, 0.9))
    assert (made.defaults["eps"], made.defaults["betas"]) == (1e-8, (0.8, 0.9))
    assert optimizer_of(nn.Linear(2, 2), "LAMBC").defaults["max_grad_norm"] == torch.inf, "GRAD_CLIP alone clips"
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # which Muon needs
    assert optimizer_of(blocks, "Muon", MOMENTUM=0.5).defaults["momentum"] == 0.5


def test_wrong_number_of_betas_and_what_an_optimizer_does_not_take_are_reported(said: pytest.LogCaptureFixture) -> None:
    made = optimizer_of(nn.Linear(2, 2), "Adan", BETAS=(0.8, 0.9))
    assert made.defaults["betas"] == (0.98, 0.92, 0.99)
    assert "TRAIN.OPTIMIZER.BETAS has no effect: adan takes 3 betas; its defaults are used" in said.text
    for name, key, value in (("Lion", "EPS", 1e-8), ("LARS", "BETAS", (0.8, 0.9)), ("Lion", "MOMENTUM", 0.5)):
        optimizer_of(nn.Linear(2, 2), name, **{key: value})
        assert f"TRAIN.OPTIMIZER.{key} has no effect with TRAIN.OPTIMIZER.NAME {name}" in said.text


def test_describe_optimizer_names_the_values_it_uses() -> None:
    assert describe_optimizer(optimizer_of(nn.Linear(2, 2)), "AdamW") == "AdamW (betas 0.9 and 0.999, eps 1e-08)"
    assert describe_optimizer(optimizer_of(nn.Linear(2, 2), "AdaBelief"), "X") == "X (betas 0.9 and 0.999, eps 1e-16)"
    assert describe_optimizer(optimizer_of(nn.Linear(2, 2), "nesterov"), "X") == "X (momentum 0.9, nesterov)"
    assert describe_optimizer(optimizer_of(nn.Linear(2, 2), "Adafactor"), "X") == "X (eps 1e-30)"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lionn", "lion"),
        ("xyzzy", "AdamW, Adam, SGD"),
        ("Adahessian", "second derivatives"),
        ("bnbadamw", "cannot be built"),
    ],
)
def test_unusable_optimizer_is_an_error_that_names_near_ones_or_why(name: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"TRAIN\.OPTIMIZER\.NAME.*{name}.*{why}"):
        optimizer_of(nn.Linear(2, 2), name)


@pytest.mark.parametrize(
    "name", ["AdamW", "SGD", "LAMB", "Lion", "Adafactor", "Adan", "NAdamW", "LARS", "RMSProp", "Muon", "NAdaMuon"]
)
def test_optimizers_train_in_fp16(tiny: Path, name: str) -> None:
    """A first update that overflows leaves no trace, and the next ones move all weights."""
    amp = {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024}
    ready = build(tiny, **amp, TRAIN__OPTIMIZER__NAME=name, TRAIN__WARMUP_EPOCHS=0)
    before = {name: tensor.clone() for name, tensor in ready.parts.model.state_dict().items()}
    bias = ready.parts.model.get_parameter("head.bias")
    overflow = bias.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    train(ready, 1)
    overflow.remove()
    skipped = ready.parts.model.state_dict()
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    train(ready, 2, done=1)
    after = ready.parts.model.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []
    reading = ready.parts.meters.read(ready.parts.precision.scale_tensor(), ready.parts.schedule.last_rate())
    assert (reading.skipped, ready.parts.schedule.stepped) == (1, 2)
    assert reading.scale == 512.0, "halved by the overflow"


def test_optimizer_draws_the_same_after_any_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do all ranks, which compute different ones: with DDP, each steps its own copy of the weights."""
    monkeypatch.setattr("timm.optim.kron.has_dynamo", False)  # compiling takes a minute
    models = Scale(), Scale()
    for model, images in zip(models, ([flat(0.5)], [flat(0.5)] * 2), strict=True):
        train_update(parts_of(model, optimizer_of(model, "kron")), window_of(*images), 1)
    assert models[0].weight.item() == models[1].weight.item() != 1


def test_momentum_is_initialised_if_the_first_update_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused SGD takes momentum from memory it has not written, if its first step is skipped."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, 1e6))
    model = Scale()
    settings = TrainConfig(OPTIMIZER=OptimizerConfig(NAME="SGD", MOMENTUM=0.5), WEIGHT_DECAY=0)
    parts = parts_of(model, build_optimizer(model, settings, 1.0, CPU), FP16)
    parts.assemble()
    for update, value in enumerate((3e38, 0.25, 0.25), start=1):
        train_update(parts, window_of(flat(value)), update)
    assert model.weight.item() == 1.0 - 0.25 - (0.25 + 0.125)
