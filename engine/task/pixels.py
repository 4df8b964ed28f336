"""No labels (MODEL.MAE_PRETRAIN): the model paints in masked patches. It returns its loss per image itself."""

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
    """Mean squared error, and how much of the variance inside the masked patches is explained, in percent."""

    shown = (("explained", "Explained variance", "explained"),)
    mean_words = "Explained"
    explained: float


class MeanOverImages(nn.Module):
    """The loss of a batch: column 0 of what the model returns. There are no targets."""

    def forward(self, of_images: Tensor, _targets: Tensor) -> Tensor:
        return of_images[:, 0].mean()


class NoLabels(Task):
    kind = NO_LABELS
    mixes = False

    def words(self) -> str:
        return "no labels"

    def loss(self, train: TrainConfig, weights: Tensor | None) -> nn.Module:
        return MeanOverImages()

    def example(self, size: int, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        error, variance = logits.to(sum_type).sum(0)
        return error, variance

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> PixelMeans:
        error, variance = counts
        return PixelMeans(loss, explained(error, variance))

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _Errors(samples, device)


class _Errors(Tally):
    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples = samples
        self._sums = torch.zeros(3, dtype=sum_type_of(device), device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        real = batch.indices >= 0  # False for samples that only pad the batch
        of_images = logits.to(self._sums.dtype).where(real[:, None], 0.0)
        self._sums += torch.cat((of_images.sum(0), real.sum()[None]))

    def metrics(self, world: World) -> PixelMeans:
        error, variance, counted = sum_over_ranks(self._sums, world).tolist()
        check_count(counted, self._samples)
        return PixelMeans(error / self._samples, explained(error, variance))


def explained(error: float, variance: float) -> float:
    """Percent of the variance; 0 is what predicting each patch's mean would give."""
    return 100 * (1 - error / variance) if variance else 0.0
