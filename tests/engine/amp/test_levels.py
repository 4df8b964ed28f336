"""What every level of mixed precision means, and that one update is the same story in all of them."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from datasets import Batch, MicroBatch, Window
from engine.amp.low_precision import tile_size_hint
from engine.amp.precision import check_amp
from engine.evaluation.evaluate import validate
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from engine.update import train_update
from tests.engine.amp.modes import BF16, FP16, FP32, MODES, PLAIN_STEPS, SCALED, WITH_MASTERS, amp, change
from tests.engine.small import build, train, windows
from tests.program import made_meta
from tests.saved import save_checkpoint
from utils.config import TrainConfig
from utils.distributed.world import ALONE
from utils.errors import UserError
from vitamp.checkpoints import MODEL


def noting(outputs: set[torch.dtype]) -> Any:
    """A hook that keeps the precision of what a module gives."""
    return lambda _module, _args, output: outputs.add(output.dtype)


def again(pairs: list[tuple[MicroBatch, Batch]]) -> Window:
    return Window(tuple(share for share, _ in pairs), iter([batch for _, batch in pairs]))


def as_one(pairs: list[tuple[MicroBatch, Batch]]) -> Window:
    """The same samples in one large batch."""
    batches = [batch for _, batch in pairs]
    merged = Batch(*(torch.cat([getattr(batch, field) for batch in batches]) for field in Batch._fields))
    return Window((MicroBatch(0, np.concatenate([share.indices for share, _ in pairs]), 1.0),), iter([merged]))


# ---- one update


@pytest.mark.parametrize("mode", ["fp32", *WITH_MASTERS])
@pytest.mark.parametrize("update", [0, 14], ids=["full", "short"])
def test_micro_batches_equal_one_large_batch(tiny: Path, mode: str, update: int) -> None:
    """44 micro-batches in windows of three: the last one has two, each of them half of the mean."""
    words = {**MODES.get(mode, {}), **PLAIN_STEPS, "TRAIN__ACCUM_ITER": 3}
    ready, large, exact = build(tiny, **words), build(tiny, **words), build(tiny, **PLAIN_STEPS)
    pairs = list(next(ready.train_loader.epoch(1, start=update)))
    assert len(pairs) == (2 if update else 3)
    one, many = change(large, as_one(pairs)), change(ready, again(pairs))
    rounding = {"fp32": 1e-5}.get(mode, 0.02 if mode.endswith("bf16") else 0.003)
    assert (many - one).norm() < rounding * one.norm()
    assert (many - change(exact, as_one(pairs))).norm() < 3 * rounding * one.norm()


@pytest.mark.parametrize("mode", WITH_MASTERS)
def test_logged_norm_and_clipping_use_unscaled_gradients(tiny: Path, mode: str) -> None:
    words = {**PLAIN_STEPS, "TRAIN__ACCUM_ITER": 2}
    pairs = list(next(windows(build(tiny, **words))))
    told = {}
    for name, keys in (("fp32", {}), (mode, MODES[mode])):
        for clip in ("null", "0.125") if keys else ("null",):
            ready = build(tiny, **{**words, **keys, "TRAIN__GRAD_CLIP": clip})
            stepped = change(ready, again(pairs)).norm().item()
            norm = ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0).grad_norm
            told[name, clip] = norm
            assert stepped == pytest.approx(norm if clip == "null" else 0.125, rel=1e-3), "the norm before clipping"
    assert told[mode, "null"] > 0.25, "there must be something to clip"
    assert told[mode, "null"] == told[mode, "0.125"] == pytest.approx(told["fp32", "null"], rel=0.01)


def standing(ready: ReadyToTrain) -> dict[str, Any]:
    """All that a skipped update must leave alone."""
    parts = ready.parts
    ema = parts.callback(Ema)
    assert ema is not None
    found: dict[str, Any] = {"moved": parts.schedule.stepped, "averaged": int(ema.updates)}
    modules = {"model": parts.model, "average": ema.module, "forward": parts.forward}
    found |= {f"{key}.{name}": t.tolist() for key, m in modules.items() for name, t in m.state_dict().items()}
    state = parts.optimizer.state_dict()["state"]
    found |= {f"optimizer.{i}.{k}": torch.as_tensor(v).tolist() for i, s in state.items() for k, v in s.items()}
    found["rate"] = parts.optimizer.param_groups[0]["lr"]
    return found


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])  # torch's fused one skips by itself, timm's is not called
@pytest.mark.parametrize("mode", SCALED)
def test_skip_changes_nothing_and_training_continues(tiny: Path, mode: str, optimizer: str) -> None:
    ready = build(
        tiny,
        **MODES[mode],
        TRAIN__MODEL_EMA="true",
        TRAIN__ACCUM_ITER=2,
        TRAIN__WARMUP_EPOCHS=0,
        TRAIN__OPTIMIZER__NAME=optimizer,
    )
    source = windows(ready)
    train(ready, 2, source)
    before = standing(ready)
    (share, good), (other, bad) = list(next(source))
    window = Window((share, other), iter([good, bad._replace(images=torch.full(bad.images.shape, float("inf")))]))
    train_update(ready.parts, window, 3)
    after = standing(ready)
    assert {key for key in before if before[key] != after[key]} == set()
    assert ready.parts.precision.scaler.get_scale() == 512
    assert all(p.grad is None for model in (ready.parts.model, ready.parts.forward) for p in model.parameters())
    train(ready, 1, source, done=3)
    now = standing(ready)
    assert (now["moved"], now["averaged"]) == (before["moved"] + 1, before["averaged"] + 1)
    still = {key for key in before if before[key] == now[key] and ".running" not in key}
    assert not {key for key in still if key.startswith(("model.", "average.", "forward.", "rate"))}
    assert all(np.isfinite(value).all() for key, value in now.items() if key.startswith("model."))


# ---- what a level is


def dtypes(tensors: Any) -> set[torch.dtype]:
    return {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}


@pytest.mark.parametrize(("mode", "name"), [*((mode, "tiny") for mode in MODES), ("O2 bf16", "aimv2_huge_patch14_224")])
def test_dtypes_of_weights_gradients_optimizer_and_file(tiny: Path, tmp_path: Path, mode: str, name: str) -> None:
    ready = build(tiny, **MODES[mode], TRAIN__MODEL_EMA="true", MODEL__NAME=name)
    parts = ready.parts
    ema = parts.callback(Ema)
    assert ema is not None
    gradients: dict[str, torch.dtype] = {}

    def noted(*_: Any) -> None:
        gradients.update({n: p.grad.dtype for n, p in parts.model.named_parameters() if p.grad is not None})

    parts.optimizer.register_step_pre_hook(noted)
    train(ready, 3)
    half = FP16 if mode.endswith("fp16") else BF16
    held = half if mode.startswith("O3") else FP32
    # The model that is saved, its gradients as the optimiser sees them, and the optimiser's own state.
    assert dtypes(parts.model.parameters()) == set(gradients.values()) == {held}
    assert len(gradients) == len(list(parts.model.parameters()))
    moments = [v for s in parts.optimizer.state.values() for k, v in s.items() if k != "step"]
    assert dtypes(moments) == {held}
    assert dtypes(ema.module.parameters()) == {FP32}
    # The model that computes.
    computing = {n: p.dtype for n, p in parts.forward.named_parameters()}
    norms = {n for n in computing if "norm" in n}
    assert norms
    expected = {"O2": half, "NAIVE": half, "O3": half}.get(mode.split()[0], FP32)
    assert {computing[n] for n in computing if n not in norms} == {expected}
    assert {computing[n] for n in norms} == {FP32 if mode.startswith("O2") else expected}
    # The file.
    saved = save_checkpoint(tmp_path, 3, {MODEL: parts.model.state_dict()}, {}, made_meta(3))
    assert dtypes(load_file(saved / MODEL).values()) == {held}


def validated(ready: ReadyToTrain) -> Any:
    return validate(ready, ready.model, ALONE)


@pytest.mark.parametrize("mode", ["O1 fp16", "O3 bf16", "fp8"])
def test_precision_learns(tiny: Path, mode: str) -> None:
    """Sixty updates of a few thousand weights; a level that lost its gradients stays at chance."""
    ready = build(tiny, **MODES[mode], TRAIN__BASE_LR=5e-3, TRAIN__WARMUP_EPOCHS=0)
    train(ready, 60)
    means = validated(ready)
    assert means.loss < 1.9
    assert means.acc1 > 25


@pytest.mark.parametrize("mode", ["O1 bf16", "O2 bf16", "NAIVE bf16", "O2 fp16"])
def test_validation_computes_in_the_precision_of_the_run(tiny: Path, mode: str) -> None:
    losses = {}
    for name, words in ((mode, MODES[mode]), ("fp32", {})):
        ready = build(tiny, **words)
        before = {key: tensor.clone() for key, tensor in ready.model.state_dict().items()}
        seen: set[torch.dtype] = set()
        handle = ready.model.get_submodule("head").register_forward_hook(noting(seen))
        losses[name] = validated(ready).loss
        handle.remove()
        assert seen == {ready.precision.choice.dtype}
        assert all(torch.equal(tensor, before[key]) for key, tensor in ready.model.state_dict().items())
        assert ready.model.training
    assert losses[mode] != losses["fp32"]


def test_o3_in_fp16_rejects_a_small_epsilon() -> None:
    eps = {"NAME": "AdamW", "EPS": 1e-8}
    with pytest.raises(UserError, match=r"O3 in fp16.*EPS 1e-08.*explode.*0\.0001.*bf16.*O2"):
        check_amp(amp(LEVEL="O3", DTYPE="fp16"), TrainConfig.model_validate({"OPTIMIZER": eps}))
    check_amp(amp(LEVEL="O3", DTYPE="bf16"), TrainConfig.model_validate({"OPTIMIZER": eps}))
    for fine in ({**eps, "EPS": 1e-4}, {"NAME": "SGD"}, {"NAME": "sgdw"}):
        check_amp(amp(LEVEL="O3", DTYPE="fp16"), TrainConfig.model_validate({"OPTIMIZER": fine}))


@pytest.mark.parametrize("level", ["NAIVE", "O3"])
def test_naive_and_o3_reject_lists_and_fp32_modules(level: str) -> None:
    lists = {"CUSTOM_WHITE_LIST": ["softmax"], "CUSTOM_BLACK_LIST": ["gelu"], "FP32_MODULES": ["head"]}
    for key, value in {**lists, "AUTO_FP32": True}.items():
        with pytest.raises(UserError, match=rf"AMP\.{key} .*{level}.*use O1 or O2"):
            check_amp(amp(LEVEL=level, **{key: value}), TrainConfig())
        check_amp(amp(LEVEL="O2", **{key: value}), TrainConfig())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fp32_modules_have_fp32_weights_and_compute_in_fp32(tiny: Path, level: str) -> None:
    words = {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": level}
    ready = build(tiny, **words, AMP__FP32_MODULES="blocks.0.mlp")
    forward = ready.parts.forward
    inside, beside = set[torch.dtype](), set[torch.dtype]()
    forward.get_submodule("blocks.0.mlp.fc1").register_forward_hook(noting(inside))
    forward.get_submodule("blocks.0.attn.qkv").register_forward_hook(noting(beside))
    assert change(ready, next(windows(ready))).isfinite().all()
    assert (inside, beside) == ({FP32}, {BF16})
    weight = forward.get_parameter("blocks.0.mlp.fc1.weight")
    assert weight is ready.model.get_parameter("blocks.0.mlp.fc1.weight")
    assert forward.get_parameter("blocks.0.attn.qkv.weight").dtype is (BF16 if level == "O2" else FP32)


# ---- the hint


def test_tile_size_hint_names_sizes_that_are_not_multiples_of_8() -> None:
    model = nn.Linear(1, 1)
    for width, batch in itertools.product((192, 100), (64, 30)):
        model.embed_dim = width  # pyright: ignore[reportArgumentType]
        told = tile_size_hint(model, batch)
        for key, size, odd in (("MODEL.EMBED_DIM", width, width == 100), ("DATA.BATCH_SIZE", batch, batch == 30)):
            assert (f"{key} {size}" in (told or "")) is odd
        assert (told is None) is ((width, batch) == (192, 64))
    assert tile_size_hint(nn.Linear(1, 1), 8) is None, "a model without a width of that name"
