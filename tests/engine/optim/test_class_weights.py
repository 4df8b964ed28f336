"""TRAIN.CLASS_WEIGHTS: torch's weighted cross-entropy of the global batch, however it is cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import EpochOrder
from engine.task.other_losses import WeightedCrossEntropy, class_weights
from engine.update import accumulate
from tests.engine.small import build, windows
from utils.errors import UserError

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7, 2.5])
SKEWED = np.random.default_rng(1).choice(5, 203, p=[0.5, 0.3, 0.1, 0.07, 0.03])


def batch(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=generator) * 3, torch.randint(5, (count,), generator=generator)


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, 5).float()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_target_of_one_class_gives_the_same_as_its_label(smoothing: float) -> None:
    logits, labels = batch()
    loss = WeightedCrossEntropy(WEIGHTS, smoothing)
    assert float(loss(logits, one_hot(labels))) == pytest.approx(float(loss(logits, labels)), rel=1e-6)


@pytest.mark.parametrize(("size", "accum", "world"), [(8, 4, 1), (8, 1, 4), (4, 4, 2), (32, 1, 1)])
def test_weights_of_micro_batches_give_the_mean_of_the_global_batch(size: int, accum: int, world: int) -> None:
    weights = WEIGHTS.double().numpy()
    logits = np.random.default_rng(2).normal(size=(len(SKEWED), 5)) * 3
    rows = torch.from_numpy(logits).log_softmax(1)
    losses = -rows[torch.arange(len(SKEWED)), torch.from_numpy(SKEWED)].numpy()
    ranks = [EpochOrder(203, size, accum, rank, world, 0, False, 1, None, weights[SKEWED]) for rank in range(world)]
    checked = 0
    for shares in zip(*(order.windows(1) for order in ranks), strict=True):
        real = [share for rank in shares for share in rank if share.weight]
        means = [np.average(losses[s.indices], weights=weights[SKEWED[s.indices]]) for s in real]
        chosen = np.concatenate([share.indices for share in real])
        expected = np.average(losses[chosen], weights=weights[SKEWED[chosen]])
        assert sum(m * s.weight for m, s in zip(means, real, strict=True)) == pytest.approx(expected, rel=1e-12)
        checked += len(chosen)
    assert checked == 203


def gradients(tiny: Path, batch_size: int, accum: int, **words: Any) -> dict[str, Tensor]:
    """Gradients of the first update, from the program's own loader and loss."""
    given = {"DATA__BATCH_SIZE": batch_size, "TRAIN__ACCUM_ITER": accum, "TRAIN__CLASS_WEIGHTS": "balanced", **words}
    ready = build(tiny, **given)
    accumulate(ready.parts, next(windows(ready)), 1)
    return {name: p.grad.clone() for name, p in ready.parts.model.named_parameters() if p.grad is not None}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Weights that differ more than those of the digits."""
    weights = np.array([0.25 + digit**2 for digit in range(10)])
    monkeypatch.setattr("engine.task.other_losses.class_weights", lambda *_: weights)
    return torch.from_numpy(weights)


def test_gradient_equals_torch_in_fp64(tiny: Path, table: Tensor) -> None:
    ours = gradients(tiny, 32, 1)
    ready = build(tiny, DATA__BATCH_SIZE=32)
    ((_, first),) = next(windows(ready))
    model = ready.parts.model.double()
    F.cross_entropy(model((first.images.double() / 255 - 0.5) / 0.5), first.labels, table).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(ours[name].double(), weight.grad, atol=1e-5), name


@pytest.mark.parametrize("mode", ["batch", "elem"])
def test_mixed_images_of_several_micro_batches_count_by_their_mixed_weights(
    tiny: Path, table: Tensor, mode: str
) -> None:
    """Loss and gradient of an update, and the epoch's loss so far, are torch's of all its mixed images at once."""
    words = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__MIXUP_MODE": mode, "TRAIN__CLASS_WEIGHTS": "balanced"}
    ready = build(tiny, DATA__BATCH_SIZE=8, TRAIN__ACCUM_ITER=4, TRAIN__SMOOTHING=0.1, **words)
    parts, change, seen = ready.parts, ready.parts.change, []
    parts.change = lambda images, labels: seen.append(change(images, labels)) or seen[-1]
    every = []
    for update, window in zip((1, 2), windows(ready), strict=False):
        seen.clear()
        parts.optimizer.zero_grad()
        accumulate(parts, window, update)
        parts.meters.close_update(update, torch.ones(()), True, False)
        reading = parts.meters.read(torch.ones(()), 0.1)
        model = copy.deepcopy(parts.model).double()
        model.zero_grad()
        images, targets = (torch.cat([getattr(one, name) for one in seen]).double() for name in ("images", "targets"))
        total = F.cross_entropy(model(images), targets, table, label_smoothing=0.1, reduction="sum")
        every.append((float(total.detach()), float((targets * table).sum())))
        (total / every[-1][1]).backward()
        assert reading.update.loss == pytest.approx(every[-1][0] / every[-1][1], rel=1e-5)
        for (name, weight), other in zip(parts.model.named_parameters(), model.parameters(), strict=True):
            assert weight.grad is not None
            assert other.grad is not None
            assert torch.allclose(weight.grad.double(), other.grad, atol=1e-5), name
    losses, counts = zip(*every, strict=True)
    reading = parts.meters.read(torch.ones(()), 0.1)
    assert reading.epoch.loss == pytest.approx(sum(losses) / sum(counts), rel=1e-5)


def test_balanced_weights_make_all_classes_count_equally() -> None:
    weights = class_weights("balanced", 6, SKEWED, "made")
    counts = np.bincount(SKEWED, minlength=6)
    assert weights[5] == 1, "a class without images"
    assert np.allclose((weights * counts)[:5], 203 / 5)


def test_stream_without_labels_is_refused() -> None:
    with pytest.raises(UserError, match=r"TRAIN.CLASS_WEIGHTS: the data set far is read as a stream"):
        class_weights("balanced", 6, None, "far")
