"""Restoring training state: a resumed run equals an uninterrupted one."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.restore import restore
from engine.checkpoint.state import finite, state_of
from engine.measure.meters import Best, Position
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from tests.engine.small import build, train, windows
from tests.program import made_meta
from tests.refused import refusal
from tests.saved import save_checkpoint
from utils.errors import UserError
from vitamp.checkpoints import MODEL, Checkpoint, inspect
from vitamp.metrics import AVERAGE

EMA = AVERAGE.file

GLOBAL_BATCH = 32
PER_EPOCH = 44
BEST = Best(figure=12.5, kind="ema_acc1", update=3, epoch=1, stale=2)
RICH = {"TRAIN__MODEL_EMA": "true", "MODEL__DROPOUT": 0.1, "AMP__ENABLED": "true"}


def save(ready: ReadyToTrain, root: Path, update: int, epoch_step: tuple[int, int] = (1, 0)) -> Checkpoint:
    parts = ready.parts
    tensors = {MODEL: parts.model.state_dict()}
    if ema := parts.callback(Ema):
        tensors[EMA] = ema.module.state_dict()
    state = state_of(parts, Position(*epoch_step, update), BEST, GLOBAL_BATCH, parts.meters.state())
    return inspect(save_checkpoint(root, update, tensors, state, made_meta(update)))


def everything(ready: ReadyToTrain) -> dict[str, Any]:
    """All state that training depends on, in a form that `==` compares bit for bit."""
    parts = ready.parts
    models = {which.name: module for which, module in parts.weights.items()}
    found: dict[str, Any] = {f"{k}.{n}": bits(t) for k, m in models.items() for n, t in m.state_dict().items()}
    for index, state in parts.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{n}": bits(v) for n, v in state.items()}
    for index, group in enumerate(parts.optimizer.param_groups):
        found |= {f"group.{index}.{n}": bits(v) for n, v in group.items() if n != "params"}
    found["scaler"] = parts.precision.scaler.state_dict()
    found["moved"], found["last_rate"] = parts.schedule.stepped, float(parts.schedule.last_rate())
    found["averaged"] = ema.state() if (ema := parts.callback(Ema)) else {}
    found["meters"] = parts.meters.state()
    return found


def bits(value: Any) -> Any:
    return (str(value.dtype), tuple(value.shape), value.flatten().tolist()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    "words",
    [
        {**RICH, "AMP__DTYPE": "bf16"},
        # Growth after 4 clean updates, so that 6 is in the middle; 1e7 overflows at first.
        {**RICH, "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1e7, "AMP__INCR_EVERY_N_STEPS": 4},
        {**RICH, "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 256, "AMP__INCR_EVERY_N_STEPS": 4},
        {"TRAIN__OPTIMIZER__NAME": "SGD", "TRAIN__ACCUM_ITER": 2},
        {"TRAIN__OPTIMIZER__NAME": "LAMB"},
        {"TRAIN__OPTIMIZER__NAME": "Lion", "TRAIN__MODEL_EMA": "true", "TRAIN__MODEL_EMA_WARMUP": "false"},
        {"TRAIN__OPTIMIZER__NAME": "Adan", "TRAIN__WEIGHT_DECAY_ALL": "true"},
        {"TRAIN__OPTIMIZER__NAME": "Adafactor"},
        {"TRAIN__OPTIMIZER__NAME": "NAdaMuon"},
        {"TRAIN__OPTIMIZER__NAME": "Muon", "TRAIN__LAYER_DECAY": 0.7},
        {**RICH, "TRAIN__OPTIMIZER__NAME": "Muon", "AMP__DTYPE": "bf16", "TRAIN__ACCUM_ITER": 2},
        {**RICH, "TRAIN__OPTIMIZER__NAME": "Muon", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1e7},
        {**RICH, "MODEL__FREEZE": "backbone", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024},
        {"MODEL__FREEZE": "patch_embed,blocks.0", "MODEL__DEPTH": 3, "TRAIN__LAYER_DECAY": 0.6},
        {"MODEL__FREEZE": "*norm*", "TRAIN__OPTIMIZER__NAME": "SGD", "TRAIN__LAYER_DECAY": 0.6},
    ],
    ids=lambda words: "-".join(str(value) for value in words.values()),
)
def test_resumed_training_equals_uninterrupted(tiny: Path, tmp_path: Path, words: dict[str, object]) -> None:
    whole = build(tiny, **words)
    source = windows(whole)
    train(whole, 6, source)
    checkpoint = save(whole, tmp_path / "checkpoints", 6, (1, 6))
    at_six = everything(whole)
    train(whole, 5, source, done=6)

    resumed = build(tiny, **words)
    position, best = restore(resumed.parts, checkpoint, PER_EPOCH)
    assert (position, best) == (Position(1, 6, 6), BEST)
    now = everything(resumed)
    assert {key for key in at_six if at_six[key] != now.get(key)} <= {"last_rate"}
    train(resumed, 5, islice(resumed.train_loader.epoch(1, start=6), 5), done=6)
    ended, expected = everything(resumed), everything(whole)
    assert {key for key in expected if expected[key] != ended.get(key)} == set()
    assert 11 >= expected["moved"] > at_six["moved"] > 0, "the weights must have moved before and after"
    assert (expected["meters"]["skipped"] > 0) is (words.get("AMP__INIT_LOSS_SCALING") == 1e7)


def test_resume_may_add_or_drop_ema(tiny: Path, tmp_path: Path) -> None:
    without = build(tiny)
    train(without, 2)
    later = build(tiny, TRAIN__MODEL_EMA="true")
    restore(later.parts, save(without, tmp_path / "a", 2), PER_EPOCH)
    ema = later.parts.callback(Ema)
    assert ema is not None
    for name, tensor in ema.module.state_dict().items():
        assert torch.equal(tensor, without.parts.model.state_dict()[name]), "it begins with the weights there are"
    train(later, 1, done=2)
    assert int(ema.updates) == 1
    restore(build(tiny).parts, save(later, tmp_path / "b", 3), PER_EPOCH)


def test_resume_takes_optimizer_settings_from_config(tiny: Path, tmp_path: Path) -> None:
    ready = build(tiny, TRAIN__WEIGHT_DECAY=0.1)
    train(ready, 1)
    resumed = build(tiny, TRAIN__WEIGHT_DECAY=0.2, TRAIN__OPTIMIZER__BETAS="0.8 0.9")
    restore(resumed.parts, save(ready, tmp_path, 1), PER_EPOCH)
    groups = resumed.parts.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}
    assert {group["betas"] for group in groups} == {(0.8, 0.9)}


def test_resume_restores_the_random_state_of_kron(tiny: Path, tmp_path: Path) -> None:
    ready, resumed = (build(tiny, TRAIN__OPTIMIZER__NAME="Kron") for _ in range(2))
    vars(ready.parts.optimizer)["rng"].random()
    restore(resumed.parts, save(ready, tmp_path, 1), PER_EPOCH)
    assert resumed.parts.optimizer.state_dict()["rng_state"] == ready.parts.optimizer.state_dict()["rng_state"]


def test_resume_with_another_architecture_lists_differences(tiny: Path, tmp_path: Path) -> None:
    checkpoint = save(build(tiny), tmp_path, 1)
    text = refusal(restore, build(tiny, MODEL__NUM_CLASSES=12, MODEL__DEPTH=2).parts, checkpoint, PER_EPOCH)
    assert "head.weight: (10, 16) in the file, (12, 16) in the model" in text
    assert "blocks.1.norm1.weight: missing in the file" in text
    assert "... and " in text
    with pytest.raises(UserError, match=r"only in the file"):
        restore(build(tiny).parts, save(build(tiny, MODEL__DEPTH=2), tmp_path / "deep", 1), PER_EPOCH)


def test_resume_keeps_moments_of_regrouped_weights(tiny: Path, tmp_path: Path) -> None:
    ready = build(tiny)
    train(ready, 3)
    checkpoint = save(ready, tmp_path, 3)
    resumed = build(tiny, TRAIN__WEIGHT_DECAY_ALL="true", TRAIN__LAYER_DECAY=0.5)
    restore(resumed.parts, checkpoint, PER_EPOCH)
    for name, moments in moments_of(ready).items():
        assert all(torch.equal(value, moments_of(resumed)[name][key]) for key, value in moments.items()), name
    train(resumed, 1, done=3)


def moments_of(ready: ReadyToTrain) -> dict[str, dict[str, Tensor]]:
    state = ready.parts.optimizer.state
    return {name: state[weight] for name, weight in ready.model.named_parameters() if weight in state}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_detects_nan_and_infinity(bad: float) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16), "count": torch.tensor(3)}
    assert finite(tensors)
    tensors["b"][1, 1] = bad
    assert not finite(tensors)
