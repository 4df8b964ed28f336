"""Tries the user's own loss, augmentations, metrics and model before training, so that their errors cost nothing."""

from __future__ import annotations

import random

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

from datasets.transforms.own import OwnChange
from engine.task import task_of
from engine.task.own import measured
from utils.config import Config
from utils.errors import UserError
from utils.own.execute import OwnCodeError, own_lines
from utils.own.registry import own_named

SAMPLES = 4
FOR_METRICS, MOST_FOR_METRICS = 64, 2048
"""Fewest and most images on which metrics are tried"""


def try_own_code(config: Config) -> None:
    """Raise UserError, with the user's line, for what fails on made-up data."""
    host = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if own_named("loss", config.TRAIN.LOSS):
                _try_loss(config)
            for name in config.TRAIN.AUGMENT:
                _try_augmentation(name, config)
            if own_named("model", config.MODEL.NAME) and not config.MODEL.MAE_PRETRAIN:
                _try_model(config)
            if config.VALIDATE_METRICS:
                _try_metrics(config)
        except OwnCodeError as error:
            raise UserError(str(error)) from None
        except UserError:
            raise
        except Exception as error:
            if lines := own_lines(error):
                raise UserError(lines) from None
            raise
        finally:
            random.setstate(host[0])
            np.random.set_state(host[1])


def _try_loss(config: Config) -> None:
    task, name = task_of(config), config.TRAIN.LOSS
    loss = task.loss(config.TRAIN, None)
    labels = task.example(SAMPLES, torch.device("cpu"))
    targets = [labels]
    if config.TRAIN.mixes:
        targets.append(task.mixed(labels, torch.full((SAMPLES, 1), 0.7))[0])
    for target in targets:
        logits = torch.randn(SAMPLES, task.classes, requires_grad=True)
        value = loss(logits, target)
        if not isinstance(value, Tensor) or value.ndim:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{_file('loss', name)}: loss {name} returned {what}; it must return the mean as a scalar.")
        if not value.requires_grad:
            raise UserError(f"{_file('loss', name)}: loss {name} has no gradient with respect to the logits.")
        value.backward()


def _try_augmentation(name: str, config: Config) -> None:
    size = config.DATA.IMAGE_SIZE
    pixels = np.random.randint(0, 256, (size, size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels if config.DATA.IMAGE_CHANNELS == 3 else pixels[:, :, 0])
    OwnChange(name)(image)


def _try_model(config: Config) -> None:
    """Run the model once without weights."""
    name, classes = config.MODEL.NAME.strip(), config.MODEL.NUM_CLASSES
    channels, size = config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE
    with torch.no_grad(), torch.device("meta"):
        module = timm.create_model(name, num_classes=classes, in_chans=channels, img_size=size).eval()
        try:
            logits = module(torch.empty(SAMPLES, channels, size, size))
        except NotImplementedError:  # an operation that needs values
            return
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (SAMPLES, classes):
        raise UserError(
            f"{_file('model', name)}: model {name} returned {shape} for {SAMPLES} images of {size} x {size} x "
            f"{channels}; it must return logits of {SAMPLES} x {classes} (MODEL.NUM_CLASSES)."
        )


def _try_metrics(config: Config) -> None:
    """On random probabilities and labels, among which are all classes unless there are very many."""
    task = task_of(config)
    images = min(max(FOR_METRICS, 2 * task.classes), MOST_FOR_METRICS)
    labels = task.example(images, torch.device("cpu"))
    labels = torch.arange(images) % task.classes if labels.ndim == 1 else labels.long()
    measured(config.VALIDATE_METRICS, task.probabilities(torch.randn(images, task.classes)), labels)


def _file(kind: str, name: str) -> str:
    own = own_named(kind, name)
    return own.file if own else ""
