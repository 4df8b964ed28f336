"""TRAIN.LOSS bce is timm's binary cross-entropy, and TRAIN.CLASS_WEIGHTS torch's weighted one of the global batch."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.loss.binary_cross_entropy import BinaryCrossEntropy as TimmsBce
from torch import Tensor, nn

from datasets import EpochOrder
from engine.distill.teacher import DistillationLoss
from engine.inputs.mixing import Mixing
from engine.task.losses import Criterion, WeightedCrossEntropy, class_weights
from engine.task.one import OneLabel
from engine.update import accumulate
from tests.engine.small import build, windows
from utils.config import TrainConfig
from utils.errors import UserError
from utils.seeding import seed_all

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7, 2.5])
SKEWED = np.random.default_rng(1).choice(5, 203, p=[0.5, 0.3, 0.1, 0.07, 0.03])


def batch(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=generator) * 3, torch.randint(5, (count,), generator=generator)


def value_and_gradient(loss: Criterion, logits: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, targets)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.double()


def exact(train: TrainConfig, weights: Tensor | None, logits: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """The definition, in fp64."""
    leaf = logits.double().requires_grad_()
    soft = targets.double() * (1 - train.SMOOTHING) + train.SMOOTHING / 5
    if train.BCE_TARGET_THRESH is not None:
        soft = (soft > train.BCE_TARGET_THRESH).double()
    positive = torch.ones(5).double() if weights is None else weights.double()
    rows = -(positive * soft * F.logsigmoid(leaf) + (1 - soft) * F.logsigmoid(-leaf))
    value = rows.mean()
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(("smoothing", "threshold"), [(0.0, None), (0.1, None), (0.1, 0.2), (0.0, 0.0)])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_and_gradient_equal_timm_and_fp64(
    mixed: bool, smoothing: float, threshold: float | None, weights: Tensor | None
) -> None:
    logits, labels = batch()
    train = TrainConfig(LOSS="bce", SMOOTHING=smoothing, BCE_TARGET_THRESH=threshold, MIXUP_ALPHA=0.8)
    ours = OneLabel(5).loss(train, weights)
    theirs = TimmsBce(smoothing, threshold, pos_weight=weights)
    one_hot = F.one_hot(labels, 5).float()
    targets = their_targets = labels
    if mixed:
        images = torch.zeros(len(labels), 1, 4, 4)
        seed_all("mixing")
        targets = Mixing(train, OneLabel(5)).mixed(images, labels).targets
        one_hot = targets
        seed_all("mixing")  # timm smooths in its mixup
        their_targets = Mixup(0.8, label_smoothing=smoothing, num_classes=5)(images.clone(), labels)[1]
    value, gradient = value_and_gradient(ours, logits, targets)
    for other, others_gradient in (
        value_and_gradient(theirs, logits, their_targets),
        exact(train, weights, logits, one_hot),
    ):
        assert value == pytest.approx(other, rel=1e-6)
        assert torch.allclose(gradient, others_gradient, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("threshold", [0, 0.95])
def test_threshold_outside_smoothed_targets_is_refused(threshold: float) -> None:
    train = TrainConfig(LOSS="bce", SMOOTHING=0.1, BCE_TARGET_THRESH=threshold)
    with pytest.raises(UserError, match=r"targets are 0\.02 and 0\.92, so all would count alike"):
        OneLabel(5).loss(train, None)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_teacher_is_added_to_it(kind: str) -> None:
    """As in DeiT, whose teacher's loss stays a cross-entropy."""
    logits, labels = batch()
    teacher = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(1))
    train = TrainConfig.model_validate(
        {"LOSS": "bce", "DISTILLATION_TYPE": kind, "DISTILLATION_ALPHA": 0.3, "BCE_TARGET_THRESH": 0}
    )
    both = torch.stack((F.one_hot(labels, 5).float(), teacher), dim=1)
    of_teacher = (
        F.cross_entropy(logits, teacher.argmax(1))
        if kind == "hard"
        else F.kl_div(logits.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    )
    expected = 0.7 * TimmsBce(0.0, 0.0)(logits, labels) + 0.3 * of_teacher
    found = DistillationLoss(OneLabel(5).loss(train, None), train)(logits, both)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_target_of_one_class_gives_the_same_as_its_label(smoothing: float) -> None:
    logits, labels = batch()
    loss = WeightedCrossEntropy(WEIGHTS, smoothing)
    assert float(loss(logits, F.one_hot(labels, 5).float())) == pytest.approx(float(loss(logits, labels)), rel=1e-6)


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


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Weights that differ more than those of the digits."""
    weights = np.array([0.25 + digit**2 for digit in range(10)])
    monkeypatch.setattr("engine.setup.class_weights", lambda *_: weights)
    return torch.from_numpy(weights)


def assert_same_gradients(ours: nn.Module, exact: nn.Module) -> None:
    for (name, weight), other in zip(ours.named_parameters(), exact.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        assert torch.allclose(weight.grad.double(), other.grad, atol=1e-5), name


def test_gradient_equals_torch_in_fp64(tiny: Path, table: Tensor) -> None:
    ours, plain = (build(tiny, DATA__BATCH_SIZE=32, TRAIN__CLASS_WEIGHTS=words) for words in ("balanced", "null"))
    accumulate(ours.parts, next(windows(ours)), 1)
    ((_, first),) = next(windows(plain))
    model = plain.parts.model.double()
    F.cross_entropy(model((first.images.double() / 255 - 0.5) / 0.5), first.labels, table).backward()
    assert_same_gradients(ours.model, model)


@pytest.mark.parametrize("mode", ["batch", "pair"])
def test_mixed_images_of_several_micro_batches_share_out_their_weights(tiny: Path, table: Tensor, mode: str) -> None:
    """Loss and gradient of an update are torch's of all its mixed images at once."""
    words = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__MIXUP_MODE": mode, "TRAIN__CLASS_WEIGHTS": "balanced"}
    ready = build(tiny, DATA__BATCH_SIZE=8, TRAIN__ACCUM_ITER=4, TRAIN__SMOOTHING=0.1, **words)
    parts, change, seen = ready.parts, ready.parts.batch_transform, []
    parts.batch_transform = lambda images, labels: seen.append(change(images, labels)) or seen[-1]
    accumulate(parts, next(windows(ready)), 1)
    parts.meters.close_update(1, torch.ones(()), True, False)
    reading = parts.meters.read(torch.ones(()), 0.1)
    model = copy.deepcopy(parts.model).double()
    model.zero_grad()
    images, targets = (torch.cat([getattr(one, name) for one in seen]).double() for name in ("images", "targets"))
    loss = F.cross_entropy(model(images), targets, table, label_smoothing=0.1, reduction="sum")
    loss = loss / (targets * table).sum()
    loss.backward()
    assert [reading.update.loss, reading.epoch.loss] == pytest.approx([loss.item()] * 2, rel=1e-5)
    assert_same_gradients(parts.model, model)


def test_balanced_weights_make_all_classes_count_equally() -> None:
    weights = class_weights(6, SKEWED)
    counts = np.bincount(SKEWED, minlength=6)
    assert weights[5] == 1, "a class without images"
    assert np.allclose((weights * counts)[:5], 203 / 5)
