"""Distillation as in DeiT: the model learns from the labels, and from a teacher's output for the same images.

The teacher gets the images after erasing and mixing, exactly as the model does. Its logits travel with the labels:
targets then have two rows per image, the label's and the teacher's, as a model with two classifiers has two rows of
logits.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.base import per_channel
from engine.amp.low_precision import force_fp32
from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import BatchTransform, TransformedBatch
from engine.machine.memory import is_out_of_memory
from engine.measure.throughput import FORWARD, TEACHER
from engine.speed.speedup import mix_in
from models.build import build_model, is_timm_name, timm_weights
from models.parts import count_parameters
from models.refusals import similar_models
from models.weights.find import locate
from models.weights.fit import load_pretrained
from utils.config import Config
from utils.config.families import TAUGHT
from utils.config.kinds import one_line
from utils.config.load import config_of_weights
from utils.config.train import TrainConfig
from utils.errors import UserError
from utils.log import log
from utils.own_code import FIELD, noted_files, noted_of
from vitamp.checkpoints import META, run_folder_of
from vitamp.meta import Input, check_fields
from vitamp.metrics import ONE_LABEL
from vitamp.registry import own_named
from vitamp.sizes import ImageSize, sides, size_of
from vitamp.tensors import fp32_modules, read_weights
from vitamp.weights import chosen_at, read_header


class DistillationLoss(nn.Module):
    """(1 - alpha) x the loss for the labels + alpha x the loss for the teacher's logits.

    Of two classifiers, the first learns the labels and the second the teacher's logits; a single one learns both.
    """

    def __init__(self, label_loss: Callable[[Tensor, Tensor], Tensor], train: TrainConfig) -> None:
        super().__init__()
        self.label_loss = label_loss
        self.hard = train.DISTILLATION_TYPE == "hard"
        self.alpha = train.DISTILLATION_ALPHA
        self.tau = train.DISTILLATION_TAU

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.ndim == 3:
            label_logits, distilled_logits = logits.unbind(1)
        else:
            label_logits = logits
            distilled_logits = logits
        if targets.ndim < 3:  # labels alone: the teacher was not asked
            return self.label_loss(label_logits, targets)
        labels, teacher_logits = targets.unbind(1)
        if self.hard:
            teacher_loss = F.cross_entropy(distilled_logits, teacher_logits.argmax(1))
        else:
            student = F.log_softmax(distilled_logits / self.tau, 1)
            teacher = F.log_softmax(teacher_logits / self.tau, 1)
            # The factor tau**2 makes up for the temperature, which divides gradients by its square.
            teacher_loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.tau**2
        return (1 - self.alpha) * self.label_loss(label_logits, labels) + self.alpha * teacher_loss


class StackedHeads(nn.Module):
    """Mixin for a model with two classifiers: in training, stacks their logits into one tensor."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return torch.stack(logits, dim=1) if isinstance(logits, tuple) else logits


class Distillation(Callback):
    """TRAIN.DISTILLATION_TYPE: the model learns from a teacher too.

    It is a `BatchTransform` after the run's own, and adds the teacher's logits for the same images to the targets.
    """

    def __init__(
        self, config: Config, model: nn.Module, precision: Precision, names: list[str] | None, saved: Mapping[str, Any]
    ) -> None:
        """`names`, `saved`: classes and saved choices, as in `check_teacher_matches`."""
        if hasattr(model, "set_distilled_training"):  # timm's; in validation, the mean of both is returned as before
            model.set_distilled_training(True)  # pyright: ignore[reportCallIssue]
            mix_in(model, StackedHeads)
        self.teacher = load_teacher(config, precision)
        check_teacher_matches(self.teacher, names, saved)
        self._train = config.TRAIN
        self._classes = torch.arange(self.teacher.source.classes, device=precision.device)

    def attach(self, to: Computing) -> None:
        if to.batch_transform is not self:  # else it is attached anew
            self._before: BatchTransform = to.batch_transform
            self._stages = to.stages
            to.batch_transform = self
            to.criterion = DistillationLoss(to.criterion, self._train)

    def __call__(self, images: Tensor, labels: Tensor) -> TransformedBatch:
        seen = self._before(images, labels)
        self._stages.mark(FORWARD)
        teacher_logits = self.teacher(seen.images)
        self._stages.mark(TEACHER)
        targets = seen.targets
        if targets.ndim == 1:
            targets = (targets.unsqueeze(1) == self._classes).to(teacher_logits.dtype)  # one-hot
        return seen._replace(targets=torch.stack((targets, teacher_logits), dim=1))

    def rows(self) -> dict[str, str]:
        source = self.teacher.source
        total, _ = count_parameters(self.teacher.model)
        return {"teacher": f"{source.where}, {total:,} parameters, frozen; images of {one_line(source.image_size)}"}

    def noted(self) -> dict[str, str]:
        """For run.json and checkpoints; `check_teacher_matches` compares it."""
        source = self.teacher.source.where
        return {"teacher_model": self.teacher.setting, "teacher": source, "teacher_sha256": self.teacher.fingerprint}


KEY = "TRAIN.TEACHER_MODEL"
EXAMPLE = "regnety_160.deit_in1k"
PADDLEVIT = "regnety_160"
"""Architecture of PaddleViT's default teacher, for files that do not say which model they are of"""
PADDLEVIT_FILE = "regnety_160.pdparams"
"""Where PaddleViT looks for its weights"""
FORMS = (
    f"Give a model of timm that has pretrained weights (for example {EXAMPLE}), a run or checkpoint, or "
    "NAME=FILE: timm's name of the model, and the file of its weights."
)


@dataclass(frozen=True)
class TeacherModel:
    """A teacher's model with its weights, and the preprocessing that it was trained with."""

    model: nn.Module
    where: str
    image_size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    names: list[str] | None = None
    """Of the classes, if they are known."""


class Teacher:
    """Frozen model that takes images as the student gets them: normalised for the student, mixed, of any size."""

    def __init__(self, source: TeacherModel, config: Config, precision: Precision) -> None:
        self.source = source
        self._precision = precision
        self.setting = f"{config.TRAIN.TEACHER_MODEL}"
        self.model = source.model.eval().requires_grad_(False).to(precision.device)
        digest = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self.fingerprint = digest.hexdigest()
        data = config.DATA
        mine = _mean_and_std(data.IMAGENET_MEAN, data.IMAGENET_STD, data.IMAGE_CHANNELS)
        theirs = _mean_and_std(source.mean, source.std, data.IMAGE_CHANNELS)
        # Undo the student's normalisation and apply the teacher's, in one step.
        factor = mine[1] / theirs[1]
        offset = (mine[0] - theirs[0]) / theirs[1]
        self._same_normalisation = torch.equal(mine, theirs)
        self._factor = factor.float().reshape(1, -1, 1, 1).to(precision.device)
        self._offset = offset.float().reshape(1, -1, 1, 1).to(precision.device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits in fp32."""
        size = sides(self.source.image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
        if not self._same_normalisation:
            images = torch.addcmul(self._offset, images, self._factor)
        # Under autocast at every level of AMP: the teacher keeps fp32 weights even where the student has a half copy.
        in_half = self._precision.level != "O0"
        dtype = self._precision.choice.dtype if in_half else None
        with torch.autocast(images.device.type, dtype, enabled=in_half):
            return self.model(images).float()


def _mean_and_std(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> Tensor:
    return torch.tensor([per_channel(mean, channels), per_channel(std, channels)], dtype=torch.float64)


def check_teacher(config: Config) -> None:
    """Check a teacher or a DISTILLATION_TYPE that is set, as far as possible before any model is built."""
    train = config.TRAIN
    if config.EVAL:
        return
    if train.DISTILLATION_TYPE is None:
        raise UserError(
            f"{KEY} {train.TEACHER_MODEL}: a teacher has no effect while TRAIN.DISTILLATION_TYPE is null. Set it "
            f"to hard or soft, or {KEY} to null."
        )
    if train.TEACHER_MODEL is None:
        raise UserError(f"TRAIN.DISTILLATION_TYPE {train.DISTILLATION_TYPE} needs a teacher: set {KEY}. {FORMS}")
    name, place = _parse(train.TEACHER_MODEL, config.MODEL.TYPE.casefold() in TAUGHT)
    if name is not None:  # of a run, the files are checked when they are loaded
        try:
            with _errors_name_teacher():
                locate(place, download=False)
        except UserError as error:
            if place != EXAMPLE:
                raise
            raise UserError(f"{error}\n  or give PaddleViT's file: -teacher_model {PADDLEVIT_FILE}") from None


def default_teacher(config: Config) -> tuple[str, str] | None:
    """TRAIN.TEACHER_MODEL of a family that PaddleViT distils, and a note; None where a user has to choose."""
    if config.EVAL or config.TRAIN.TEACHER_MODEL is not None or config.MODEL.TYPE.casefold() not in TAUGHT:
        return None
    teacher = PADDLEVIT_FILE if Path(PADDLEVIT_FILE).is_file() else EXAMPLE
    return teacher, f"{KEY} {teacher}: PaddleViT's default teacher for MODEL.TYPE {config.MODEL.TYPE}"


def load_teacher(config: Config, precision: Precision) -> Teacher:
    """Load the teacher. Raise UserError if it cannot teach this student."""
    setting = config.TRAIN.TEACHER_MODEL
    assert setting is not None  # checked before
    with torch.random.fork_rng(devices=[]):  # building it draws random weights, which are then mostly replaced
        torch.manual_seed(config.SEED)
        source = _load_source(setting, config, precision)
    if source.classes != config.MODEL.NUM_CLASSES:
        raise UserError(
            f"{KEY} {setting}: the teacher has {source.classes} classes, but MODEL.NUM_CLASSES is "
            f"{config.MODEL.NUM_CLASSES}. Teacher and model must have the same classes."
        )
    teacher = Teacher(source, config, precision)
    try:  # one empty image, so that a mismatch is found before training
        shape = tuple(teacher(torch.zeros(1, *config.DATA.shape, device=precision.device)).shape)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{KEY} {source.where}: cannot take images of size {one_line(source.image_size)} ({error})."
        ) from None
    if shape != (1, source.classes):
        raise UserError(f"{KEY} {source.where}: its output for one image has shape {shape}, not {(1, source.classes)}.")
    return teacher


def check_teacher_matches(teacher: Teacher, names: list[str] | None, saved_choices: Mapping[str, Any]) -> None:
    """Check that the teacher has the data's classes, and that a resumed run still has the teacher it began with."""
    source = teacher.source
    same_setting = saved_choices.get("teacher_model") == teacher.setting
    if same_setting and saved_choices.get("teacher_sha256") != teacher.fingerprint:
        before = saved_choices.get("teacher")
        if before == source.where:
            change = "the teacher's weights have changed since this run began"
        else:
            change = f"the teacher's weights are now {source.where}, but this run began with {before}"
        raise UserError(
            f"{KEY} {teacher.setting}: {change}. Restore the former weights; or, to resume with the changed teacher, "
            "copy its weights to another path and name that path."
        )
    for number, (taught, learned) in enumerate(zip(source.names or (), names or (), strict=False)):
        if taught != learned:
            raise UserError(
                f"{KEY} {source.where}: class {number} is '{taught}' in the teacher and '{learned}' in the data; both "
                "must have the same classes in the same order."
            )


def _load_source(setting: str, config: Config, precision: Precision) -> TeacherModel:
    name, place = _parse(setting, config.MODEL.TYPE.casefold() in TAUGHT)
    if name is None:
        return _of_run(setting, place, config, precision)
    pretrained = timm_weights(name)
    channels = config.DATA.IMAGE_CHANNELS
    if pretrained is None:
        raise UserError(f"{KEY} {setting}: {name} is a model of your own code; name the folder of its run.")
    classes = pretrained.num_classes if place == name else config.MODEL.NUM_CLASSES
    header = {}
    model = timm.create_model(name, num_classes=classes, in_chans=channels)
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    try:
        with _errors_name_teacher():
            header = read_header(Path(place)).get("input") or {}
            check_fields(Input, header, Path(place))
            load_pretrained(model, place, name)
    except UserError as error:
        if name != PADDLEVIT or name in setting:
            raise
        raise UserError(f"{error}\n{_unnamed(setting)}, so {PADDLEVIT} was tried. {FORMS}") from None
    if any(parameter.isnan().any() for parameter in model.parameters()):
        raise UserError(
            f"{KEY} {setting}: some weights of {name} with {classes} classes are missing. A teacher needs its "
            "classifier, too."
        )
    size = size_of(header.get("image_size", pretrained.input_size[1:]))
    mean = tuple(header.get("mean", pretrained.mean))
    std = tuple(header.get("std", pretrained.std))
    colours = channels if config.DATA.is_plain else len(mean)
    _check_values(setting, config, (colours, header.get("bits", 8), tuple(header.get("range", (0, 255)))))
    if len(mean) != channels:  # grey images, and a teacher trained on colour
        mean = (sum(mean) / len(mean),)
        std = (sum(std) / len(std),)
    return TeacherModel(model, where=setting, image_size=size, mean=mean, std=std, classes=classes)


def _of_run(setting: str, place: str, config: Config, precision: Precision) -> TeacherModel:
    """The model of a run or checkpoint; its precision follows from the student's settings."""
    with _errors_name_teacher():
        chosen = chosen_at(Path(place))
        theirs = config_of_weights(chosen)
        own = own_named("model", theirs.MODEL.NAME)  # if the model to train is this one too
        values = own.values if own else {}
        if theirs.USE:
            from engine.trained.own_code import use_of_weights

            run = run_folder_of(chosen.place)
            noted = noted_of(chosen.meta.get(FIELD), chosen.place)
            use_of_weights([] if own else noted, theirs, run, kinds=("model",))
            used = {one["sha256"] for one in noted_files() if theirs.MODEL.NAME in one["registers"]}
            if own and used.isdisjoint(one.sha256 for one in noted):
                log.warning("Teacher %s: %s has changed since; the new file builds the teacher.", setting, own.file)
    if theirs.task != ONE_LABEL:
        raise UserError(f"{KEY} {setting}: trained {theirs.task.words}; a teacher needs one label per image.")
    data = theirs.DATA
    _check_values(setting, config, (data.IMAGE_CHANNELS, data.BITS, data.value_range))
    model = build_model(theirs.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    if own:
        own.values = values
    load_weights(model, read_weights(chosen), f"{chosen.file}")
    log.info("Teacher %s: %s", setting, chosen.words)
    if precision.level != "O0":
        in_fp32 = list(theirs.AMP.FP32_MODULES) + fp32_modules(chosen)
        force_fp32(model, in_fp32, precision.device.type)
    return TeacherModel(
        model,
        where=f"{theirs.MODEL.NAME} of {chosen.file}",
        image_size=data.IMAGE_SIZE,
        mean=data.IMAGENET_MEAN,
        std=data.IMAGENET_STD,
        classes=theirs.MODEL.NUM_CLASSES,
        names=chosen.classes,
    )


def _unnamed(setting: str) -> str:
    return f"{KEY} {setting}: neither the file's header nor its name says which timm model it is"


def _check_values(setting: str, config: Config, theirs: tuple[Any, ...]) -> None:
    """Raise UserError if the teacher has learned from other channels, bits, or range of values (`theirs`)."""
    ours = (config.DATA.IMAGE_CHANNELS, config.DATA.BITS, config.DATA.value_range)
    for key, its, mine in zip(("IMAGE_CHANNELS", "BITS", "RANGE"), theirs, ours, strict=True):
        if its != mine:
            raise UserError(f"{KEY} {setting}: trained with DATA.{key} {its}, but here it is {mine}.")


def _parse(setting: str, taught: bool) -> tuple[str | None, str]:
    """timm's name of the model, and the place of its weights: a file, or that name again. No name for a run.

    `taught`: whether the student is of a family that PaddleViT distils, always from the same teacher.
    """
    name, separator, file = setting.partition("=")
    if separator and is_timm_name(name):
        if not file:
            raise UserError(f"{KEY} {setting}: no file after the =. {FORMS}")
        return name, str(Path(file).expanduser())
    path = Path(setting).expanduser()
    with _errors_name_teacher():
        header = read_header(path)
    if path.is_file() and "settings" not in header and not (path.parent / META).exists():
        candidates = [str(header.get("model", "")), path.stem, path.name.partition(".")[0]]
        model = next(filter(is_timm_name, filter(None, candidates)), None)
        if model is None and not taught:
            raise UserError(f"{_unnamed(setting)}. {FORMS}")
        return model or PADDLEVIT, str(path)
    if path.exists():
        return None, str(path)
    if is_timm_name(setting):
        return setting, setting
    suggestion = similar_models(setting, timm.list_pretrained())
    raise UserError(f"{KEY} {setting}: no such file, folder or timm model.{suggestion} {FORMS}")


@contextlib.contextmanager
def _errors_name_teacher() -> Iterator[None]:
    """Replace the student's setting by the teacher's in errors: both kinds of weights are found by the same code."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("MODEL.PRETRAINED", KEY).replace("Pretrained weights", KEY)
        raise UserError(text if KEY in text else f"{KEY}: {text}") from None
