"""A trained model, ready to be asked: from a run, from one checkpoint wherever it lies, or from weights alone.

One at a time: how attention and fp32 products are computed are switches of the process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.amp.fp32_modules import force_fp32
from engine.amp.op_lists import OpLists
from engine.amp.precision import Precision, check_amp, check_precision
from engine.checkpoint.saved import Saved, config_of, find_saved
from engine.checkpoint.state import load_weights
from engine.machine.device import pick_device, prepare
from engine.machine.memory import is_out_of_memory
from engine.setup import model_in_precision
from utils.better_weights import Wanted, Which
from utils.cli import CommandLine, amp_settings
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError
from utils.log import log


@dataclass
class Trained:
    """A model in evaluation mode on its device, and what belongs to it."""

    model: nn.Module
    inputs: nn.Module
    """uint8 images to what the model sees"""
    precision: Precision
    config: Config
    classes: list[str] | None
    """Names in the order of the labels, where the training data had names."""
    source: Path
    """The checkpoint's folder, or the file of weights."""
    weights: Which
    saved: Saved
    choice: str
    """For the log: which checkpoint, which of its weights, and how well each validated."""

    @torch.no_grad()  # not inference mode: fp8 layers do not run in it
    def logits(self, images: Tensor) -> Tensor:
        """What the model says of uint8 images (B x C x S x S), in fp32, computed as validation computes it."""
        amp, device = self.config.AMP, self.precision.device
        with (
            OpLists(device.type, amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST),
            self.precision.autocast(training=False),
        ):
            try:
                return self.model(self.inputs(images.to(device))).float()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingError(
                    f"out of memory with {len(images)} images at once on {device.type}: take less by -batch_size (in "
                    "predict.py and evaluate.py), or -amp."
                ) from None

    def name_of(self, label: int) -> str:
        """A class's name; its number where there are no names, or more outputs than names."""
        names = self.classes or []
        return names[label] if label < len(names) else str(label)

    def names(self) -> list[str]:
        """Of all the model's classes."""
        return [self.name_of(label) for label in range(self.config.MODEL.NUM_CLASSES)]

    def has(self, which: Which) -> bool:
        return self.saved.has(which)

    def take(self, which: Which) -> None:
        """Exchange the weights for those of the model, or of its moving average."""
        self.saved.require(which)
        load_weights(self.model, self.saved.tensors(which), f"{self.saved.where(which)}")
        self.weights = which

    def words(self) -> str:
        """Which weights of which model these are."""
        which = "the moving average" if self.weights == "ema" else "the model's weights"
        return f"{self.config.MODEL.NAME}, {which} of {self.source}, in {self.precision.name}"


def load_trained(
    path: Path | str,
    weights: Wanted = "auto",
    device: str | None = None,
    amp: str | None = None,
    given: CommandLine | None = None,
) -> Trained:
    """The model that `path` means: a run's best checkpoint (else its last), a checkpoint, a file in one, or weights
    that scripts/checkpoint.py or scripts/export.py wrote.

    `weights` auto: those that validated better, the plain ones or their EMA. `device` None: the run's, if it is here.
    `amp` None: as the run validates; else a word of -amp's, or `on`. `given`: settings that replace the run's.
    """
    saved, choice = find_saved(Path(path).expanduser(), weights)
    config = config_of(saved, _flags(device, amp, given), given)
    check_amp(config.AMP, config.TRAIN)
    asked = {**given.flags, **given.words}.keys() if given else ()
    place = _device(device or (config.DEVICE if "DEVICE" in asked else None), config)
    check_precision(config.AMP, place)
    prepare(config, place, ALONE)
    with _quietly():
        model, inputs, precision = model_in_precision(config, place, saved.meta.get("choices", {}))
    if precision.level in ("O1", "O2") and (moved := saved.fp32_modules()):
        force_fp32(model, moved, place.type)
    model.eval()
    classes = saved.meta.get("classes")
    trained = Trained(model, inputs, precision, config, classes, saved.path, choice.which, saved, choice.words)
    trained.take(choice.which)
    return trained


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """How a model is built was told when it was trained; that it has fresh weights would only be misunderstood now."""
    before = log.level
    log.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(before)


def _flags(device: str | None, amp: str | None, given: CommandLine | None) -> dict[str, tuple[Any, str]]:
    flags = dict(given.flags) if given else {}
    if device is not None:
        flags["DEVICE"] = (device, "-device")
    if amp is not None:
        flags |= {key: (value, "-amp") for key, value in amp_settings(amp).items()}
    if flags.get("AMP.ENABLED", (False,))[0]:  # asked for here, it holds here
        flags.setdefault("AMP.EVAL", (True, "-amp"))
    return flags


def _device(asked: str | None, config: Config) -> torch.device:
    """The one asked for; else the run's own, if this machine has such a one; else the best there is."""
    if asked is None and config.DEVICE is not None:
        try:
            return pick_device(config.DEVICE, ALONE)
        except UserError:
            pass
    return pick_device(asked, ALONE)
