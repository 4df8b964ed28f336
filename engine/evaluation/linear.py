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
MOST_PROJECTED = 1 << 26
"""Most numbers that the projected features of all images may have to be held in memory: 256 MiB"""
UNWEIGHTED = "In the fit, all images weigh alike: TRAIN.CLASS_WEIGHTS and DATA.SAMPLER have no part in it"


def folds_of(
    dataset: ImageDataset, labels: np.ndarray, data: DataConfig, rows: np.ndarray | None = None
) -> tuple[np.ndarray, str]:
    """Divide the images of a training split into folds, as DATA.FOLD and DATA.GROUP do.

    `rows`: indices of the images to divide, in the order of `labels`; None divides all images. Returns the fold of each
    image, and a sentence for the log.
    """
    groups = dataset.groups()
    if rows is not None and groups:
        groups = [groups[row] for row in rows]
    # A group is in one fold as a whole. Without groups, each image is by itself.
    divisible = len(set(groups)) if groups else len(labels)
    folds = min(FOLDS, divisible)
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
    """Features, labels and folds of all images. Iteration yields them in chunks of images, on the device.

    The classifier is fitted to principal components of the standardised features, not to the features' own columns:
    once each component is scaled for a strength of weight decay, the loss has nearly the same curvature along all of
    them, so that L-BFGS needs few steps.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, fold_of: np.ndarray, device: torch.device) -> None:
        """Compute the components from all features, and project the features onto them if memory allows.

        `features`: images x columns. `labels`: of each image. `fold_of`: the fold of each image.
        """
        self.device = device
        self.exact = torch.float32 if device.type == "mps" else torch.float64
        """Most precise float type of the device"""
        self._chunks_of = [torch.from_numpy(array).split(AT_ONCE) for array in (features, labels, fold_of)]

        # Mean, covariance and standard deviations of the features, from one chunk of images after the other.
        count, width = features.shape
        self._mean = torch.stack([rows.sum(0, dtype=self.exact) for rows, _, _ in self]).sum(0) / count
        covariance = torch.zeros(width, width, dtype=self.exact, device=device)
        for rows, _, _ in self:
            centred = rows.to(self.exact) - self._mean
            covariance += centred.T @ centred / count
        deviation = covariance.diagonal().sqrt()
        # A nearly dead column would get huge weights, so no deviation counts as less than 0.001 of the largest; 1 if
        # all columns are constant.
        least_deviation = 1e-3 * float(deviation.max())
        deviation = deviation.clamp(min=least_deviation or 1.0)

        # The principal components, in ascending order of their variance. With fewer images than columns, at most as
        # many components as images have any variance.
        correlation = covariance / deviation.outer(deviation)
        variances, components = torch.linalg.eigh(correlation.cpu())
        # The second derivative of the logistic loss, p (1 - p), is at most 1/4, here times the variance.
        self.curvatures = variances[-count:].clamp(min=0).to(device) / 4
        """Bound of the loss's curvature along each component"""
        self._components = components[:, -count:].to(device) / deviation[:, None]
        # With enough memory, the features are projected once. Otherwise, iteration yields the features themselves, and
        # the weights of components are converted to weights of features at each step.
        self._is_projected = count * len(self.curvatures) <= MOST_PROJECTED
        if self._is_projected:
            self._chunks_of[0] = [((rows - self._mean) @ self._components).float() for rows, _, _ in self]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the features (or their components), labels and folds of one chunk of images after the other."""
        for chunk in zip(*self._chunks_of, strict=True):
            yield tuple(tensor.to(self.device) for tensor in chunk)

    def weights_for_iteration(self, weights: Tensor) -> Tensor:
        """Convert weights of the components to weights of the columns that iteration yields. The last row is the bias.

        Iteration yields components if they are held in memory: then nothing changes. Otherwise it yields features.
        """
        return weights if self._is_projected else self.weights_of_features(weights)

    def weights_of_features(self, weights: Tensor) -> Tensor:
        """Convert weights of the components to weights of the features themselves. The last row is the bias."""
        weight = self._components @ weights[:-1]
        # The components are those of centred features: the bias makes up for the mean.
        return torch.cat((weight, weights[-1:] - self._mean @ weight))


class _Models:
    """Classifiers that are fitted at once: model N is fitted to all images but fold N, and the last one to all images.

    Their weights are one matrix. It has a row per principal component and a last row of biases; its columns are the
    classes of the first model, then those of the second, and so on.
    """

    def __init__(self, data: _Rows, fold_of: np.ndarray, classes: int) -> None:
        self.data = data
        self.number = int(fold_of.max()) + 2
        """Number of models: one per fold, and one of all images"""
        self.width = self.number * classes
        """Number of columns of the weights"""
        images_of_model = len(fold_of) - np.bincount(fold_of, minlength=self.number)
        self._weight_of_image = torch.tensor(1 / images_of_model, dtype=torch.float32, device=data.device)

    def _logits(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return logits of a chunk of images: images x models x classes."""
        outputs = torch.addmm(weights[-1].float(), rows, weights[:-1].float())
        return outputs.view(-1, self.number, self.width // self.number)

    def loss(self, scaled: Tensor, scale: Tensor, strength: float) -> Tensor:
        """Return the sum of the models' losses, with weight decay, and set the gradient of the weights `scaled`.

        Model N is not fitted to the images of fold N; the last model is fitted to all images.
        `scaled`: the weights that L-BFGS optimises, which are the weights of the components multiplied by `scale`. The
        last row is the bias, which does not decay.
        """
        scaled.grad = None
        weights = scaled / scale
        weights_in_use = self.data.weights_for_iteration(weights)
        # The gradient of each chunk of images is added to this leaf, so that the graph of the chunk is freed at once.
        leaf = weights_in_use.detach().requires_grad_(True)
        total = strength / 2 * weights[:-1].square().sum()
        for rows, truth, folds in self.data:
            outputs = self._logits(rows, leaf)
            if truth.ndim == 2:  # several labels per image: the losses of an image's classes are summed
                targets = truth[:, None].expand_as(outputs)
                losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(2)
            else:
                targets = truth[:, None].expand(-1, self.number)
                losses = F.cross_entropy(outputs.movedim(2, 1), targets, reduction="none")
            # Images x models, like the losses. No image has the number of the last model as its fold.
            is_fitted = folds[:, None] != torch.arange(self.number, device=self.data.device)
            chunk_loss = (losses * self._weight_of_image * is_fitted).sum()
            chunk_loss.backward()
            total = total + chunk_loss.detach()
        # The gradient of `scaled` has two terms: of the weight decay, for which alone `total` has a graph, and of the
        # images, whose gradient continues from the leaf through the conversions of the weights.
        torch.autograd.backward([total, weights_in_use], [None, leaf.grad])
        return total.detach()

    def held_out_logits(self, weights: Tensor) -> Tensor:
        """Return logits of each image by the model that left out its fold, float64 on the host."""
        weights_in_use = self.data.weights_for_iteration(weights)
        chunks: list[Tensor] = []
        for rows, _, folds in self.data:
            logits = self._logits(rows, weights_in_use)
            model_without_image = folds  # model N leaves out fold N
            chunks.append(logits[torch.arange(len(rows)), model_without_image].cpu())
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

    `fold_of`: the fold of each image. Returns the classifier, and held-out logits of all images: those of an image are
    by a classifier that was fitted to the other folds.

    Features are standardised. One classifier per fold and one of all images are fitted at once, since they read the
    same features. Each strength begins at the solution of the stronger one before it.
    """
    data = _Rows(features, labels, fold_of, device)
    models = _Models(data, fold_of, classes)
    # A row per component and one of biases, a column per model and class.
    weights = torch.zeros(len(data.curvatures) + 1, models.width, dtype=data.exact, device=device)
    best: tuple[float, float, Tensor, Tensor] | None = None
    stale = 0
    log.info("Fitting linear classifiers to the features of %s ...", counted(len(features), "image"), extra=DETAIL)
    for strength in Progress(STRENGTHS, len(STRENGTHS), "strengths", "linear classifier"):
        # Weights multiplied by the root of a component's curvature have nearly the same curvature for all components,
        # so that L-BFGS needs few steps. The bias (last row) is not scaled.
        curvature = data.curvatures + strength
        scale = torch.cat((curvature.sqrt(), data.curvatures.new_ones(1)))[:, None]
        scaled = (weights * scale).requires_grad_(True)
        optimizer = LBFGS(
            [scaled],
            lr=1,
            max_iter=ITERATIONS,
            tolerance_grad=1e-4,
            history_size=10,  # as scikit-learn's; it takes 20 times the memory of all classifiers
            line_search_fn="strong_wolfe",
        )
        optimizer.step(partial(models.loss, scaled, scale, strength))
        with torch.no_grad():
            weights = scaled / scale
            logits = models.held_out_logits(weights)
        if labels.ndim == 2:
            score = scores_of(logits.sigmoid().numpy(), labels > 0).map
        else:
            score = float((logits.argmax(1).numpy() == labels).mean())
        stale += 1
        if best is None or score > best[0]:
            of_all_images = weights[:, -classes:]  # the last model is the one of all images
            best = score, strength, of_all_images, logits
            stale = 0
        if stale == STALE:
            break
    assert best is not None
    score, strength, of_all_images, logits = best
    final = data.weights_of_features(of_all_images).cpu().double()
    weight = final[:-1].T.contiguous()
    bias = final[-1].contiguous()
    return Classifier(weight, bias, strength, figure=100 * score), logits.numpy()
