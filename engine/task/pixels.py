"""The task without labels (MODEL.MAE_PRETRAIN): the model predicts masked patches, and measures its own errors.

In place of logits, it returns two numbers per image: the loss of its masked patches, and the variance of their target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from datasets import Batch
from engine.task.base import Metrics, Tally, Task, check_count, sum_type_of
from utils.config.train import TrainConfig
from utils.distributed.world import World, sum_over_ranks
from vitamp.metrics import NO_LABELS


@dataclass(frozen=True)
class PixelMeans(Metrics):
    """Mean squared error, and the percentage of the variance inside the masked patches that is explained."""

    shown = (("explained", "Explained variance", "explained"),)
    mean_words = "Explained"
    explained: float


class MeanOverImages(nn.Module):
    """The loss of a batch: the mean of its images' errors, which the model returns. There are no targets."""

    def forward(self, error_and_variance: Tensor, _targets: Tensor) -> Tensor:
        return error_and_variance[:, 0].mean()


class NoLabels(Task):
    """Images have no labels: the model learns to predict masked patches."""

    kind = NO_LABELS
    mixes = False

    def words(self) -> str:
        return "no labels"

    def loss(self, train: TrainConfig, weights: Tensor | None) -> nn.Module:
        return MeanOverImages()

    def example(self, size: int, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sum up the errors and the variances of the images: the model returns these in place of logits."""
        error, variance = logits.to(sum_type).sum(0)
        return error, variance

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> PixelMeans:
        error, variance = counts
        return PixelMeans(loss, explained(error, variance))

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _Errors(samples, device)


class _Errors(Tally):
    """Sums up errors and variances on the device."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples = samples
        # Error, variance, images.
        self._sums = torch.zeros(3, dtype=sum_type_of(device), device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        real = batch.indices >= 0  # False for samples that only pad the batch
        error_and_variance = logits.to(self._sums.dtype).where(real[:, None], 0.0)
        self._sums += torch.cat((error_and_variance.sum(0), real.sum()[None]))

    def metrics(self, world: World) -> PixelMeans:
        error, variance, counted = sum_over_ranks(self._sums, world).tolist()
        check_count(counted, self._samples)
        return PixelMeans(error / self._samples, explained(error, variance))


def explained(error: float, variance: float) -> float:
    """Return the percentage of the variance that is explained. Predicting the mean of each patch would explain 0."""
    return 100 * (1 - error / variance) if variance else 0.0
