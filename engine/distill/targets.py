"""Distillation as in DeiT: the model learns from the labels, and from a teacher's output for the same images.

The teacher gets the images after erasing and mixing, exactly as the model does. Its logits travel with the labels:
targets then have two rows per image, the label's and the teacher's, as a model with two classifiers has two rows of
logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ability import Ability
from engine.amp.precision import Precision
from engine.distill.teacher import Teacher, load_teacher
from engine.inputs.mixup import BatchTransform, TransformedBatch
from engine.measure.stage_times import FORWARD, TEACHER, Stages
from engine.speed.replace_forward import mix_in
from utils.config import Config
from utils.config.train import TrainConfig


class DistillationLoss(nn.Module):
    """(1 - alpha) x the loss for the labels + alpha x the loss for the teacher's logits.

    Of two classifiers, the first learns the labels and the second the teacher's logits; a single one learns both.
    """

    def __init__(self, label_loss: nn.Module, train: TrainConfig) -> None:
        super().__init__()
        self.label_loss = label_loss
        self.hard = train.DISTILLATION_TYPE == "hard"
        self.alpha, self.tau = train.DISTILLATION_ALPHA, train.DISTILLATION_TAU

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        label_logits, distilled_logits = logits.unbind(1) if logits.ndim == 3 else (logits, logits)
        if targets.ndim < 3:  # labels alone: the teacher was not asked
            return self.label_loss(label_logits, targets)
        labels, teacher_logits = targets.unbind(1)
        teacher_loss = self._teacher_loss(distilled_logits, teacher_logits)
        return (1 - self.alpha) * self.label_loss(label_logits, labels) + self.alpha * teacher_loss

    def _teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        if self.hard:
            return F.cross_entropy(logits, teacher_logits.argmax(1))
        student, teacher = F.log_softmax(logits / self.tau, 1), F.log_softmax(teacher_logits / self.tau, 1)
        # The factor tau**2 makes up for the temperature, which divides gradients by its square.
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.tau**2


class AskTeacher:
    """A `BatchTransform` that adds the teacher's logits for the transformed images to the targets."""

    def __init__(self, teacher: Teacher, change: BatchTransform, device: torch.device, stages: Stages) -> None:
        self.teacher, self._change, self._stages = teacher, change, stages
        self._classes = torch.arange(teacher.source.classes, device=device)

    def __call__(self, images: Tensor, labels: Tensor) -> TransformedBatch:
        seen = self._change(images, labels)
        self._stages.lap(FORWARD)
        teacher_logits = self.teacher(seen.images)
        self._stages.lap(TEACHER)
        targets = seen.targets
        if targets.ndim == 1:
            targets = (targets.unsqueeze(1) == self._classes).to(teacher_logits.dtype)  # one-hot
        return seen._replace(targets=torch.stack((targets, teacher_logits), dim=1))


class StackedHeads(nn.Module):
    """Mixin for a model with two classifiers: in training, stacks their logits into one tensor."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return torch.stack(logits, dim=1) if isinstance(logits, tuple) else logits


class Distillation(Ability):
    """TRAIN.DISTILLATION_TYPE: the model learns from a teacher too. `change` and `criterion` replace those given."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        precision: Precision,
        stages: Stages,
        change: BatchTransform,
        criterion: nn.Module,
    ) -> None:
        if hasattr(model, "set_distilled_training"):  # timm's; in validation, the mean of both is returned as before
            model.set_distilled_training(True)  # pyright: ignore[reportCallIssue]
            mix_in(model, StackedHeads)
        self.teacher = load_teacher(config, precision)
        self.change = AskTeacher(self.teacher, change, precision.device, stages)
        self.criterion = DistillationLoss(criterion, config.TRAIN)

    def rows(self) -> dict[str, str]:
        return {"teacher": self.teacher.words()}

    def noted(self) -> dict[str, str]:
        return self.teacher.noted()

    def holds(self) -> dict[str, list[Tensor]]:
        return {"teacher": list(self.teacher.model.state_dict().values())}
