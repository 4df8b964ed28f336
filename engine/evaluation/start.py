"""Lets a training begin at a linear probe: fits the new classifier, and says at the end what was gained over it."""

import contextlib
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from datasets import ValLoader, open_dataset
from engine.evaluation.alike import alike_in_validation
from engine.evaluation.features import BLOCK, Features, Seeing, columns_of, features_of, sees_features_alone
from engine.evaluation.linear import UNWEIGHTED, Classifier, fit, folds_of
from engine.machine.device import Run
from engine.measure.meters import Best
from engine.task import task_of
from models.parts import BATCH_NORM, classifiers, in_eval_mode
from utils.config.data import DataConfig
from utils.distributed.world import broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log
from utils.record.history import History
from utils.record.predictions import GROUPS, PROBE, read_predictions
from utils.record.run_folder import ALIKE, ALIKE_IMAGES, FOLDS, MOST_ALIKE
from utils.statistics.classes import BY_CLASS
from utils.statistics.groups import Groups
from utils.statistics.paired import half_width_of_mean, interval_and_test
from utils.text import counted
from vitamp.checkpoints import Checkpoint
from vitamp.metrics import TOP1, Metric
from vitamp.pooling import pool_of

TO_GAIN = "More images, more epochs, or a third of the learning rate (-lr) may help."
AT_LAST = "At the last validation,"
PROBE_IS_BEST = "The best checkpoint is the linear probe that training began with."


def settle_start(run: Run, ready: Seeing, resumed: Checkpoint | None, dry: bool) -> dict[str, Any]:
    """Let a new run begin at a linear probe, if its settings say so. A collective call.

    Returns the record of the fit for the run's choices: the probe's metric in cross-validation (key FOLDS), and the
    counts and indices of validation images that look like training images (keys ALIKE and ALIKE_IMAGES). For a resumed
    run, these are what its start recorded; without a probe, the record is empty.
    """
    config = run.config
    starts_at_probe = config.MODEL.starts_at_probe
    if dry and (starts_at_probe or config.trains_on_features):
        further = " and a linear probe, so loss and accuracy here are not its own" if starts_at_probe else ""
        log.info("-dry_run keeps no features: training begins with a pass over the images%s.", further)
        return {}
    if resumed is None and starts_at_probe:
        metric_in_folds, counts_alike, images_alike = start_at_probe(run, ready)
        listed = images_alike if len(images_alike) <= MOST_ALIKE else []
        return {FOLDS: metric_in_folds, ALIKE: counts_alike, ALIKE_IMAGES: listed}
    choices = resumed.meta.get("choices", {}) if resumed else {}
    return {key: choices[key] for key in (FOLDS, ALIKE, ALIKE_IMAGES) if key in choices}


def start_at_probe(run: Run, ready: Seeing) -> tuple[float, list[int], list[int]]:
    """Fit a linear probe to features of the training images, and make it the model's classifier. A collective call.

    Returns the probe's metric in cross-validation, in percent, and the counts and indices of validation images that
    look like training images (`alike_in_validation`): empty lists if they were not compared.
    """
    config = run.config
    model = ready.model
    classes = int(config.MODEL.NUM_CLASSES)
    heads = _linear_heads(ready, config.DATA)
    if config.TRAIN.NUM_EPOCHS and _trains_norms(model):
        log.warning(
            "MODEL.NEW_CLASSIFIER probe: the batch norms are trained, so training sees other features than the probe "
            "was fitted to, and may lose what the weights have learned. Use MODEL.FREEZE=batch_norm or "
            "MODEL.NEW_CLASSIFIER=zero."
        )
    data = config.DATA.changed(PART="train")
    images = open_dataset(data, False, classes, config.SEED, run.device)
    # Before the features, which take time: there may be too few images.
    fold_of, folds_sentence = on_every_rank(run.world, lambda: folds_of(images, images.sample_labels(), data))
    features = on_every_rank(run.world, lambda: features_of(ready, config, images, data, run.world))

    def fit_probe() -> Classifier:
        """Fit the probe on rank 0, and log how well it does."""
        probe, _ = fit(features.of(pool_of(model)), features.labels, fold_of, classes, run.device)
        metric = f"{task_of(config).kind.best.words} {probe.figure:.2f} %"
        message = "The new classifier is a linear probe of strength %.2g, %s in folds. %s"
        log.info(message, probe.strength, metric, folds_sentence)
        if config.TRAIN.CLASS_WEIGHTS is not None or config.DATA.SAMPLER == "balanced":
            log.info("%s.", UNWEIGHTED)
        # If training follows, and sees augmented images, which the probe was not fitted to.
        sees_augmented = config.TRAIN.NUM_EPOCHS and not config.trains_on_features
        return _tempered(probe, run, ready, features, data) if sees_augmented else probe

    probe = broadcast(on_rank_0(run.world, fit_probe), run.world)
    with torch.no_grad():
        # A distilled model has two classifiers, whose logits are averaged: both get the probe.
        for head in heads:
            head.weight.copy_(probe.weight.view_as(head.weight))
            head.bias.copy_(probe.bias)
    # Images of the program's own data sets, which are in memory, are not compared: the check of the data does not look
    # for copies among them either.
    is_compared = config.DATA.CHECK != "off" and images.single_images() is not None
    counts_alike, images_alike = alike_in_validation(run, ready, features) if is_compared else ([], [])
    return probe.figure, counts_alike, images_alike


def _linear_heads(ready: Seeing, data: DataConfig) -> list[Any]:
    """Return the model's classifiers; raise UserError if a probe cannot take their place.

    It can if each is a linear layer with a bias that sees the features themselves.
    """
    model = ready.model
    heads: list[Any] = [model.get_submodule(name) for name in classifiers(model)]
    # Only a distilled model has several classifiers, and that is known to fit: its logits are the mean of those of two
    # linear layers, so with the probe in both they are the probe's. `sees_features_alone` tries one classifier.
    fits = len(heads) > 1 or sees_features_alone(ready, data)
    if not fits or any(getattr(head, "bias", None) is None for head in heads):
        raise UserError(
            f"MODEL.NEW_CLASSIFIER probe: {type(model).__name__}'s classifier is not one linear layer with a bias that "
            "sees the features themselves; use zero or true."
        )
    return heads


def _trains_norms(model: nn.Module) -> bool:
    """Whether any batch norm is trained. Then its statistics change too, and so do the features of the same image."""
    norms = (part for part in model.modules() if isinstance(part, BATCH_NORM))
    weights = chain.from_iterable(part.parameters() for part in norms)
    return any(weight.requires_grad for weight in weights)


def _tempered(probe: Classifier, run: Run, ready: Seeing, features: Features, data: DataConfig) -> Classifier:
    """Return the probe, with smaller weights if it is too sure of augmented images.

    It is too sure if its loss on some augmented training images is higher than that of a classifier of zeros. Its large
    gradients would then damage what the model has learned. So its weights are divided by the power of two for which
    this loss is lowest. Dividing by a power of two is exact, so the predicted classes do not change.

    `features`: of the training images without augmentation; the labels and the columns of poolings are taken from them.
    """
    # Load some images, spread over the whole training split, with augmentation.
    batch_size = min(run.config.DATA.val_batch, BLOCK)
    images = open_dataset(data, train=True, num_classes=len(probe.bias), seed=run.config.SEED, device=run.device)
    rows = np.unique(np.linspace(0, len(images) - 1, BLOCK).astype(int))
    batches = np.array_split(rows, len(rows) // batch_size + 1)
    loader_of_rows = ValLoader(
        images, batch_size, rank=0, world=1, workers=0, device=run.device, shard=lambda *_: batches
    )
    loading = contextlib.closing(loader_of_rows)
    columns_of_batches = []
    indices_of_batches = []
    with in_eval_mode(ready.model), loading as loader:
        for batch in loader:
            columns_of_batches.append(columns_of(ready, batch.images).cpu())
            indices_of_batches.append(batch.indices.cpu())

    # Their logits by the probe. It sees the columns of the model's pooling, which are a slice of all columns.
    indices = torch.cat(indices_of_batches)
    is_readable = indices >= 0  # a broken image has the index -1
    columns_of_pool = features.pools[pool_of(ready.model)]
    augmented = torch.cat(columns_of_batches)[is_readable, columns_of_pool]
    logits = probe.logits(augmented.numpy())
    labels = torch.from_numpy(features.labels[indices[is_readable].numpy()])
    criterion = F.binary_cross_entropy_with_logits if labels.ndim == 2 else F.cross_entropy

    def loss(divisor: float) -> float:
        """Loss of the probe divided by `divisor`."""
        return float(criterion(logits / divisor, labels))

    loss_undivided = loss(1)
    loss_of_zeros = loss(math.inf)
    if loss_undivided <= loss_of_zeros:
        return probe
    divisor = min((2**step for step in range(1, 11)), key=loss)
    log.info(
        "Augmented training images have loss %.2f, with zeros %.2f: the probe is divided by %d, for loss %.2f, "
        "and too unsure of whole images: should it stay the best checkpoint, calibrate it (evaluate.py). If flips "
        "or small crops show something else, set DATA.FLIP=0 DATA.CROP_SCALE=[0.6,1].",
        loss_undivided,
        loss_of_zeros,
        divisor,
        loss(divisor),
    )
    return probe._replace(weight=probe.weight / divisor, bias=probe.bias / divisor)


def gained(by: Metric, history: History, folder: Path, best: Best, last: int) -> str:
    """Say at the end of a run that began at a probe what training has gained over it; '' if that is unknown.

    `by`: the metric of SAVE_BEST_BY. `best`: the best validation; that of the probe was at update 0. `last`: number of
    the last update.
    """
    gain = gain_over_probe(by, history, folder)
    if gain and best.update > 0:
        return gain
    was_validated = best.figure is not None
    best_is_probe = was_validated and best.update == 0 and last > 0
    return probe_is_best(by, history, gain) if best_is_probe else ""


def probe_is_best(by: Metric, history: History, gain: str = "") -> str:
    """Say that the best checkpoint is the linear probe that training began with, and what might help.

    `by`: the metric of SAVE_BEST_BY. `gain`: sentences of `gain_over_probe`; '' without them.
    """
    validations = history.of("val")
    if validations and not any(line["update"] for line in validations):
        return (
            "The best checkpoint is the linear probe that training began with: nothing was validated after an update."
        )
    words = PROBE_IS_BEST
    # If another metric than top-1 has chosen the probe, training may still have raised top-1.
    best_by_top1 = history.best(TOP1)
    if by is not TOP1 and best_by_top1 is not None and best_by_top1.line["update"] > 0:
        before = TOP1.number(validations[0][TOP1.name])
        after = TOP1.number(best_by_top1.value)
        words += f" It is the best by {by.words}; top-1 rose from {before} to {after} "
        words += f"(epoch {best_by_top1.line['epoch']})."
    advice = gain or TO_GAIN
    return f"{words} {advice}"


def gain_over_probe(by: Metric, history: History, folder: Path) -> str:
    """Say whether a run's last validation improved on its linear probe by more than chance.

    Returns the sentences of `beside_probe`; '' if the run's folder does not have the predictions of both.
    `by`: the metric of SAVE_BEST_BY.
    """
    validations = history.of("val")
    last_update = validations[-1]["update"] if validations else 0
    table = read_predictions(folder, last_update) if last_update > 0 else None
    if table is None or PROBE not in table:
        return ""
    return beside_probe(
        by,
        history,
        labels=table["labels"].astype(int),
        probe=table[PROBE],
        guesses=table["guess"],
        groups=table.get(GROUPS, ()),
    )


def beside_probe(
    by: Metric, history: History, labels: np.ndarray, probe: np.ndarray, guesses: np.ndarray, groups: Groups = ()
) -> str:
    """Say whether training improved on the linear probe by more than chance, in the metric `by` of SAVE_BEST_BY.

    The last validation is compared with the first, which was that of the probe. The best one is not: it is the luckiest
    of several on these images. Returns '' if metrics.jsonl lacks the metric.

    `labels`, `probe`, `guesses`: for each validation image its class, the class that the probe predicted, and the class
    predicted in the last validation. `groups`: of each image, if there are any.
    """
    validations = history.of("val") or [{}]
    first = validations[0]
    last = validations[-1]
    probe_words = "the linear probe that training began with"
    if by is TOP1:
        gain, low, high = interval_and_test(guesses == labels, probe == labels, groups)
        more = "more" if gain >= 0 else "fewer"
        words = f"right on {abs(gain):.0f} {more} of {counted(len(labels), 'image')} than {probe_words} "
        words += f"(95 % interval {low:+.0f} to {high:+.0f})"
        top1 = ""
    else:
        if None in (last.get(by.name), first.get(by.name)):
            return ""
        words = f"by {by.words}, {by.number(last[by.name])} against {by.number(first[by.name])} of {probe_words}"
        top1 = f"; top-1 {TOP1.number(last[TOP1.name])} against {TOP1.number(first[TOP1.name])}"
        # Only for metrics that are means over classes is there an interval, from what each image contributes.
        if by not in BY_CLASS:
            return f"{AT_LAST} {words}{top1}."
        _, contributions = BY_CLASS[by]
        half_width = half_width_of_mean(contributions(labels, guesses) - contributions(labels, probe), groups)
        gain = last[by.name] - first[by.name]
        low = gain - half_width
        high = gain + half_width
        words += f" ({gain:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f})"
    verdict = "may be chance" if low <= 0 <= high else "is beyond chance"
    sentence = f"{AT_LAST} {words}, which {verdict}{top1}."
    is_better = low > 0
    if is_better:
        return sentence
    return f"{sentence} {TO_GAIN}"
