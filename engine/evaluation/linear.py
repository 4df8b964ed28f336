"""Linear classifiers of kept features: logistic regression, whose strength folds of the training images choose.

All folds and all images together are fitted at once, since they read the same features; a strength begins at the
solution of the stronger one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import ImageDataset, open_dataset, source_of
from datasets.sources.folds import split_rows
from engine.evaluation.features import AT_ONCE, extractor_of, features_of
from engine.machine.device import Run
from engine.task.several import MOST_NAMED, scores_of
from models.parts import classifiers
from utils.config.data import DataConfig
from utils.distributed.world import broadcast
from utils.errors import UserError
from utils.log import log
from utils.text import counted
from vitamp.pooling import pool_of

if TYPE_CHECKING:
    from engine.setup import Ready

STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(13))
"""Of weight decay, from 10 to 1e-5: the mean loss gets half of it times the squared weights"""
STALE = 3
"""Strengths without a better result after which weaker ones are not tried"""
ITERATIONS, MEMORY = 300, 10
"""Of L-BFGS for a strength"""
KEPT = 1 << 30
"""Bytes of standardised features that are held in memory; more are read anew in each iteration"""


FOLDS = 5


def folds_of(dataset: ImageDataset, labels: np.ndarray, data: DataConfig) -> tuple[np.ndarray, str]:
    """The fold of each image of a training split, as DATA.FOLD would make them, and a line about it.

    Groups (DATA.GROUP) stay together.
    """
    samples, fold_of = dataset.single_images(), np.zeros(len(labels), dtype=np.int64)
    groups = None if samples is None else samples.groups
    for number in range(FOLDS):
        of_fold = data.model_copy(update={"FOLD": f"{number + 1}/{FOLDS}"})
        fold_of[split_rows(labels, of_fold, "val", source_of(data), lambda: groups or ())] = number
    counts = labels.sum(0).astype(np.int64) if labels.ndim == 2 else np.bincount(labels)
    words = f"{FOLDS} folds of the training images choose strength and pooling"
    if len(few := np.flatnonzero((counts > 0) & (counts < FOLDS))):
        named = ", ".join(str((dataset.classes or range(len(counts)))[label]) for label in few[:MOST_NAMED])
        words += f"; fewer images than folds: {counted(len(few), 'class')} ({named}{', ...' * (len(few) > MOST_NAMED)})"
    return fold_of, f"{words}."


class Classifier(NamedTuple):
    """For features as they are, not standardised."""

    weight: Tensor
    """Classes x columns, float64"""
    bias: Tensor
    strength: float
    figure: float
    """Top-1, or mAP with several labels, of images that the classifier of their fold was not fitted to, in percent"""

    def logits(self, features: np.ndarray) -> Tensor:
        rows = [torch.from_numpy(np.array(features[first : first + AT_ONCE])) for first in _starts(features)]
        return torch.cat([part.double() @ self.weight.cpu().T + self.bias.cpu() for part in rows])


def fit(
    features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, classes: int, device: torch.device
) -> Classifier:
    """The classifier of the strength that is best for folds. `fold_of`: the fold of each image."""
    problem = _Problem(features, labels, fold_of, classes, device)
    weights = torch.zeros(problem.width + 1, problem.count * classes, dtype=problem.exact, device=device)
    best, since = None, 0
    for strength in STRENGTHS:
        problem.minimise(weights, strength)
        logits = problem.of_other_folds(weights)
        if labels.ndim == 2:
            figure = scores_of(logits.double().sigmoid().numpy(), labels > 0).map
        else:
            figure = float((logits.argmax(1).numpy() == labels).mean())
        since += 1
        if best is None or figure > best[0]:
            best, since = (figure, strength, weights[:, -classes:].clone()), 0
        if since == STALE:
            break
    assert best is not None
    figure, strength, standardised = best
    weight = standardised[:-1] / problem.deviation[:, None]
    bias = standardised[-1] - problem.mean @ weight
    return Classifier(weight.T.contiguous(), bias, strength, 100 * figure)


class _Problem:
    """Each fold is left out by one classifier; the last one is fitted to all images."""

    def __init__(
        self, features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, classes: int, device: torch.device
    ) -> None:
        self.features, self.classes, self.device = features, classes, device
        self.exact = torch.float32 if device.type == "mps" else torch.float64
        self.width, self.count = features.shape[1], int(fold_of.max()) + 2
        self.labels = torch.from_numpy(labels).to(device)
        self.fold_of = torch.from_numpy(fold_of).to(device)
        others = self.fold_of[:, None] != torch.arange(self.count, device=device)
        self.share = (others / others.sum(0)).float()
        """Of each image (rows) in the mean loss of each classifier"""
        sums = torch.zeros(2, self.width, dtype=self.exact, device=device)
        for first in _starts(features):
            rows = self._read(first).to(self.exact)
            sums += torch.stack((rows.sum(0), rows.square().sum(0)))
        self.mean, squares = sums / len(features)
        self.deviation = (squares - self.mean.square()).clamp(min=0).sqrt()
        self.deviation[self.deviation < 1e-6 * self.deviation.max()] = 1  # a column without information
        self.kept = [*self._standardised()] if features.nbytes // features.shape[1] * self.width <= KEPT else None

    def _read(self, first: int) -> Tensor:
        return torch.from_numpy(np.array(self.features[first : first + AT_ONCE])).to(self.device)

    def _standardised(self) -> Iterator[Tensor]:
        mean, factor = self.mean.float(), (1 / self.deviation).float()
        for first in _starts(self.features):
            yield (self._read(first) - mean) * factor

    def _logits(self, weights: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Images, their standardised features, and the logits of each classifier (images x classifiers x classes)."""
        single, first = weights.float(), 0
        for rows in self.kept or self._standardised():
            here = slice(first, first := first + len(rows))
            logits = torch.addmm(single[-1], rows, single[:-1])
            yield here, rows, logits.view(len(rows), self.count, self.classes)

    def minimise(self, weights: Tensor, strength: float) -> None:
        """Minimise the mean loss with weight decay, from `weights` on, in place."""
        weights.requires_grad_(True)
        steps = torch.optim.LBFGS(
            [weights], max_iter=ITERATIONS, history_size=MEMORY, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            with torch.no_grad():
                value, gradient = self._loss(weights.detach())
                decayed = weights[:-1]
                value = value + strength / 2 * decayed.square().sum()
                gradient[:-1] += strength * decayed
                weights.grad = gradient
                return value

        steps.step(loss)  # pyright: ignore[reportArgumentType]
        weights.requires_grad_(False)
        weights.grad = None

    def _loss(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the classifiers' mean losses, and its gradient."""
        total = torch.zeros((), dtype=self.exact, device=self.device)
        gradient = torch.zeros_like(weights)
        for here, rows, logits in self._logits(weights):
            labels, share = self.labels[here], self.share[here]
            if labels.ndim == 2:
                truth = labels[:, None].expand_as(logits)
                losses = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(2)
                errors = logits.sigmoid() - truth
            else:
                logs = logits.log_softmax(2)
                losses = -logs.gather(2, labels[:, None, None].expand(-1, self.count, 1))[:, :, 0]
                errors = logs.exp() - F.one_hot(labels, self.classes)[:, None]
            total += (losses * share).sum()
            errors = (errors * share[:, :, None]).flatten(1)
            gradient[:-1] += rows.T @ errors
            gradient[-1] += errors.sum(0)
        return total, gradient

    def of_other_folds(self, weights: Tensor) -> Tensor:
        """Logits of each image by the classifier that was fitted without its fold."""
        found = [logits[torch.arange(len(rows)), self.fold_of[here]] for here, rows, logits in self._logits(weights)]
        return torch.cat(found).cpu()


def _starts(features: np.ndarray) -> range:
    return range(0, len(features), AT_ONCE)


def start_at_probe(run: Run, ready: Ready) -> None:
    """Give the model a classifier that is fitted to the features of the training images (MODEL.NEW_CLASSIFIER probe).

    A collective call.
    """
    config, world, model, device = run.config, run.world, ready.model, run.device
    classes = int(config.MODEL.NUM_CLASSES)
    heads: list[Any] = [model.get_submodule(name) for name in classifiers(model)]
    if not heads or any(getattr(head, "bias", None) is None for head in heads):
        raise UserError(
            f"MODEL.NEW_CLASSIFIER probe: the classifier of this {type(model).__name__} is unknown, or has no bias; "
            "use true or zero."
        )
    data = config.DATA.model_copy(update={"PART": "train"})
    bank = open_dataset(data, False, classes, config.SEED, device)
    known = features_of(extractor_of(run, ready), bank, data, classes, "Linear probe: training split")
    found = None
    if world.first:
        fold_of, words = folds_of(bank, known.labels, data)
        found = fit(known.of(pool_of(model)), known.labels, fold_of, classes, device)
        by, figure = ready.task.kind.best.words, f"{found.figure:.2f} %"
        log.info("%s The new classifier has strength %.2g: %s %s in folds.", words, found.strength, by, figure)
    found = broadcast(found, world)
    with torch.no_grad():
        for head in heads:  # the two of a distilled model have the mean of their logits
            head.weight.copy_(found.weight.view_as(head.weight))
            head.bias.copy_(found.bias)
