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

from engine.amp.low_precision import force_fp32
from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import BatchTransform, TransformedBatch, mean_and_std
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
    """Computes (1 - alpha) x the loss for the labels + alpha x the loss for the teacher's logits.

    In a model with two classifiers, the first learns the labels and the second the teacher's logits. A single
    classifier learns both.
    """

    def __init__(self, label_loss: Callable[[Tensor, Tensor], Tensor], train: TrainConfig) -> None:
        super().__init__()
        self.label_loss = label_loss
        self.hard = train.DISTILLATION_TYPE == "hard"
        self.alpha = train.DISTILLATION_ALPHA
        self.tau = train.DISTILLATION_TAU

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch.

        `logits`: (images, classes), or (images, 2, classes) of two classifiers. `targets`: (images, 2, classes), the
        label and the teacher's logits of each image; or any labels that `label_loss` takes, without a teacher's logits.
        """
        if logits.ndim == 3:
            label_logits, distilled_logits = logits.unbind(1)
        else:
            label_logits = logits
            distilled_logits = logits
        has_teacher_logits = targets.ndim > 2
        if not has_teacher_logits:
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
    """Lets the model learn from a teacher too (TRAIN.DISTILLATION_TYPE).

    It is a `BatchTransform` that calls the run's own one, and adds the teacher's logits for the same images to the
    targets.
    """

    def __init__(
        self, config: Config, model: nn.Module, precision: Precision, names: list[str] | None, saved: Mapping[str, Any]
    ) -> None:
        """Load the teacher, and check that it fits the data and the run.

        `names`: classes of the data; None if unknown. `saved`: choices of the run that is resumed; empty for a new one.
        """
        # timm's models with two classifiers return both logits in training, from now on as one tensor. In validation,
        # they still return the mean.
        if hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)  # pyright: ignore[reportCallIssue]
            mix_in(model, StackedHeads)
        self.teacher = load_teacher(config, precision)
        check_teacher_matches(self.teacher, names, saved)
        self._train = config.TRAIN
        self._classes = torch.arange(self.teacher.source.classes, device=precision.device)

    def attach(self, to: Computing) -> None:
        if to.batch_transform is not self:  # else it is attached anew
            self._own_transform: BatchTransform = to.batch_transform
            self._stages = to.stages
            to.batch_transform = self
            to.criterion = DistillationLoss(to.criterion, self._train)

    def __call__(self, images: Tensor, labels: Tensor) -> TransformedBatch:
        """Erase and mix, and stack the teacher's logits under the targets: (images, 2, classes)."""
        batch = self._own_transform(images, labels)
        # The time so far counts as FORWARD, that of the teacher apart.
        self._stages.mark(FORWARD)
        teacher_logits = self.teacher(batch.images)
        self._stages.mark(TEACHER)
        targets = batch.targets
        if targets.ndim == 1:
            targets = (targets.unsqueeze(1) == self._classes).to(teacher_logits.dtype)  # one-hot
        return batch._replace(targets=torch.stack((targets, teacher_logits), dim=1))

    def rows(self) -> dict[str, str]:
        source = self.teacher.source
        total, _ = count_parameters(self.teacher.model)
        return {"teacher": f"{source.where}, {total:,} parameters, frozen; images of {one_line(source.image_size)}"}

    def noted(self) -> dict[str, str]:
        """Return the entries for run.json and checkpoints, which `check_teacher_matches` compares in a resumed run."""
        source = self.teacher.source.where
        return {"teacher_model": self.teacher.setting, "teacher": source, "teacher_sha256": self.teacher.fingerprint}


KEY = "TRAIN.TEACHER_MODEL"
EXAMPLE = "regnety_160.deit_in1k"
PADDLEVIT = "regnety_160"
"""Architecture of PaddleViT's default teacher, for files that do not say which model they are of"""
PADDLEVIT_FILE = "regnety_160.pdparams"
"""Path where PaddleViT looks for the weights of its default teacher"""
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
        """Freeze the teacher, move it to the device, and hash its weights. `config`: of the student."""
        self.source = source
        self._precision = precision
        self.setting = f"{config.TRAIN.TEACHER_MODEL}"
        """As the user gave it: a name of timm's, a path, or both"""
        self.model = source.model.eval().requires_grad_(False).to(precision.device)
        digest = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self.fingerprint = digest.hexdigest()
        data = config.DATA
        student_normalisation = mean_and_std(data.IMAGENET_MEAN, data.IMAGENET_STD, data.IMAGE_CHANNELS)
        teacher_normalisation = mean_and_std(source.mean, source.std, data.IMAGE_CHANNELS)
        student_mean, student_std = student_normalisation
        teacher_mean, teacher_std = teacher_normalisation
        # Undo the student's normalisation and apply the teacher's, in one step.
        factor = student_std / teacher_std
        offset = (student_mean - teacher_mean) / teacher_std
        self._same_normalisation = torch.equal(student_normalisation, teacher_normalisation)
        self._factor = factor.float().reshape(1, -1, 1, 1).to(precision.device)
        self._offset = offset.float().reshape(1, -1, 1, 1).to(precision.device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits in fp32, of images that are normalised for the student."""
        size = sides(self.source.image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
        if not self._same_normalisation:  # replace the student's normalisation by the teacher's
            images = torch.addcmul(self._offset, images, self._factor)
        # With AMP at any level, the teacher computes under autocast: it always keeps fp32 weights, also if the student
        # computes by a half-precision copy or has half-precision weights.
        in_half = self._precision.level != "O0"
        dtype = self._precision.choice.dtype if in_half else None
        with torch.autocast(images.device.type, dtype, enabled=in_half):
            return self.model(images).float()


def check_teacher(config: Config) -> None:
    """Raise UserError if the settings of distillation are incomplete, or the teacher's weights cannot be found.

    Called before any model is built.
    """
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
    name, weights = _parse_setting(train.TEACHER_MODEL, _paddlevit_distils(config))
    is_run = name is None  # whose files are checked when they are loaded
    if is_run:
        return
    try:
        with _errors_name_teacher():
            locate(weights, download=False)
    except UserError as error:
        if weights != EXAMPLE:
            raise
        # PaddleViT's default teacher by timm's name: there may be PaddleViT's own file.
        raise UserError(f"{error}\n  or give PaddleViT's file: -teacher_model {PADDLEVIT_FILE}") from None


def _paddlevit_distils(config: Config) -> bool:
    """Return whether the student is of a family of models that PaddleViT distils, always from the same teacher."""
    return config.MODEL.TYPE.casefold() in TAUGHT


def default_teacher(config: Config) -> tuple[str, str] | None:
    """Return PaddleViT's teacher for TRAIN.TEACHER_MODEL, and a note for the log.

    None where a user has to choose: for models of a family that PaddleViT does not distil, or if one is chosen already.
    """
    if config.EVAL or config.TRAIN.TEACHER_MODEL is not None or not _paddlevit_distils(config):
        return None
    # PaddleViT's file if it is there, else the same model of timm.
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
    """Raise UserError if the teacher has other classes than the data, or other weights than the run began with.

    `names`: classes of the data; None if unknown. `saved_choices`: of the run that is resumed; empty for a new one.
    A resumed run may name another teacher; only a change that the setting does not show is an error.
    """
    source = teacher.source
    same_setting = saved_choices.get("teacher_model") == teacher.setting
    if same_setting and saved_choices.get("teacher_sha256") != teacher.fingerprint:
        previous_file = saved_choices.get("teacher")
        if previous_file == source.where:
            change = "the teacher's weights have changed since this run began"
        else:  # such as a run's folder, whose best checkpoint is another one now
            change = f"the teacher's weights are now {source.where}, but this run began with {previous_file}"
        raise UserError(
            f"{KEY} {teacher.setting}: {change}. Restore the former weights; or, to resume with the changed teacher, "
            "copy its weights to another path and name that path."
        )
    # Their numbers are compared elsewhere; unknown names match any.
    for number, (taught, learned) in enumerate(zip(source.names or (), names or (), strict=False)):
        if taught != learned:
            raise UserError(
                f"{KEY} {source.where}: class {number} is '{taught}' in the teacher and '{learned}' in the data; both "
                "must have the same classes in the same order."
            )


def _load_source(setting: str, config: Config, precision: Precision) -> TeacherModel:
    """Load the model that TRAIN.TEACHER_MODEL (`setting`) names, with its preprocessing.

    UserError if weights are missing in the file, or if the teacher was trained on another kind of images.
    """
    name, place = _parse_setting(setting, _paddlevit_distils(config))
    if name is None:
        return _load_from_run(setting, place, config, precision)
    pretrained = timm_weights(name)
    channels = config.DATA.IMAGE_CHANNELS
    if pretrained is None:
        raise UserError(f"{KEY} {setting}: {name} is a model of your own code; name the folder of its run.")

    # The model and its weights. A file must have the classes of the student.
    uses_timms_weights = place == name
    classes = pretrained.num_classes if uses_timms_weights else config.MODEL.NUM_CLASSES
    header = {}
    model = timm.create_model(name, num_classes=classes, in_chans=channels)
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)  # weights that the file lacks are still NaN after loading
    try:
        with _errors_name_teacher():
            header = read_header(Path(place)).get("input") or {}
            check_fields(Input, header, Path(place))
            load_pretrained(model, place, name)
    except UserError as error:
        may_be_another_model = name == PADDLEVIT and name not in setting  # the user did not name it
        if not may_be_another_model:
            raise
        raise UserError(f"{error}\n{_unknown_model(setting)}, so {PADDLEVIT} was tried. {FORMS}") from None
    if any(parameter.isnan().any() for parameter in model.parameters()):
        raise UserError(
            f"{KEY} {setting}: some weights of {name} with {classes} classes are missing. A teacher needs its "
            "classifier, too."
        )

    # The preprocessing: that in the file's header, else timm's.
    size = size_of(header.get("image_size", pretrained.input_size[1:]))
    mean = tuple(header.get("mean", pretrained.mean))
    std = tuple(header.get("std", pretrained.std))
    # For plain images, weights are converted to their number of channels. Other images need a teacher of their own.
    trained_channels = channels if config.DATA.is_plain else len(mean)
    _check_images(setting, config, (trained_channels, header.get("bits", 8), tuple(header.get("range", (0, 255)))))
    if len(mean) != channels:  # grey images, and a teacher trained on colour: one value for the mean of its channels
        mean = (sum(mean) / len(mean),)
        std = (sum(std) / len(std),)
    return TeacherModel(model, where=setting, image_size=size, mean=mean, std=std, classes=classes)


def _load_from_run(setting: str, place: str, config: Config, precision: Precision) -> TeacherModel:
    """Load the model of the run or checkpoint at `place`; its precision follows from the student's settings."""
    with _errors_name_teacher():
        weights = chosen_at(Path(place))
        teacher_config = config_of_weights(weights)
        model_settings = teacher_config.MODEL
        # The student may use the same model of the user's own code, which is registered then. Its values are kept:
        # `use_of_weights` replaces them by those of the teacher's run, and they are restored once the teacher is built.
        student_model = own_named("model", model_settings.NAME)
        student_values = student_model.values if student_model else {}
        if teacher_config.USE:
            from engine.trained.own_code import use_of_weights

            run = run_folder_of(weights.place)
            recorded_files = noted_of(weights.meta.get(FIELD), weights.place)
            files_to_execute = [] if student_model else recorded_files  # a registered model needs no file
            use_of_weights(files_to_execute, teacher_config, run, kinds=("model",))
            current_hashes = {file["sha256"] for file in noted_files() if model_settings.NAME in file["registers"]}
            recorded_hashes = {file.sha256 for file in recorded_files}
            if student_model and current_hashes.isdisjoint(recorded_hashes):
                message = "Teacher %s: %s has changed since; the new file builds the teacher."
                log.warning(message, setting, student_model.file)
    if teacher_config.task != ONE_LABEL:
        raise UserError(f"{KEY} {setting}: trained {teacher_config.task.words}; a teacher needs one label per image.")
    data = teacher_config.DATA
    _check_images(setting, config, (data.IMAGE_CHANNELS, data.BITS, data.value_range))

    model = build_model(model_settings, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    if student_model:
        student_model.values = student_values
    load_weights(model, read_weights(weights), f"{weights.file}")
    log.info("Teacher %s: %s", setting, weights.words)
    if precision.level != "O0":  # AMP is on: modules that the teacher's run had in fp32 compute in fp32 here, too
        names_in_fp32 = list(teacher_config.AMP.FP32_MODULES) + fp32_modules(weights)
        force_fp32(model, names_in_fp32, precision.device.type)
    return TeacherModel(
        model,
        where=f"{model_settings.NAME} of {weights.file}",
        image_size=data.IMAGE_SIZE,
        mean=data.IMAGENET_MEAN,
        std=data.IMAGENET_STD,
        classes=model_settings.NUM_CLASSES,
        names=weights.classes,
    )


def _unknown_model(setting: str) -> str:
    """Begin an error about a file of weights whose model is unknown."""
    return f"{KEY} {setting}: neither the file's header nor its name says which timm model it is"


def _check_images(setting: str, config: Config, teacher_values: tuple[Any, ...]) -> None:
    """Raise UserError if the teacher was trained on images of another kind than the student's.

    `teacher_values`: the teacher's number of channels, bits per value, and range of values.
    """
    student_values = (config.DATA.IMAGE_CHANNELS, config.DATA.BITS, config.DATA.value_range)
    keys = ("IMAGE_CHANNELS", "BITS", "RANGE")
    for key, teacher_value, student_value in zip(keys, teacher_values, student_values, strict=True):
        if teacher_value != student_value:
            raise UserError(
                f"{KEY} {setting}: trained with DATA.{key} {teacher_value}, but here it is {student_value}."
            )


def _parse_setting(setting: str, paddlevit_distils: bool) -> tuple[str | None, str]:
    """Parse TRAIN.TEACHER_MODEL: return timm's name of the model, and the place of its weights.

    The place is a file, or timm's name again for timm's own weights. For a run or checkpoint the name is None, and the
    place is its path. UserError if the setting is none of these.
    `paddlevit_distils`: PaddleViT distils models of the student's family, always from the same teacher. Then a file
    that does not say its model is taken for weights of that teacher.
    """
    # NAME=FILE
    name, separator, file = setting.partition("=")
    if separator and is_timm_name(name):
        if not file:
            raise UserError(f"{KEY} {setting}: no file after the =. {FORMS}")
        return name, str(Path(file).expanduser())

    # A file of weights alone, which has no settings of a run in it or beside it
    path = Path(setting).expanduser()
    with _errors_name_teacher():
        header = read_header(path)
    is_weights_alone = path.is_file() and "settings" not in header and not (path.parent / META).exists()
    if is_weights_alone:
        name_without_endings, _, _ = path.name.partition(".")
        for candidate in (str(header.get("model", "")), path.stem, name_without_endings):
            if candidate and is_timm_name(candidate):
                return candidate, str(path)
        if not paddlevit_distils:
            raise UserError(f"{_unknown_model(setting)}. {FORMS}")
        return PADDLEVIT, str(path)

    # A run or checkpoint, or a name of timm's
    if path.exists():
        return None, str(path)
    if is_timm_name(setting):
        return setting, setting
    suggestion = similar_models(setting, timm.list_pretrained())
    raise UserError(f"{KEY} {setting}: no such file, folder or timm model.{suggestion} {FORMS}")


@contextlib.contextmanager
def _errors_name_teacher() -> Iterator[None]:
    """Replace MODEL.PRETRAINED by TRAIN.TEACHER_MODEL in errors, because the same code finds both kinds of weights."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("MODEL.PRETRAINED", KEY).replace("Pretrained weights", KEY)
        raise UserError(text if KEY in text else f"{KEY}: {text}") from None
