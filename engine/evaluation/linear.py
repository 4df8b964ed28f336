"""Linear classifiers of kept features: logistic regression, whose strength folds of the training images choose."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import LBFGS

from datasets import ImageDataset, source_of
from datasets.sources.split import split_rows
from engine.evaluation.features import AT_ONCE
from engine.task.several import MOST_NAMED, scores_of
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import DETAIL, log
from utils.progress import Progress
from utils.text import counted

FOLDS = 5
STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(13))
"""Of weight decay, from 10 to 1e-5: half of it times the squared weights is added to the mean loss"""
STALE = 3
"""Strengths without a better result after which weaker ones are not tried"""
ITERATIONS = 100
"""Of L-BFGS for a strength"""
TURNED = 1 << 26
"""Numbers: features of fewer are held in memory as the fit needs them, 256 MiB"""
UNWEIGHTED = "In the fit, all images weigh alike: TRAIN.CLASS_WEIGHTS and DATA.SAMPLER have no part in it"


def folds_of(
    dataset: ImageDataset, labels: np.ndarray, data: DataConfig, rows: np.ndarray | None = None
) -> tuple[np.ndarray, str]:
    """The fold of each image of a training split, as DATA.FOLD and DATA.GROUP make them, and a line about it.

    `rows`: of these images alone, with these labels.
    """
    groups = dataset.groups()
    if rows is not None and groups:
        groups = [groups[row] for row in rows]
    folds = min(FOLDS, len(set(groups) or labels))
    if folds < 2:
        raise UserError(f"{source_of(data)}: a probe needs two images or groups; MODEL.NEW_CLASSIFIER=zero needs none.")
    fold_of = np.zeros(len(labels), dtype=np.int64)
    for number in range(folds):
        of_fold = data.changed(FOLD=f"{number + 1}/{folds}")
        fold_of[split_rows(labels, of_fold, "val", source_of(data), groups)] = number
    counts = labels.sum(0).astype(np.int64) if labels.ndim == 2 else np.bincount(labels)
    words = f"{folds} folds of the training images choose the strength"
    few = np.flatnonzero((counts > 0) & (counts < folds))
    if len(few):
        classes = dataset.classes or range(len(counts))
        names = [str(classes[label]) for label in few[:MOST_NAMED]]
        if len(few) > MOST_NAMED:
            names.append("...")
        words += f"; fewer images than folds have {counted(len(few), 'class')}: {', '.join(names)}"
    return fold_of, f"{words}."


class _Rows:
    """Features, labels and folds of some images after others, on the device.

    Features are fitted in directions in which the loss is curved nearly alike, once they are scaled for a strength:
    then L-BFGS needs few steps.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.exact = torch.float32 if device.type == "mps" else torch.float64
        self._parts = [torch.from_numpy(array).split(AT_ONCE) for array in (features, labels, fold_of)]
        count, width = features.shape
        self._mean = torch.stack([rows.sum(0, dtype=self.exact) for rows, _, _ in self]).sum(0) / count
        products = torch.zeros(width, width, dtype=self.exact, device=device)
        for rows, _, _ in self:
            centred = rows.to(self.exact) - self._mean
            products += centred.T @ centred / count
        deviation = products.diagonal().sqrt()
        deviation = deviation.clamp(
            min=1e-3 * float(deviation.max()) or 1.0
        )  # else nearly dead columns get huge weights
        curves, directions = torch.linalg.eigh((products / deviation.outer(deviation)).cpu())
        # With fewer images than columns, the other curves are 0.
        self.curves = curves[-count:].clamp(min=0).to(device) / 4
        self._directions = directions[:, -count:].to(device) / deviation[:, None]
        self._turned = count * len(self.curves) <= TURNED  # once, in place of the weights for each step
        if self._turned:
            self._parts[0] = [((rows - self._mean) @ self._directions).float() for rows, _, _ in self]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for chunk in zip(*self._parts, strict=True):
            yield tuple(part.to(self.device) for part in chunk)

    def of_rows(self, found: Tensor) -> Tensor:
        """Weights of the directions, and the bias, as those of the features that it iterates over."""
        return found if self._turned else self.of_features(found)

    def of_features(self, found: Tensor) -> Tensor:
        weight = self._directions @ found[:-1]
        return torch.cat((weight, found[-1:] - self._mean @ weight))


class _Models:
    """Classifiers of which each leaves out a fold, the last one none."""

    def __init__(self, rows: _Rows, fold_of: np.ndarray, classes: int) -> None:
        self.rows = rows
        self.number = int(fold_of.max()) + 2
        self.width = self.number * classes
        shares = 1 / (len(fold_of) - np.bincount(fold_of, minlength=self.number))
        self._share = torch.tensor(shares, dtype=torch.float32, device=rows.device)

    def _logits(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Images x models x classes."""
        outputs = torch.addmm(weights[-1].float(), rows, weights[:-1].float())
        return outputs.view(-1, self.number, self.width // self.number)

    def loss(self, weights: Tensor, scale: Tensor, strength: float) -> Tensor:
        weights.grad = None
        found = weights / scale
        seen = self.rows.of_rows(found)
        leaf = seen.detach().requires_grad_(True)
        total = strength / 2 * found[:-1].square().sum()
        for rows, truth, folds in self.rows:
            outputs = self._logits(rows, leaf)
            if truth.ndim == 2:
                wanted = truth[:, None].expand_as(outputs)
                of = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").sum(2)
            else:
                wanted = truth[:, None].expand(-1, self.number)
                of = F.cross_entropy(outputs.movedim(2, 1), wanted, reduction="none")
            seen_by = folds[:, None] != torch.arange(self.number, device=self.rows.device)
            part = (of * self._share * seen_by).sum()
            part.backward()
            total = total + part.detach()
        torch.autograd.backward([total, seen], [None, leaf.grad])
        return total.detach()

    def logits_of_other(self, found: Tensor) -> Tensor:
        """Of each image, by the model that left out its fold."""
        seen = self.rows.of_rows(found)
        of_other = [self._logits(rows, seen)[torch.arange(len(rows)), folds].cpu() for rows, _, folds in self.rows]
        return torch.cat(of_other).double()


class Classifier(NamedTuple):
    weight: Tensor
    """Classes x columns, float64"""
    bias: Tensor
    strength: float
    figure: float
    """Top-1, or mAP with several labels, of images that the classifier of their fold was not fitted to, in percent"""

    def logits(self, features: np.ndarray) -> Tensor:
        parts = torch.from_numpy(features).split(AT_ONCE)
        return torch.cat([part.double() @ self.weight.T + self.bias for part in parts])


def fit(
    features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, classes: int, device: torch.device
) -> tuple[Classifier, np.ndarray]:
    """The classifier of the strength that is best for folds, and logits of all images by those of the other folds.

    `fold_of`: the fold of each image.

    Features are standardised. Those of all folds and of all images are fitted at once, since they read the same
    features; each strength begins at the solution of the stronger one before it.
    """
    rows = _Rows(features, labels, fold_of, device)
    models = _Models(rows, fold_of, classes)
    found = torch.zeros(len(rows.curves) + 1, models.width, dtype=rows.exact, device=device)
    best: tuple[float, float, Tensor, Tensor] | None = None
    stale = 0
    log.info("Fitting linear classifiers to the features of %s ...", counted(len(features), "image"), extra=DETAIL)
    for strength in Progress(STRENGTHS, len(STRENGTHS), "strengths", "linear classifier"):
        scale = torch.cat(((rows.curves + strength).sqrt(), rows.curves.new_ones(1)))[:, None]
        weights = (found * scale).requires_grad_(True)
        # The history, as long as scikit-learn's, takes 20 times the memory of all classifiers.
        steps = LBFGS([weights], 1, ITERATIONS, tolerance_grad=1e-4, history_size=10, line_search_fn="strong_wolfe")
        steps.step(partial(models.loss, weights, scale, strength))
        with torch.no_grad():
            found = weights / scale
            guesses = models.logits_of_other(found)
        if labels.ndim == 2:
            figure = scores_of(guesses.sigmoid().numpy(), labels > 0).map
        else:
            figure = float((guesses.argmax(1).numpy() == labels).mean())
        stale += 1
        if best is None or figure > best[0]:
            best = figure, strength, found[:, -classes:], guesses
            stale = 0
        if stale == STALE:
            break
    assert best is not None
    figure, strength, found, guesses = best
    found = rows.of_features(found).cpu().double()
    return Classifier(found[:-1].T.contiguous(), found[-1].contiguous(), strength, 100 * figure), guesses.numpy()
