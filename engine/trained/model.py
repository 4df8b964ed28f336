"""Loads a trained model from a run, a checkpoint, or a file of weights alone, and predicts with it.

Which attention kernels and which precision of fp32 matrix products are used is set for the whole process. So after
several models are loaded, all use the choice of the last one, which may change the last bits of the others' logits.
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
from utils.config.keys import IMAGE_SIZE, deciding, default_of, value_of
from utils.config.kinds import one_line
from utils.config.load import config_of_weights
from utils.config.resumed import settings_of
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
    """A trained model in evaluation mode on its device, with its settings."""

    model: nn.Module
    inputs: nn.Module
    """Normalises uint8 images for the model"""
    precision: Precision
    config: Config
    chosen: Chosen
    """The weights that are loaded"""
    calibrated: bool = False
    """Whether the logits are divided by the temperature of the weights, if one was fitted"""
    temperature: float = 1.0
    flip: bool = False
    """-tta flip: average the probabilities of each image and its mirror image"""
    others: tuple[Trained, ...] = ()
    """Models of other runs in an ensemble: the probabilities are the mean over this model and these"""

    @property
    def all(self) -> tuple[Trained, ...]:
        """All models of the ensemble, this one first."""
        return (self,) + self.others

    @property
    def computes_as_validated(self) -> bool:
        """Whether this is the one model that its run has validated, with images prepared as then."""
        if self.others or self.flip:
            return False
        in_run = settings_of(self.chosen)
        for key in (IMAGE_SIZE, *deciding("input", "evaluation")):
            if one_line(in_run.get(key, default_of(key))) != one_line(value_of(self.config, key)):
                return False
        return True

    def logits(self, images: Tensor) -> Tensor:
        """Return logits in fp32 of uint8 images (B x C x S x S), computed as in validation.

        With `flip`, or in an ensemble, several predictions are made, and the logits are those of their mean
        probabilities.
        """
        with self.computing(len(images)):
            images = images.to(self.precision.device)
            views = (images, images.flip(-1)) if self.flip else (images,)
            outputs = [self.model(self.inputs(view)).float() for view in views]
            if self.temperature != 1:
                outputs = [output / self.temperature for output in outputs]
            logits = outputs[0] if len(outputs) == 1 else self.task.averaged(outputs)
        if not self.others:
            return logits
        # Each model computes on the device of its own run.
        logits_of_ensemble = [logits] + [model.logits(images).to(logits.device) for model in self.others]
        return self.task.averaged(logits_of_ensemble)

    @contextlib.contextmanager
    def computing(self, images: int) -> Iterator[None]:
        """Compute in the precision of validation, without gradients, while the context is open.

        `images`: how many are computed at once, for the error if memory runs out.
        """
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
        """Return features in fp32 of uint8 images (B x C x S x S), computed as in validation.

        They are B x D; with `pool` "patches", which keeps N patches apart, B x N x D. `pool`: see vitamp/pooling.py.
        """
        with self.computing(len(images)):
            # POOLED stands for the pooling that the model's own classifier sees, which may be another than timm's.
            pooling = pool_of(self.model) if pool == POOLED else pool
            return pooled_features(self.model, self.inputs(images.to(self.precision.device)), pooling)

    def thresholds(self) -> tuple[list[float], str]:
        """Return the threshold of each class, for several labels per image, and a sentence for the log about them.

        All classes get 0.5 if no thresholds were tuned: in an ensemble, or if the weights have none for these classes.
        """
        from engine.task.several import HALF, describe_untuned

        tuned = None if self.others else self.chosen.thresholds
        classes = int(self.config.MODEL.NUM_CLASSES)
        if tuned is None or len(tuned) != classes:
            words = f"a class is predicted if its probability reaches {HALF}, because these weights have no thresholds"
            return [HALF] * classes, words
        words = "a class is predicted if its probability reaches its own threshold, found in the model's validation"
        untuned = [label for label, threshold in enumerate(tuned) if threshold == HALF]
        if untuned:
            words += f"; {describe_untuned(untuned, self.names())}"
        return list(tuned), words

    def name_of(self, label: int) -> str:
        """Return the name of a class; its number if it has no name."""
        names = self.chosen.classes or []
        return names[label] if label < len(names) else str(label)

    def names(self) -> list[str]:
        """Return the names of all the model's classes."""
        return [self.name_of(label) for label in range(self.config.MODEL.NUM_CLASSES)]

    @property
    def task(self) -> Task:
        return task_of(self.config)

    def take(self, which: WeightSet) -> None:
        """Load another set of the saved weights, such as the EMA, with the temperature that was fitted to it."""
        self.chosen = self.chosen.other(which)
        load_weights(self.model, read_weights(self.chosen), f"{self.chosen.file}")
        calibration = self.chosen.calibration if self.calibrated else None
        self.temperature = calibration.temperature if calibration else 1.0

    def words(self) -> str:
        """Describe model, weights and precision for the log."""
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
    """Load a trained model in evaluation mode on its device.

    `path`: a run (its best checkpoint, or else its last), a checkpoint, a file in one, or weights that
    scripts/checkpoint.py or scripts/export.py wrote.
    `weights`: a value of -weights; auto stands for the set that validated better.
    `device`: a value of -device; None stands for the run's device, or the best one if this machine lacks that.
    `amp`: a value of -amp, or `on`; None stands for the precision in which the run validates.
    `given`: settings that override the run's.
    `calibrated`: divide the logits by the temperature that evaluate.py -calibrate fitted to these weights.
    `needs_labels`: refuse a model that learned without labels.
    `world`: processes of a launcher, each with its device.
    """
    # The weights, and the settings of their run.
    place = located(Path(path).expanduser())
    chosen = chosen_at(place, weights)
    config = _settings_of(chosen, device, amp, given)
    overridden = given.keys if given else []
    if needs_labels and config.task == NO_LABELS:
        raise UserError(
            f"{path}: this model learned without labels and has no classes yet. Train it on images with labels: "
            f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {path} (docs/pretraining.md)."
        )

    # The user's own code: files that the run has used, or files of -use.
    if config.USE or allowed.files:
        from engine.trained.own_code import use_of_weights

        files_of_run = noted_of(chosen.meta.get(FIELD), place)
        use_of_weights(files_of_run, config, run_folder_of(place))

    if device or "DEVICE" in overridden:
        picked = pick_device(device or config.DEVICE, world)
    else:
        picked = _device_of_run(config, world)

    # A speed-up that the run forced (SPEED +name) may not exist on another type of device or in another precision.
    device_of_run = str(chosen.choices.get("computed_in", ""))  # the device's type, and the precision
    changes_precision = amp is not None or any(key.startswith("AMP.") for key in overridden)
    run_computed_alike = not changes_precision and device_of_run.startswith(picked.type)
    if not run_computed_alike and "SPEED" not in overridden:
        not_forced = [word for word in config.SPEED if not word.startswith("+")]
        config = config.changed(SPEED=not_forced or ["auto"])

    with unheard(logging.WARNING):  # lines about building belong to training: "freshly initialised" would mislead
        trained = _built(config, picked, world, chosen)
    # With O1 and O2, the run may have found that some modules need fp32.
    in_fp32 = fp32_modules(chosen) if trained.precision.level in ("O1", "O2") else []
    if in_fp32:
        force_fp32(trained.model, in_fp32, picked.type)
    trained.calibrated = calibrated
    trained.take(chosen.which)
    return trained


def _settings_of(chosen: Chosen, device: str | None, amp: str | None, given: CommandLine | None) -> Config:
    """Return the settings of the run that trained the weights, overridden by the command line."""
    flags = dict(given.flags) if given else {}
    if device is not None:
        flags["DEVICE"] = (device, "-device")
    if amp is not None:
        flags |= {key: (value, "-amp") for key, value in amp_settings(amp).items()}
    return config_of_weights(chosen, flags, given)


def _device_of_run(config: Config, world: World) -> torch.device:
    """Pick the device that the run used, if this machine has it; else the best one that it has."""
    with contextlib.suppress(UserError):
        return pick_device(config.DEVICE, world)
    return pick_device(None, world)


def together(paths: Sequence[Path | str], load: Callable[[Path | str], Trained], flip: bool) -> Trained:
    """Load the models at all paths as an ensemble, which predicts the mean of their probabilities.

    Returns the first model, with the others as its members. `load`: loads a model. `flip`: each model also averages
    over the mirror image. Raises UserError if the models differ in classes or input.
    """
    first, *others = [load(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        facts = _facts_that_must_agree(first)
        other_facts = _facts_that_must_agree(other)
        different = [name for name in facts if facts[name] != other_facts[name]]
        if different:
            raise UserError(
                f"{paths[0]} and {path}: their {different[0]} differ, so their probabilities cannot be averaged. Use "
                "each alone."
            )
    first.others = tuple(others)
    for trained in first.all:
        trained.flip = flip
    return first


def _facts_that_must_agree(trained: Trained) -> dict[str, Any]:
    """Return the classes and the input of a model of an ensemble, by name.

    Mean and std of the input are left out, since each model normalises the images for itself.
    """
    facts = {"classes": trained.names(), "labels": trained.task.kind} | input_of(trained.config.DATA)
    del facts["mean"], facts["std"]
    return facts


def pretrained(config: Config, world: World) -> Trained:
    """Build the model of the settings with the weights of MODEL.PRETRAINED, which no run needs to have trained."""
    place = Path(config.MODEL.PRETRAINED or "")
    chosen = Chosen(place, which=PLAIN, words=f"weights for {config.MODEL.NAME}", sets=(PLAIN,), meta={})
    return _built(config, pick_device(config.DEVICE, world), world, chosen)


def _built(config: Config, device: torch.device, world: World, chosen: Chosen) -> Trained:
    """Build the model on its device, in evaluation mode. The weights at `chosen` are not loaded yet."""
    check_amp(config.AMP, None)
    set_up_device(config, device, world)
    tuned = tuned_model(config, device, choices=chosen.choices)
    model = tuned.model.eval()
    return Trained(model, inputs=tuned.inputs, precision=tuned.precision, config=config, chosen=chosen)


VALIDATED = 5
"""Number of highest logits that validation looks at, for top-5."""


def guesses(logits: Tensor, count: int = 1) -> Tensor:
    """Return the labels of the `count` highest logits, from the highest on, with ties broken as in validation.

    In half precision, logits are often equal. argmax would then take another one of them than validation does, which
    takes the first of the five that `topk` returns.
    """
    classes = logits.shape[-1]
    first_labels = logits.topk(min(VALIDATED, classes), dim=-1).indices
    if count <= VALIDATED:
        return first_labels[:, :count]
    # More than five: `topk` of another number may order equal logits otherwise. So the first five get new logits, from
    # 5 above the maximum down to 1 above it, and stay the first in their order.
    raised = logits.amax(dim=-1, keepdim=True) + torch.arange(VALIDATED, 0, -1, device=logits.device)
    with_raised = logits.scatter(-1, first_labels, raised[:, : first_labels.shape[1]])
    return with_raised.topk(min(count, classes), dim=-1).indices


def batches_of(
    trained: Trained, dataset: ImageDataset, workers: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits, labels and indices of the data set's images, batch by batch in their order, on the device.

    `workers`: processes that load images; None: DATA.NUM_WORKERS. Raises TrainingError at the end if an image could
    not be read.
    """
    data = trained.config.DATA
    worker_count = auto_workers(given=data.NUM_WORKERS if workers is None else workers)
    device = trained.precision.device
    loader = ValLoader(dataset, data.val_batch, rank=0, world=1, workers=worker_count, device=device)
    try:
        for batch in loader:
            real = batch.indices != PADDING  # others only pad the last batch
            yield trained.logits(batch.images)[real], batch.labels[real], batch.indices[real]
        if loader.broken is not None:
            loader.broken.raise_together(ALONE)  # if any image could not be read; there are no other ranks
    finally:
        loader.close()


def split_of_run(trained: Trained, part: str = "val") -> ImageDataset:
    """Open a split of the data that the model's run has, without augmentation. `part`: a value of DATA.PART."""
    config = trained.config
    data = config.DATA.changed(PART=part)
    device = trained.precision.device
    return open_dataset(data, train=False, num_classes=config.MODEL.NUM_CLASSES, seed=config.SEED, device=device)


def name_of(dataset: ImageDataset, index: int) -> str:
    """Return the name of an image, such as its path; its index if it has none."""
    samples = dataset.single_images()
    return samples.name(index) if samples is not None else str(index)


def picture_of(dataset: ImageDataset, index: int) -> Image.Image:
    """Return an image of a data set as the model sees it, but not normalised."""
    key = (0, index)  # in epoch 0
    pixels = dataset.__getitems__([key]).images[0]
    return picture_of_bands(pixels.cpu().permute(1, 2, 0).numpy())
