"""Linear classifiers of kept features: logistic regression, whose strength folds of the training images choose."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import LBFGS

from datasets import ImageDataset, ValLoader, open_dataset, source_of
from datasets.sources.split import split_rows
from engine.evaluation.alike import alike_in_validation
from engine.evaluation.features import AT_ONCE, BLOCK, Features, Seeing, columns_of, features_of, sees_features_alone
from engine.machine.device import Run
from engine.task import task_of
from engine.task.several import MOST_NAMED, scores_of
from models.parts import BATCH_NORM, classifiers, in_eval_mode
from utils.config.data import DataConfig
from utils.distributed.world import broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import DETAIL, log
from utils.progress import Progress
from utils.text import counted
from vitamp.pooling import pool_of

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
    groups, fold_of = dataset.groups(), np.zeros(len(labels), dtype=np.int64)
    groups = groups if rows is None or not groups else [groups[row] for row in rows]
    if (folds := min(FOLDS, len({*groups} or labels))) < 2:
        raise UserError(f"{source_of(data)}: a probe needs two images or groups; MODEL.NEW_CLASSIFIER=zero needs none.")
    for number in range(folds):
        of_fold = data.changed(FOLD=f"{number + 1}/{folds}")
        fold_of[split_rows(labels, of_fold, "val", source_of(data), groups)] = number
    counts = labels.sum(0).astype(np.int64) if labels.ndim == 2 else np.bincount(labels)
    words = f"{folds} folds of the training images choose the strength"
    if len(few := np.flatnonzero((counts > 0) & (counts < folds))):
        names = [str((dataset.classes or range(len(counts)))[label]) for label in few]
        names = names[:MOST_NAMED] + (["..."] if len(few) > MOST_NAMED else [])
        words += f"; fewer images than folds have {counted(len(few), 'class')}: {', '.join(names)}"
    return fold_of, f"{words}."


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
    exact, several = torch.float32 if device.type == "mps" else torch.float64, labels.ndim == 2
    parts = [torch.from_numpy(array).split(AT_ONCE) for array in (features, labels, fold_of)]

    def chunks() -> Iterator[tuple[Tensor, ...]]:
        yield from (tuple(part.to(device) for part in chunk) for chunk in zip(*parts, strict=True))

    count, width = features.shape
    mean = torch.stack([rows.sum(0, dtype=exact) for rows, _, _ in chunks()]).sum(0) / count
    products = torch.zeros(width, width, dtype=exact, device=device)
    for rows, _, _ in chunks():
        products += (centred := rows.to(exact) - mean).T @ centred / count
    deviation = products.diagonal().sqrt()
    deviation = deviation.clamp(min=1e-3 * float(deviation.max()) or 1.0)  # else nearly dead columns get huge weights
    # In these directions, scaled for each strength, the loss is curved nearly alike: L-BFGS needs few steps.
    curves, directions = torch.linalg.eigh((products / deviation.outer(deviation)).cpu())
    curves, directions = curves[-count:].clamp(min=0).to(device) / 4, directions[:, -count:].to(device)  # others are 0
    directions = directions / deviation[:, None]
    if turned := count * len(curves) <= TURNED:  # once, in place of the weights for each step
        parts[0] = [((rows - mean) @ directions).float() for rows, _, _ in chunks()]
    models = int(fold_of.max()) + 2  # each leaves out a fold, the last one none
    shares = 1 / (count - np.bincount(fold_of, minlength=models))
    share = torch.tensor(shares, dtype=torch.float32, device=device)
    found = torch.zeros(len(curves) + 1, models * classes, dtype=exact, device=device)

    def of_rows(found: Tensor) -> Tensor:
        """Weights of the directions, and the bias, as those of the features in `parts`."""
        return found if turned else of_features(found)

    def of_features(found: Tensor) -> Tensor:
        return torch.cat((weight := directions @ found[:-1], found[-1:] - mean @ weight))

    def logits(rows: Tensor, weights: Tensor) -> Tensor:
        """Images x models x classes."""
        return torch.addmm(weights[-1].float(), rows, weights[:-1].float()).view(-1, models, classes)

    def loss(weights: Tensor, scale: Tensor, strength: float) -> Tensor:
        steps.zero_grad()
        seen = of_rows(found := weights / scale)
        leaf, total = seen.detach().requires_grad_(True), strength / 2 * found[:-1].square().sum()
        for rows, truth, folds in chunks():
            outputs = logits(rows, leaf)
            if several:
                wanted = truth[:, None].expand_as(outputs)
                of = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").sum(2)
            else:
                of = F.cross_entropy(outputs.movedim(2, 1), truth[:, None].expand(-1, models), reduction="none")
            part = (of * share * (folds[:, None] != torch.arange(models, device=device))).sum()
            part.backward()
            total = total + part.detach()
        torch.autograd.backward([total, seen], [None, leaf.grad])
        return total.detach()

    best, stale = None, 0
    log.info("Fitting linear classifiers to the features of %s ...", counted(count, "image"), extra=DETAIL)
    for strength in Progress(STRENGTHS, len(STRENGTHS), "strengths", "linear classifier"):
        scale = torch.cat(((curves + strength).sqrt(), curves.new_ones(1)))[:, None]
        weights = (found * scale).requires_grad_(True)
        # The history, as long as scikit-learn's, takes 20 times the memory of all classifiers.
        steps = LBFGS([weights], 1, ITERATIONS, tolerance_grad=1e-4, history_size=10, line_search_fn="strong_wolfe")
        steps.step(partial(loss, weights, scale, strength))
        with torch.no_grad():
            seen = of_rows(found := weights / scale)
            of_other = [logits(rows, seen)[torch.arange(len(rows)), folds].cpu() for rows, _, folds in chunks()]
        guesses = torch.cat(of_other).double()
        if several:
            figure = scores_of(guesses.sigmoid().numpy(), labels > 0).map
        else:
            figure = float((guesses.argmax(1).numpy() == labels).mean())
        if best is None or figure > best[0]:
            best, stale = (figure, strength, found[:, -classes:], guesses), 0
        elif (stale := stale + 1) == STALE:
            break
    assert best is not None
    figure, strength, found, guesses = best
    found = of_features(found).cpu().double()
    return Classifier(found[:-1].T.contiguous(), found[-1].contiguous(), strength, 100 * figure), guesses.numpy()


def _tempered(found: Classifier, run: Run, ready: Seeing, known: Features, data: DataConfig) -> Classifier:
    """Divide a classifier that augmentation misleads, whose gradients would damage what the model has learned.

    Augmented images then have the least loss, and the same classes: a power of two changes no rounding.
    """
    batch = min(run.config.DATA.val_batch, BLOCK)
    images = open_dataset(data, True, len(found.bias), run.config.SEED, run.device)
    rows = np.unique(np.linspace(0, len(images) - 1, BLOCK).astype(int))
    plan = np.array_split(rows, len(rows) // batch + 1)
    loading = contextlib.closing(ValLoader(images, batch, 0, 1, 0, run.device, shard=lambda *_: plan))
    with in_eval_mode(ready.model), loading as loader:
        seen = [(columns_of(ready, one.images).cpu(), one.indices.cpu()) for one in loader]
    columns, indices = (torch.cat(part) for part in zip(*seen, strict=True))
    read = indices >= 0  # -1 of a broken image
    logits = found.logits(columns[read, known.pools[pool_of(ready.model)]].numpy())
    labels = torch.from_numpy(known.labels[indices[read].numpy()])
    of = F.binary_cross_entropy_with_logits if labels.ndim == 2 else F.cross_entropy

    def loss(divisor: float) -> float:
        return float(of(logits / divisor, labels))

    if loss(1) <= loss(math.inf):
        return found
    divisor = min((2**step for step in range(1, 11)), key=loss)
    log.info(
        "Augmented training images have loss %.2f, with zeros %.2f: the probe is divided by %d, for loss %.2f, "
        "and too unsure of whole images: should it stay the best checkpoint, calibrate it (evaluate.py). If flips "
        "or small crops show something else, set DATA.FLIP=0 DATA.CROP_SCALE=[0.6,1].",
        *(loss(1), loss(math.inf), divisor, loss(divisor)),
    )
    return found._replace(weight=found.weight / divisor, bias=found.bias / divisor)


def start_at_probe(run: Run, ready: Seeing) -> tuple[float, list[int]]:
    """Fit the new classifier to features of the training images. A collective call.

    Returns its figure in folds, and how many validation images look like training images (`alike_in_validation`).
    """
    config, model, classes = run.config, ready.model, int(run.config.MODEL.NUM_CLASSES)
    heads: list[Any] = [model.get_submodule(name) for name in classifiers(model)]
    fits = len(heads) > 1 or sees_features_alone(ready, config.DATA)  # two do by their mean, see below
    if not fits or any(getattr(head, "bias", None) is None for head in heads):
        raise UserError(
            f"MODEL.NEW_CLASSIFIER probe: {type(model).__name__}'s classifier is not one linear layer with a bias that "
            "sees the features themselves; use zero or true."
        )
    norms = (weight for part in model.modules() if isinstance(part, BATCH_NORM) for weight in part.parameters())
    if config.TRAIN.NUM_EPOCHS and any(weight.requires_grad for weight in norms):
        log.warning(
            "MODEL.NEW_CLASSIFIER probe: the batch norms are trained, so training sees other features than the probe "
            "was fitted to, and may lose what the weights have learned. Use MODEL.FREEZE=batch_norm or "
            "MODEL.NEW_CLASSIFIER=zero."
        )
    data = config.DATA.changed(PART="train")
    bank = open_dataset(data, False, classes, config.SEED, run.device)
    # Before the features, which take time: there may be too few images.
    fold_of, words = on_every_rank(run.world, lambda: folds_of(bank, bank.sample_labels(), data))
    known = on_every_rank(run.world, lambda: features_of(ready, config, bank, data, run.world))

    def fitted() -> Classifier:
        found, _ = fit(known.of(pool_of(model)), known.labels, fold_of, classes, run.device)
        by = f"{task_of(config).kind.best.words} {found.figure:.2f} %"
        log.info("The new classifier is a linear probe of strength %.2g, %s in folds. %s", found.strength, by, words)
        if config.TRAIN.CLASS_WEIGHTS is not None or config.DATA.SAMPLER == "balanced":
            log.info("%s.", UNWEIGHTED)
        alone = not config.TRAIN.NUM_EPOCHS or config.trains_on_features  # no augmented image is seen
        return found if alone else _tempered(found, run, ready, known, data)

    found = broadcast(on_rank_0(run.world, fitted), run.world)
    with torch.no_grad():
        for head in heads:  # the two of a distilled model have the mean of their logits
            head.weight.copy_(found.weight.view_as(head.weight))
            head.bias.copy_(found.bias)
    # As `examine` does, which looks for copies: not of the program's own images, in memory.
    alike = config.DATA.CHECK != "off" and bank.single_images() is not None
    return found.figure, alike_in_validation(run, ready, known) if alike else []
