"""TRAIN.LOSS bce: timm's binary cross-entropy, and the same in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.loss.binary_cross_entropy import BinaryCrossEntropy as TimmsBce
from torch import Tensor, nn

from engine.distill.teacher import DistillationLoss
from engine.inputs.mixing import Mixing
from engine.task.one import OneLabel
from utils.config import TrainConfig
from utils.seeding import seed_all

POSITIVE = torch.tensor([0.2, 1.0, 3.0, 0.7, 2.5])


def batch(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=generator) * 3, torch.randint(5, (count,), generator=generator)


def value_and_gradient(loss: nn.Module, logits: Tensor, targets: Tensor) -> tuple[float, Tensor]:
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


@pytest.mark.parametrize("weights", [None, POSITIVE])
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
