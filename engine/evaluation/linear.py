"""Fits linear classifiers to kept features (linear probes): logistic regression.

The strength of its weight decay is chosen by cross-validation on the training images.
"""

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
"""Strengths of weight decay that are tried, from 10 to 1e-5: half of it times the squared weights is added to the mean
loss"""
STALE = 3
"""Strengths without a better result after which weaker ones are not tried"""
ITERATIONS = 100
"""Most iterations of L-BFGS per strength"""
TURNED = 1 << 26
"""Most numbers that features may have to be held in memory as the fit needs them: 256 MiB"""
UNWEIGHTED = "In the fit, all images weigh alike: TRAIN.CLASS_WEIGHTS and DATA.SAMPLER have no part in it"


def folds_of(
    dataset: ImageDataset, labels: np.ndarray, data: DataConfig, rows: np.ndarray | None = None
) -> tuple[np.ndarray, str]:
    """Divide the images of a training split into folds, as DATA.FOLD and DATA.GROUP do.

    `rows`: the images to divide, whose `labels` are given; None: all. Returns the fold of each image, and a sentence
    for the log.
    """
    groups = dataset.groups()
    if rows is not None and groups:
        groups = [groups[row] for row in rows]
    folds = min(FOLDS, len(set(groups) or labels))
    if folds < 2:
        raise UserError(f"{source_of(data)}: a probe needs two images or groups; MODEL.NEW_CLASSIFIER=zero needs none.")
    fold_of = np.zeros(len(labels), dtype=np.int64)
    for fold in range(folds):
        data_of_fold = data.changed(FOLD=f"{fold + 1}/{folds}")
        fold_of[split_rows(labels, data_of_fold, "val", source_of(data), groups)] = fold
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
    """Features, labels and folds of all images, which iteration yields in chunks, on the device.

    The fit does not use the features' own columns but directions in which, once they are scaled for a strength, the
    loss is curved nearly alike: then L-BFGS needs few steps. They are the principal components of the standardised
    features.
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
        # A nearly dead column would get huge weights, so no deviation counts as less than 0.001 of the largest.
        deviation = deviation.clamp(min=1e-3 * float(deviation.max()) or 1.0)
        curves, directions = torch.linalg.eigh((products / deviation.outer(deviation)).cpu())
        # With fewer images than columns, only as many directions have any variance. The loss is curved by at most a
        # quarter of it.
        self.curves = curves[-count:].clamp(min=0).to(device) / 4
        self._directions = directions[:, -count:].to(device) / deviation[:, None]
        # If there is memory, the features are turned into these directions once. Otherwise, the weights are turned into
        # those of the features at each step.
        self._turned = count * len(self.curves) <= TURNED
        if self._turned:
            self._parts[0] = [((rows - self._mean) @ self._directions).float() for rows, _, _ in self]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield features, labels and folds of a chunk of images after the other."""
        for chunk in zip(*self._parts, strict=True):
            yield tuple(part.to(self.device) for part in chunk)

    def weights_for_iteration(self, weights: Tensor) -> Tensor:
        """Turn weights of the directions into weights of what iteration yields. The last row is the bias."""
        return weights if self._turned else self.weights_of_features(weights)

    def weights_of_features(self, weights: Tensor) -> Tensor:
        """Turn weights of the directions into weights of the features themselves. The last row is the bias."""
        weight = self._directions @ weights[:-1]
        return torch.cat((weight, weights[-1:] - self._mean @ weight))


class _Models:
    """Classifiers that are fitted at once: one per fold, which leaves out its images, and a last one of all images.

    Their weights are one matrix: columns of the features (and a row of biases) x models and classes.
    """

    def __init__(self, rows: _Rows, fold_of: np.ndarray, classes: int) -> None:
        self.rows = rows
        self.number = int(fold_of.max()) + 2
        self.width = self.number * classes
        images_of_model = len(fold_of) - np.bincount(fold_of, minlength=self.number)
        self._weight_of_image = torch.tensor(1 / images_of_model, dtype=torch.float32, device=rows.device)

    def _logits(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return logits of a chunk of images: images x models x classes."""
        outputs = torch.addmm(weights[-1].float(), rows, weights[:-1].float())
        return outputs.view(-1, self.number, self.width // self.number)

    def loss(self, scaled: Tensor, scale: Tensor, strength: float) -> Tensor:
        """Return the sum of the models' losses, with weight decay, and set the gradient of the `scaled` weights.

        `scale`: L-BFGS sees the weights multiplied by it.
        """
        scaled.grad = None
        weights = scaled / scale
        weights_in_use = self.rows.weights_for_iteration(weights)
        # The chunks' gradients are summed in a leaf, so that the graph of each chunk is freed at once.
        leaf = weights_in_use.detach().requires_grad_(True)
        total = strength / 2 * weights[:-1].square().sum()
        for rows, truth, folds in self.rows:
            outputs = self._logits(rows, leaf)
            if truth.ndim == 2:
                targets = truth[:, None].expand_as(outputs)
                losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(2)
            else:
                targets = truth[:, None].expand(-1, self.number)
                losses = F.cross_entropy(outputs.movedim(2, 1), targets, reduction="none")
            is_fitted = folds[:, None] != torch.arange(self.number, device=self.rows.device)
            chunk_loss = (losses * self._weight_of_image * is_fitted).sum()
            chunk_loss.backward()
            total = total + chunk_loss.detach()
        torch.autograd.backward([total, weights_in_use], [None, leaf.grad])
        return total.detach()

    def held_out_logits(self, weights: Tensor) -> Tensor:
        """Return logits of each image by the model that left out its fold, float64 on the host."""
        weights_in_use = self.rows.weights_for_iteration(weights)
        chunks: list[Tensor] = []
        for rows, _, folds in self.rows:
            logits = self._logits(rows, weights_in_use)
            chunks.append(logits[torch.arange(len(rows)), folds].cpu())
        return torch.cat(chunks).double()


class Classifier(NamedTuple):
    """A linear classifier of features."""

    weight: Tensor
    """Classes x columns, float64"""
    bias: Tensor
    strength: float
    """The strength of weight decay that was chosen"""
    figure: float
    """Top-1, or mAP with several labels, of images that the classifier of their fold was not fitted to, in percent"""

    def logits(self, features: np.ndarray) -> Tensor:
        """Return logits of images x classes, float64."""
        chunks = torch.from_numpy(features).split(AT_ONCE)
        return torch.cat([chunk.double() @ self.weight.T + self.bias for chunk in chunks])


def fit(
    features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, classes: int, device: torch.device
) -> tuple[Classifier, np.ndarray]:
    """Fit a classifier to the features of all images, with the strength of weight decay that is best on folds.

    `fold_of`: the fold of each image. Returns the classifier, and held-out logits of all images: each image's by the
    classifier that was fitted to the other folds.

    Features are standardised. The classifiers of all folds and of all images are fitted at once, since they read the
    same features. Each strength begins at the solution of the stronger one before it.
    """
    rows = _Rows(features, labels, fold_of, device)
    models = _Models(rows, fold_of, classes)
    weights = torch.zeros(len(rows.curves) + 1, models.width, dtype=rows.exact, device=device)
    best: tuple[float, float, Tensor, Tensor] | None = None
    stale = 0
    log.info("Fitting linear classifiers to the features of %s ...", counted(len(features), "image"), extra=DETAIL)
    for strength in Progress(STRENGTHS, len(STRENGTHS), "strengths", "linear classifier"):
        # In weights multiplied by this, the loss is curved nearly alike in all directions; the bias (last row) is not
        # scaled.
        scale = torch.cat(((rows.curves + strength).sqrt(), rows.curves.new_ones(1)))[:, None]
        scaled = (weights * scale).requires_grad_(True)
        # The history, as long as scikit-learn's, takes 20 times the memory of all classifiers.
        steps = LBFGS([scaled], 1, ITERATIONS, tolerance_grad=1e-4, history_size=10, line_search_fn="strong_wolfe")
        steps.step(partial(models.loss, scaled, scale, strength))
        with torch.no_grad():
            weights = scaled / scale
            logits = models.held_out_logits(weights)
        if labels.ndim == 2:
            figure = scores_of(logits.sigmoid().numpy(), labels > 0).map
        else:
            figure = float((logits.argmax(1).numpy() == labels).mean())
        stale += 1
        if best is None or figure > best[0]:
            of_all_images = weights[:, -classes:]
            best = figure, strength, of_all_images, logits
            stale = 0
        if stale == STALE:
            break
    assert best is not None
    figure, strength, of_all_images, logits = best
    final = rows.weights_of_features(of_all_images).cpu().double()
    weight = final[:-1].T.contiguous()
    bias = final[-1].contiguous()
    return Classifier(weight, bias, strength, 100 * figure), logits.numpy()
