"""Loading a trained model from a run, a checkpoint, or a file of weights alone; and its predictions for a data set.

The kinds of attention and of fp32 matrix products are switches of the process: those of the model loaded last hold for
all, which may change the last bits of the others' logits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from datasets import ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import PADDING
from engine.amp.low_precision import force_fp32
from engine.amp.op_lists import OpLists
from engine.amp.precision import Precision, check_amp
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import input_of
from engine.machine.device import pick_device, set_up_device
from engine.machine.memory import is_out_of_memory
from engine.setup import tuned_model
from engine.task import task_of
from engine.task.base import Task
from utils.cli import CommandLine, amp_settings
from utils.config import Config
from utils.config.load import config_of_weights
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError, UserError
from utils.log import unheard
from utils.own_code import FIELD, allowed, noted_of
from utils.text import counted
from vitamp.bands import picture_of_bands
from vitamp.checkpoints import located, run_folder_of
from vitamp.metrics import BETTER, NO_LABELS, PLAIN, WeightSet
from vitamp.pooling import POOLED, pool_of, pooled_features
from vitamp.tensors import fp32_modules, read_weights
from vitamp.weights import Chosen, chosen_at


@dataclass
class Trained:
    """Model in evaluation mode on its device, with its settings."""

    model: nn.Module
    inputs: nn.Module
    """Normalises uint8 images for the model"""
    precision: Precision
    config: Config
    chosen: Chosen
    """The weights that it has"""
    calibrated: bool = False
    """Whether the logits are divided by the temperature of the weights, if one was fitted"""
    temperature: float = 1.0
    flip: bool = False
    """-tta flip: average the probabilities of each image and its mirror image"""
    others: tuple[Trained, ...] = ()
    """Models of other runs; the probabilities are the mean of theirs and its own"""

    @property
    def all(self) -> tuple[Trained, ...]:
        """It and the others."""
        return (self,) + self.others

    def logits(self, images: Tensor) -> Tensor:
        """Logits in fp32 of uint8 images (B x C x S x S), computed as in validation.

        With `flip` and `others`, they are the logits of the mean of the probabilities.
        """
        with self.computing(len(images)):
            images = images.to(self.precision.device)
            views = (images, images.flip(-1)) if self.flip else (images,)
            outputs = [self.model(self.inputs(view)).float() for view in views]
            if self.temperature != 1:
                outputs = [output / self.temperature for output in outputs]
            own = outputs[0] if len(outputs) == 1 else self.task.averaged(outputs)
        if not self.others:
            return own
        of_all = [own] + [one.logits(images) for one in self.others]
        return self.task.averaged(of_all)

    @contextlib.contextmanager
    def computing(self, images: int) -> Iterator[None]:
        """Compute in the precision of validation, without gradients. `images`: at once, for the error if memory runs
        out."""
        amp = self.config.AMP
        device = self.precision.device
        with (
            torch.no_grad(),  # not inference mode: fp8 layers do not run in it
            OpLists(device.type, amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST),
            self.precision.autocast(training=False),
        ):
            try:
                yield
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingError(
                    f"out of memory with {counted(images, 'image')} at once on {device.type}: use a smaller "
                    "-batch_size (in predict.py and evaluate.py), or -amp."
                ) from None

    def features(self, images: Tensor, pool: str) -> Tensor:
        """Features in fp32 of uint8 images (B x C x S x S), as in validation: B x D; patches B x N x D."""
        with self.computing(len(images)):
            seen = pool_of(self.model) if pool == POOLED else pool
            return pooled_features(self.model, self.inputs(images.to(self.precision.device)), seen)

    def thresholds(self) -> tuple[list[float], str]:
        """With several labels: the threshold of each class, and their origin for the log."""
        from engine.task.several import HALF, describe_untuned

        found = None if self.others else self.chosen.thresholds
        classes = int(self.config.MODEL.NUM_CLASSES)
        if found is None or len(found) != classes:
            words = f"a class is predicted if its probability reaches {HALF}, because these weights have no thresholds"
            return [HALF] * classes, words
        words = "a class is predicted if its probability reaches its own threshold, found in the model's validation"
        untuned = [label for label, threshold in enumerate(found) if threshold == HALF]
        if untuned:
            words += f"; {describe_untuned(untuned, self.names())}"
        return list(found), words

    def name_of(self, label: int) -> str:
        """Name of a class; its number if it has no name."""
        names = self.chosen.classes or []
        return names[label] if label < len(names) else str(label)

    def names(self) -> list[str]:
        """Names of all the model's classes."""
        return [self.name_of(label) for label in range(self.config.MODEL.NUM_CLASSES)]

    @property
    def task(self) -> Task:
        return task_of(self.config)

    def take(self, which: WeightSet) -> None:
        """Load a set of the saved weights."""
        self.chosen = self.chosen.other(which)
        load_weights(self.model, read_weights(self.chosen), f"{self.chosen.file}")
        kept = self.chosen.calibration if self.calibrated else None
        self.temperature = kept.temperature if kept else 1.0

    def words(self) -> str:
        """Model, weights and precision in words."""
        return f"{self.config.MODEL.NAME}, {self.chosen.which.words} of {self.chosen.place}, in {self.precision.name}"


def load_trained(
    path: Path | str,
    weights: str = BETTER,
    device: str | None = None,
    amp: str | None = None,
    given: CommandLine | None = None,
    calibrated: bool = False,
    needs_labels: bool = True,
    world: World = ALONE,
) -> Trained:
    """Load the model at `path`: a run (its best checkpoint, or else its last), a checkpoint, a file in one, or weights
    that scripts/checkpoint.py or scripts/export.py wrote.

    `weights`: a value of -weights; auto: those that validated better. `device` None: the run's, if it exists here.
    `amp` None: as the run validates; otherwise a value of -amp, or `on`. `given`: settings that override the run's.
    `calibrated`: divide the logits by the temperature that evaluate.py -calibrate fitted to these weights.
    `needs_labels`: refuse a model that learned without them. `world`: processes of a launcher, each with its device.
    """
    place = located(Path(path).expanduser())
    chosen = chosen_at(place, weights)
    config = _settings_of(chosen, device, amp, given)
    overridden = given.keys if given else []
    if needs_labels and config.task == NO_LABELS:
        raise UserError(
            f"{path}: this model learned without labels and has no classes yet. Train it on images with labels: "
            f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {path} (docs/pretraining.md)."
        )
    if config.USE or allowed.files:
        from engine.trained.own_code import use_of_weights

        use_of_weights(noted_of(chosen.meta.get(FIELD), place), config, run_folder_of(place))
    if device or "DEVICE" in overridden:
        where = pick_device(device or config.DEVICE, world)
    else:
        where = _device_of_run(config, world)
    elsewhere = amp is not None or not str(chosen.choices.get("computed_in", "")).startswith(where.type)
    if elsewhere and "SPEED" not in overridden:  # what the run forced may not exist here
        kept = [word for word in config.SPEED if not word.startswith("+")]
        config = config.changed(SPEED=kept or ["auto"])
    with unheard(logging.WARNING):  # lines about building belong to training: "freshly initialised" would mislead
        trained = _built(config, where, world, chosen)
    moved = fp32_modules(chosen) if trained.precision.level in ("O1", "O2") else []
    if moved:
        force_fp32(trained.model, moved, where.type)
    trained.calibrated = calibrated
    trained.take(chosen.which)
    return trained


def _settings_of(chosen: Chosen, device: str | None, amp: str | None, given: CommandLine | None) -> Config:
    flags = dict(given.flags) if given else {}
    if device is not None:
        flags["DEVICE"] = (device, "-device")
    if amp is not None:
        flags |= {key: (value, "-amp") for key, value in amp_settings(amp).items()}
    return config_of_weights(chosen, flags, given)


def _device_of_run(config: Config, world: World) -> torch.device:
    """The run's own, if this machine has it; else the best one."""
    with contextlib.suppress(UserError):
        return pick_device(config.DEVICE, world)
    return pick_device(None, world)


def together(paths: Sequence[Path | str], load: Callable[[Path | str], Trained], flip: bool) -> Trained:
    """The model at the first path, which averages its probabilities with those of the models at the others.

    `flip`: of all.
    """
    first, *others = [load(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        ours = _what_must_agree(first)
        theirs = _what_must_agree(other)
        different = [what for what in ours if ours[what] != theirs[what]]
        if different:
            raise UserError(
                f"{paths[0]} and {path}: their {different[0]} differ, so their probabilities cannot be averaged. Use "
                "each alone."
            )
    first.others = tuple(others)
    for one in first.all:
        one.flip = flip
    return first


def _what_must_agree(one: Trained) -> dict[str, Any]:
    """Of models whose probabilities are averaged: all but mean and std, by which each normalises for itself."""
    given = {"classes": one.names(), "labels": one.task.kind} | input_of(one.config.DATA)
    del given["mean"], given["std"]
    return given


def pretrained(config: Config, world: World) -> Trained:
    """The model of the settings with the weights of MODEL.PRETRAINED, which need no run."""
    place = Path(config.MODEL.PRETRAINED or "")
    chosen = Chosen(place, which=PLAIN, words=f"weights for {config.MODEL.NAME}", sets=(PLAIN,), meta={})
    return _built(config, pick_device(config.DEVICE, world), world, chosen)


def _built(config: Config, device: torch.device, world: World, chosen: Chosen) -> Trained:
    check_amp(config.AMP, None)
    set_up_device(config, device, world)
    tuned = tuned_model(config, device, choices=chosen.choices)
    model = tuned.model.eval()
    return Trained(model, inputs=tuned.inputs, precision=tuned.precision, config=config, chosen=chosen)


VALIDATED = 5
"""Highest logits that validation looks at."""


def guesses(logits: Tensor, count: int = 1) -> Tensor:
    """Labels of the `count` highest logits, in order, with ties broken as in validation.

    In half precision logits are often equal, and argmax then takes another one than validation does.
    """
    classes = logits.shape[-1]
    first = logits.topk(min(VALIDATED, classes), dim=-1).indices
    if count <= VALIDATED:
        return first[:, :count]
    above = logits.amax(dim=-1, keepdim=True) + torch.arange(VALIDATED, 0, -1, device=logits.device)
    return logits.scatter(-1, first, above[:, : first.shape[1]]).topk(min(count, classes), dim=-1).indices


def batches_of(
    trained: Trained, dataset: ImageDataset, workers: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and indices, one batch at a time, on the device, in order.

    Raises TrainingError at the end if an image could not be read.
    """
    data = trained.config.DATA
    number = auto_workers(given=data.NUM_WORKERS if workers is None else workers)
    device = trained.precision.device
    loader = ValLoader(dataset, data.val_batch, rank=0, world=1, workers=number, device=device)
    try:
        for batch in loader:
            real = batch.indices != PADDING
            yield trained.logits(batch.images)[real], batch.labels[real], batch.indices[real]
        if loader.broken is not None:
            loader.broken.raise_together(ALONE)
    finally:
        loader.close()


def split_of_run(trained: Trained, part: str = "val") -> ImageDataset:
    """A split of the data of the model's run, by DATA.PART, without augmentation."""
    config = trained.config
    data = config.DATA.changed(PART=part)
    device = trained.precision.device
    return open_dataset(data, train=False, num_classes=config.MODEL.NUM_CLASSES, seed=config.SEED, device=device)


def name_of(dataset: ImageDataset, index: int) -> str:
    samples = dataset.single_images()
    return samples.name(index) if samples is not None else str(index)


def picture_of(dataset: ImageDataset, index: int) -> Image.Image:
    return picture_of_bands(dataset.__getitems__([(0, index)]).images[0].cpu().permute(1, 2, 0).numpy())
