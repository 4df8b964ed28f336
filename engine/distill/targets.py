"""Distillation as in DeiT: the model learns from the labels, and from what a teacher says of the same images.

The teacher answers where images are erased and mixed, so that it sees exactly what the model sees. Its answer travels
with the labels: targets are then two rows an image, the labels' and the teacher's, as a model with two classifiers
gives two rows of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.distill.teacher import Teacher, load_teacher
from engine.inputs.mixup import BatchChange, Seen
from engine.measure.stage_times import FORWARD, TEACHER, Stages
from engine.speed.replace_forward import mix_in
from utils.config import Config
from utils.config.train import TrainConfig


class DistillationLoss(nn.Module):
    """(1 - alpha) x the labels' loss + alpha x the teacher's.

    Of two classifiers the first learns the labels and the second the teacher; a single one learns both.
    """

    def __init__(self, of_labels: nn.Module, train: TrainConfig) -> None:
        super().__init__()
        self.of_labels = of_labels
        self.hard = train.DISTILLATION_TYPE == "hard"
        self.alpha, self.tau = train.DISTILLATION_ALPHA, train.DISTILLATION_TAU

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        by_labels, by_teacher = logits.unbind(1) if logits.ndim == 3 else (logits, logits)
        if targets.ndim < 3:  # labels alone: nobody was asked
            return self.of_labels(by_labels, targets)
        weights, answer = targets.unbind(1)
        taught = self._of_teacher(by_teacher, answer)
        return (1 - self.alpha) * self.of_labels(by_labels, weights) + self.alpha * taught

    def _of_teacher(self, logits: Tensor, answer: Tensor) -> Tensor:
        if self.hard:
            return F.cross_entropy(logits, answer.argmax(1))
        own, theirs = F.log_softmax(logits / self.tau, 1), F.log_softmax(answer / self.tau, 1)
        # Dividing by the temperature makes gradients smaller by its square.
        return F.kl_div(own, theirs, reduction="batchmean", log_target=True) * self.tau**2


class Teaching:
    """A `BatchChange` that asks the teacher of what came out."""

    def __init__(self, teacher: Teacher, change: BatchChange, device: torch.device, stages: Stages) -> None:
        self.teacher, self._change, self._stages = teacher, change, stages
        self._classes = torch.arange(teacher.origin.classes, device=device)

    def __call__(self, images: Tensor, labels: Tensor) -> Seen:
        seen = self._change(images, labels)
        self._stages.lap(FORWARD)
        answer = self.teacher(seen.images)
        self._stages.lap(TEACHER)
        weights = seen.targets
        if weights.ndim == 1:
            weights = (weights.unsqueeze(1) == self._classes).to(answer.dtype)
        return seen._replace(targets=torch.stack((weights, answer), dim=1))


class StackedHeads(nn.Module):
    """A model whose two classifiers answer side by side in training: one tensor, as everybody else expects."""

    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        return torch.stack(found, dim=1) if isinstance(found, tuple) else found


def distil(
    config: Config, model: nn.Module, precision: Precision, stages: Stages, change: BatchChange
) -> tuple[BatchChange, nn.Module]:
    """What is done to a batch, and the loss: with a teacher where TRAIN.DISTILLATION_TYPE wants one.

    Before anything is copied from the model or wrapped around it: both its classifiers are to learn, if it has two.
    """
    of_labels = nn.CrossEntropyLoss(label_smoothing=config.TRAIN.SMOOTHING)
    if config.TRAIN.DISTILLATION_TYPE is None:
        return change, of_labels
    if hasattr(model, "set_distilled_training"):  # timm's name for it; in validation they go on to answer together
        model.set_distilled_training(True)  # pyright: ignore[reportCallIssue]
        mix_in(model, StackedHeads)
    teacher = load_teacher(config, precision)
    return Teaching(teacher, change, precision.device, stages), DistillationLoss(of_labels, config.TRAIN)


def teacher_of(change: BatchChange) -> Teacher | None:
    return change.teacher if isinstance(change, Teaching) else None
