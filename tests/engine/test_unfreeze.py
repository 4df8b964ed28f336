"""MODEL.UNFREEZE_EPOCH: what was frozen trains from then on, exactly as in a run that is resumed at that epoch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from timm.optim._optim_factory import list_optimizers
from torch import nn

from datasets import identity_of
from engine.optim.build import FUSED, MUON, build_optimizer
from models.freeze import freeze, unfreeze
from models.parts import frozen_weights
from tests.engine.checkpoint.test_restore import everything, save
from tests.engine.small import CPU, build, train
from tests.engine.test_freeze import AMP, EMA, RANDOM, copies, moved, resnet, training_parts
from utils.config import OptimizerConfig, TrainConfig

BACKBONE = {"MODEL__FREEZE": "backbone", "MODEL__UNFREEZE_EPOCH": 2}
HEAD = {"head.weight", "head.bias"}
COUNT_BY_GROUP = ("adan", "lamb")
"""timm's optimisers that count the steps of a whole group, which bias correction depends on."""
UNTESTED = ["adahessian", "bnb*", "fused*", "kron*"]
"""Refused, only on GPUs, or with steps that depend on random numbers."""


@pytest.mark.parametrize(
    "words",
    [
        {**EMA, **RANDOM},
        {**EMA, **RANDOM, **AMP, "AMP__DTYPE": "bf16", "TRAIN__LAYER_DECAY": 0.6},
        {**RANDOM, **AMP, "AMP__DTYPE": "fp16", "TRAIN__ACCUM_ITER": 2, "AMP__INIT_LOSS_SCALING": 1e7},
        {**EMA, **RANDOM, **AMP, "AMP__DTYPE": "bf16", "AMP__LEVEL": "O2"},
        {**AMP, "AMP__DTYPE": "fp16", "AMP__LEVEL": "O2", "TRAIN__ACCUM_ITER": 2, "AMP__INIT_LOSS_SCALING": 1e7},
        {**AMP, "AMP__DTYPE": "bf16", "AMP__LEVEL": "NAIVE", "TRAIN__OPTIMIZER__NAME": "SGD"},
        {"TRAIN__GRAD_CHECKPOINT": "blocks", **RANDOM, "TRAIN__OPTIMIZER__NAME": "Muon"},
        {**AMP, "AMP__DTYPE": "bf16", "TRAIN__OPTIMIZER__NAME": "LAMB"},
        {"TRAIN__TOKEN_DROP": 0.5, "TRAIN__OPTIMIZER__NAME": "Adan", "TRAIN__WEIGHT_DECAY_ALL": "true"},
    ],
    ids=lambda words: "-".join(str(value) for value in words.values()),
)
def test_unfrozen_run_equals_one_resumed_at_that_epoch(tiny: Path, tmp_path: Path, words: dict[str, object]) -> None:
    words = {**BACKBONE, **words}
    whole = build(tiny, **words)
    before = copies(whole.model)
    train(whole, 6, whole.train_loader.epoch(1))
    assert moved(whole.model, before) == HEAD
    assert not whole.parts.enter(1)
    checkpoint = save(whole, tmp_path, 6, (2, 0))
    samples = identity_of(whole.train_set, whole.train_loader.order)  # as if six updates were an epoch
    checkpoint.meta.update(epoch_finished=True, samples=samples)
    assert whole.parts.enter(2)
    assert not whole.parts.enter(2), "once"
    train(whole, 4, whole.train_loader.epoch(2), done=6)
    assert moved(whole.model, before) == set(before)
    assert frozen_weights(whole.model) == []

    resumed = build(tiny, CPU, checkpoint, **words)
    assert frozen_weights(resumed.model) == []
    assert not resumed.parts.enter(2)
    train(resumed, 4, islice(resumed.train_loader.epoch(2), 4), done=6)
    ended, expected = everything(resumed), everything(whole)
    assert {key for key in expected if expected[key] != ended.get(key)} == set()


@pytest.mark.parametrize("name", sorted({*FUSED, *list_optimizers(exclude_filters=UNTESTED)} - MUON))
def test_optimizer_leaves_frozen_weights_alone_and_starts_their_state_later(name: str) -> None:
    """Weight decay included. The first steps of a weight are those of an optimiser which has this layer only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    freeze(model, ["0"], for_now=True)
    train_config = TrainConfig(OPTIMIZER=OptimizerConfig(NAME=name), WEIGHT_DECAY=0.3, WEIGHT_DECAY_ALL=True)
    optimizer = build_optimizer(model, train_config, 1e-2, CPU)
    frozen, trained = (model.get_parameter(f"{n}.weight") for n in (0, 1))
    before = [frozen.detach().clone(), trained.detach().clone()]
    for _ in range(3):
        step(model, optimizer)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])
    assert unfreeze(model) == ["0.weight", "0.bias"]
    alone = nn.Sequential(nn.Linear(4, 6))
    alone.load_state_dict({"0.weight": frozen, "0.bias": model.get_parameter("0.bias")})
    other = build_optimizer(alone, train_config, 1e-2, CPU)
    for _ in range(2):  # some optimisers only set up their state in the first step
        step(model, optimizer)
        step(alone, other)
    assert not torch.equal(frozen, before[0])
    same = torch.allclose(alone.get_parameter("0.weight"), frozen, rtol=1e-6, atol=1e-7)
    assert same is not any(word in name for word in COUNT_BY_GROUP)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.grad = torch.linspace(-1, 1, weight.numel()).view_as(weight) + (0.1 if "bias" in name else 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_modules_train_again_and_norms_update_their_statistics(tiny: Path) -> None:
    ready = resnet(tiny, **BACKBONE)
    before = copies(ready.model)
    train(ready, 1)
    assert moved(ready.model, before) == {"fc.weight", "fc.bias"}
    assert ready.parts.enter(2)
    assert training_parts(ready.model) == {name for name, _ in ready.model.named_modules() if name}
    ready.model.eval()
    assert training_parts(ready.model) == set()
    ready.model.train()
    train(ready, 1, done=1)
    assert {"bn1.running_mean", "layer4.0.bn2.running_var", "fc.weight"} <= moved(ready.model, before)
