"""TRAIN.BASE_LR auto: twice the learning rate whose first update changes the features by as much as images differ.

The first update of AdamW and Adam moves each weight by the learning rate, against the sign of its gradient. How much
this changes the features of images is measured on a copy of the pretrained model. Much larger rates overwrite what the
weights have learned, much smaller ones learn little (docs/benchmarks.md).
"""

import gc
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from datasets import ValLoader, auto_workers, open_dataset
from engine.machine.device import Run
from engine.machine.memory import take_peak
from engine.setup import tuned_model
from models.parts import BATCH_NORM, in_eval_mode
from utils.config.kinds import AUTO
from utils.distributed.world import broadcast, on_every_rank
from utils.log import log, unheard
from utils.seeding import fork_host_rng, generator_of
from vitamp.checkpoints import Checkpoint
from vitamp.pooling import check_pool, pool_of, pooled_features

LAYER_DECAY = 0.75
"""TRAIN.LAYER_DECAY auto, with a measured rate: a ViT-S gained by it on three of four sets (docs/benchmarks.md)"""
RATES = np.geomspace(1e-6, 1e-3, 61)
"""The learning rates to choose from, 20 in a factor of ten"""
TIMES = 2.0
"""The learning rate is so many times the one whose update changes the features by as much as images differ"""
WITH_BATCH_NORM = 3e-4
"""The learning rate of models with batch norm: larger measured ones were worse on some sets (docs/benchmarks.md)"""
OF_CLASSIFIER = 1e-4
"""The learning rate if the backbone is frozen, so that no feature changes; the classifier begins as a probe"""
OF_UPDATE = 16
"""Number of images whose gradients make the update"""
OBSERVED = 32
"""Number of other images whose features are compared"""


def settle_rate(run: Run, checkpoint: Checkpoint | None) -> Run:
    """Return `run` with numbers for TRAIN.BASE_LR and TRAIN.LAYER_DECAY, if these are `auto`. A collective call.

    config.yaml then keeps the numbers, so that the training is as reproducible as if the user had given them. A resumed
    run keeps those of its checkpoint. Layers have rates of their own only where the rate is measured, too.
    """
    train = run.config.TRAIN
    saved = checkpoint.meta["settings"] if checkpoint else {}
    if saved.get("TRAIN.BASE_LR", AUTO) != AUTO:
        settled = {"BASE_LR": saved["TRAIN.BASE_LR"], "LAYER_DECAY": saved.get("TRAIN.LAYER_DECAY")}
        asked = {name: value for name, value in settled.items() if getattr(train, name) == AUTO}
        if "BASE_LR" in asked:
            asked["LINEAR_SCALED_LR"] = saved.get("TRAIN.LINEAR_SCALED_LR")
        return replace(run, config=run.config.changed(TRAIN=asked))
    if train.BASE_LR != AUTO:
        log.info("TRAIN.LAYER_DECAY auto: none, since TRAIN.BASE_LR is given.")
        return replace(run, config=run.config.changed(TRAIN={"LAYER_DECAY": None}))
    # The model is built again for the run, which logs these lines itself, and draws the same random numbers.
    with unheard(), fork_host_rng():
        rate, decay, why = broadcast(on_every_rank(run.world, lambda: _measure(run)), run.world)
    gc.collect()
    take_peak(run.device)
    log.info("TRAIN.BASE_LR auto: %g, %s.", rate, why)
    if train.LAYER_DECAY == AUTO and decay is not None:
        log.info("TRAIN.LAYER_DECAY auto: %g, each layer's rate as a fraction of the next one's.", decay)
    if train.scale_reference is not None:
        log.info("TRAIN.LINEAR_SCALED_LR null: a measured rate does not depend on the batch.")
    settled = {"BASE_LR": rate, "LAYER_DECAY": decay, "LINEAR_SCALED_LR": None}
    return replace(run, config=run.config.changed(TRAIN=settled))


def _measure(run: Run) -> tuple[float, float | None, str]:
    """Return TIMES the largest of RATES whose update changes features no more than images differ, and why, in words.

    The second value is TRAIN.LAYER_DECAY, which the rate takes into account. Models with batch norm, and those of which
    only the classifier is trained, have a rate of their own.
    """
    config = run.config.changed(AMP={"ENABLED": False})
    tuned = tuned_model(config, run.device)
    model = tuned.model
    has_batch_norm = any(isinstance(module, BATCH_NORM) for module in model.modules())
    decay = config.TRAIN.LAYER_DECAY
    if decay == AUTO:
        decay = None if has_batch_norm or config.MODEL.LORA.RANK is not None else LAYER_DECAY
    if has_batch_norm:
        return WITH_BATCH_NORM, decay, "for models with batch norm"
    pool = pool_of(model)
    check_pool(model, pool, "TRAIN.BASE_LR auto")
    pixels = tuned.inputs(_images(run))
    divided = min(OF_UPDATE, len(pixels) // 2)
    of_update = pixels[:divided]
    observed = pixels[divided:]

    with in_eval_mode(model):
        with torch.no_grad():
            before = pooled_features(model, observed, pool)
        mean = before.mean(0)
        spread = torch.linalg.vector_norm(before - mean)
        steps = _first_update(model, decay, of_update, pool, mean)
        if not steps:
            return OF_CLASSIFIER, None, "since only the classifier is trained"

        @torch.no_grad()
        def change(rate: float) -> float:
            """Return how far the features move in an update, as a fraction of how far they differ."""
            for weight, step in steps:
                weight.sub_(step, alpha=rate)
            moved = torch.linalg.vector_norm(pooled_features(model, observed, pool) - before)
            for weight, step in steps:
                weight.add_(step, alpha=rate)
            return float(moved / spread)

        place = bisect_left(RATES, 1.0, key=change)
    rate = float(f"{TIMES * RATES[max(place - 1, 0)]:.2g}")
    if place == len(RATES):
        return rate, decay, "the most that it chooses"
    why = "twice the rate whose first update changes the features of training images as much as these differ"
    return rate, decay, why


def _first_update(
    model: nn.Module, decay: float | None, pixels: Tensor, pool: str, mean: Tensor
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the weights that train, and how far each moves in the first update at a learning rate of 1.

    The update is one towards telling these images apart: it needs no label, and no classifier.
    """
    features = pooled_features(model, pixels, pool) - mean
    if not features.requires_grad:
        return []
    features = features / features.detach().std()
    similarities = features @ features.detach().T / features.shape[1] ** 0.5
    cross_entropy(similarities, torch.arange(len(pixels), device=pixels.device)).backward()
    scales: dict[str, float] = {}
    if decay is not None:
        from engine.optim.timms import rate_scales

        scales = rate_scales(model, decay)
    steps = []
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            steps.append((weight, weight.grad.sign() * scales.get(name, 1.0)))
    return steps


def _images(run: Run) -> Any:
    """Return some training images, drawn by SEED, without augmentation."""
    config = run.config
    data = config.DATA.changed(PART="train")
    images = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, run.device)
    order = generator_of(config.SEED, "rate").permutation(len(images))
    chosen = order[: OF_UPDATE + OBSERVED]
    workers = auto_workers(run.world, config.DATA.NUM_WORKERS)
    loader = ValLoader(images, len(chosen), 0, 1, workers, run.device, shard=lambda *_: [chosen])
    try:
        return next(iter(loader)).images
    finally:
        loader.close()
