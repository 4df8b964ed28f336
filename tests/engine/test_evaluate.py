"""Validation counts every sample once, whatever fills up the batches."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor, nn

from datasets import PADDING, Batch, validation_batches
from datasets.damage import BrokenInValidation
from engine.amp.precision import Precision
from engine.evaluation.evaluate import validate
from engine.task.one import OneLabel, ValidationMeans
from tests.engine.small import CPU, OFF
from utils.config import AmpConfig
from utils.distributed.world import ALONE
from utils.errors import TrainingError

SAMPLES = 23
IMAGES = torch.randint(0, 256, (SAMPLES, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([7, 6, 3, 4, 4, 0, 6, 5, 6, 0, 7, 2, 0, 7, 6, 8, 2, 4, 7, 2, 4, 0, 7])  # most are predicted
NO_IMAGE, NEVER_PREDICTED = {1}, {3, 5, 8}  # class 9 is neither


class Loader:
    """The validation batches of some ranks, padded as the real one pads them."""

    def __init__(self, batch_size: int, ranks: list[int], world: int) -> None:
        self.broken = BrokenInValidation()
        self.plans = [plan for rank in ranks for plan in validation_batches(SAMPLES, batch_size, rank, world)]

    def __iter__(self) -> Iterator[Batch]:
        for plan in self.plans:
            indices = torch.from_numpy(plan)
            real = indices != PADDING
            images = IMAGES[indices] * real.reshape(-1, 1, 1, 1)
            yield Batch(images, LABELS[indices] * real, indices)


class Floats(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 255 - 0.5


def model() -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    nn.init.normal_(net[1].weight)  # pyright: ignore[reportArgumentType]
    return net


def figures(net: nn.Module, loader: Loader, amp: AmpConfig = OFF, samples: int = SAMPLES) -> ValidationMeans:
    ready: Any = SimpleNamespace(val_loader=loader, val_set=range(samples), task=OneLabel(10), neighbours=None)
    ready.inputs, ready.precision = Floats(), Precision(amp, CPU)
    found = validate(ready, net, ALONE)
    assert isinstance(found, ValidationMeans)
    return found


def plain(net: nn.Module) -> ValidationMeans:
    net.eval()
    with torch.no_grad():
        logits = net(Floats()(IMAGES))
    hits = logits.topk(5).indices == LABELS.unsqueeze(1)
    five, first = hits.any(1).float().mean().item(), hits[:, 0].float().mean().item()
    guesses = logits.argmax(1)
    balanced = 100 * float(balanced_accuracy_score(LABELS, guesses))
    guessed, there = set(guesses.tolist()), set(LABELS.tolist())
    assert (guessed - there, there - guessed) == (NO_IMAGE, NEVER_PREDICTED)
    macro_f1 = 100 * float(f1_score(LABELS, guesses, average="macro", zero_division=0))  # pyright: ignore
    return ValidationMeans(F.cross_entropy(logits, LABELS).item(), 100 * first, 100 * five, balanced, macro_f1)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (4, 1), (23, 1), (64, 1), (4, 2), (5, 3), (7, 8)])
def test_padding_is_not_counted(batch_size: int, world: int) -> None:
    net = model()
    loader = Loader(batch_size, list(range(world)), world)
    assert sum(len(plan) for plan in loader.plans) >= SAMPLES
    assert figures(net, loader).fields() == pytest.approx(plain(net).fields(), rel=1e-6)


@pytest.mark.parametrize("samples", [SAMPLES - 1, SAMPLES + 1])
def test_wrong_number_of_samples_is_an_error(samples: int) -> None:
    with pytest.raises(TrainingError, match=f"{SAMPLES} samples, not {samples};"):
        figures(model(), Loader(4, [0], 1), samples=samples)
