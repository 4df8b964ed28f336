"""The teacher of a distillation: where it comes from, and how it is asked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.amp.fp32_modules import force_fp32
from engine.amp.precision import Precision
from engine.checkpoint.fields import Input, check_fields
from engine.checkpoint.folder import META
from engine.checkpoint.saved import config_of, find_saved
from engine.checkpoint.state import load_weights
from engine.checkpoint.weights_file import read_header
from engine.inputs.normalize import per_channel
from engine.machine.memory import is_out_of_memory
from models import build_model, check_pretrained, count_parameters, load_pretrained
from models.names import is_timm_name
from utils.config import Config
from utils.errors import UserError, nearest
from utils.log import log

KEY = "TRAIN.TEACHER_MODEL"
EXAMPLE = "regnety_160.deit_in1k"
FORMS = (
    f"Give a name of timm's that has weights ({EXAMPLE}, say), a run or checkpoint, or a file as NAME=FILE with timm's "
    "name of its model."
)


@dataclass(frozen=True)
class Origin:
    """A model that can teach, and what it is used to."""

    model: nn.Module
    where: str
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    names: list[str] | None = None
    """Of the classes, where they are known."""


class Teacher:
    """Frozen. Asked with images as the student sees them: normalised its way, erased and mixed, of any size."""

    def __init__(self, origin: Origin, config: Config, precision: Precision) -> None:
        self.origin, self._precision, self.asked = origin, precision, f"{config.TRAIN.TEACHER_MODEL}"
        self.model = origin.model.eval().requires_grad_(False).to(precision.device)
        self.fingerprint = _fingerprint(self.model)
        data, channels = config.DATA, config.DATA.IMAGE_CHANNELS
        mine, theirs = (
            torch.tensor([per_channel(values, channels) for values in pair], dtype=torch.float64)
            for pair in ((data.IMAGENET_MEAN, data.IMAGENET_STD), (origin.mean, origin.std))
        )
        # From one normalisation to the other: back to pixels and forth again, in one step.
        factor, offset = mine[1] / theirs[1], (mine[0] - theirs[0]) / theirs[1]
        self._sees_alike = torch.equal(mine, theirs)
        self._factor, self._offset = (t.float().reshape(1, -1, 1, 1).to(precision.device) for t in (factor, offset))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits in fp32."""
        size, device, level = self.origin.image_size, images.device.type, self._precision.level
        if images.shape[-1] != size:
            images = F.interpolate(images, size=(size, size), mode="bicubic", antialias=True, align_corners=False)
        if not self._sees_alike:
            images = torch.addcmul(self._offset, images, self._factor)
        # Under autocast at every level of AMP: where the student computes in half weights, the teacher has its own.
        dtype = self._precision.choice.dtype if level != "O0" else None
        with torch.autocast(device, dtype, enabled=level != "O0"):
            return self.model(images).float()

    def words(self) -> str:
        total, _ = count_parameters(self.model)
        return f"{self.origin.where}, {total:,} parameters, frozen; images of {self.origin.image_size}"

    def as_noted(self) -> dict[str, str]:
        """For run.json and checkpoints."""
        return {"teacher_model": self.asked, "teacher": self.origin.where, "teacher_sha256": self.fingerprint}


def check_teacher(config: Config) -> None:
    """What can be known before any model is built."""
    train = config.TRAIN
    if config.EVAL:
        return
    if train.DISTILLATION_TYPE is None:
        if train.TEACHER_MODEL is not None:
            raise UserError(
                f"{KEY} {train.TEACHER_MODEL}: there is a teacher, but TRAIN.DISTILLATION_TYPE is null, so nobody "
                "would listen. Set it to hard or soft, or leave the teacher out."
            )
        return
    if train.TEACHER_MODEL is None:
        raise UserError(f"TRAIN.DISTILLATION_TYPE {train.DISTILLATION_TYPE} needs a teacher, {KEY}. {FORMS}")
    name, place = _parts(train.TEACHER_MODEL)
    if name is not None:  # of a run, more than that it is there is known once its files are read
        with _naming_the_teacher():
            check_pretrained(place)


def load_teacher(config: Config, precision: Precision) -> Teacher:
    """Raise UserError where it cannot teach this student."""
    wanted = config.TRAIN.TEACHER_MODEL
    assert wanted is not None  # checked before
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and then replaced
        origin = _origin(wanted, config, precision)
    if origin.classes != config.MODEL.NUM_CLASSES:
        raise UserError(
            f"{KEY} {wanted}: the teacher knows {origin.classes} classes, and MODEL.NUM_CLASSES is "
            f"{config.MODEL.NUM_CLASSES}. Both must be trained for the same ones."
        )
    teacher = Teacher(origin, config, precision)
    _ask_once(teacher, config, precision.device)
    return teacher


def check_fits(teacher: Teacher, names: list[str] | None, kept: dict[str, Any]) -> None:
    """Whether it means the data's classes, and is the one the run that is gone on with learned from (`kept`)."""
    origin = teacher.origin
    if kept.get("teacher_model") == teacher.asked and kept.get("teacher_sha256") != teacher.fingerprint:
        raise UserError(
            f"{KEY} {teacher.asked}: means {origin.where} now, whose weights are not those this run began with "
            f"({kept.get('teacher')}). Put them back, or name the teacher to go on with in another way."
        )
    pairs = zip(origin.names or (), names or (), strict=False)
    odd = next((f"class {n} is '{a}' there and '{b}' in the data" for n, (a, b) in enumerate(pairs) if a != b), None)
    if odd:
        raise UserError(f"{KEY} {origin.where}: {odd}; both must have the same classes in the same order.")


def _origin(wanted: str, config: Config, precision: Precision) -> Origin:
    name, place = _parts(wanted)
    if name is None:
        return _trained(Path(place), wanted, config, precision)
    known, channels = timm.get_pretrained_cfg(name), config.DATA.IMAGE_CHANNELS
    assert known is not None  # is_timm_name
    used_to = _input_of(Path(place))
    classes = known.num_classes if place == name else config.MODEL.NUM_CLASSES
    model = timm.create_model(name, num_classes=classes, in_chans=channels)
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    with _naming_the_teacher():
        load_pretrained(model, place, name)
    if any(parameter.isnan().any() for parameter in model.parameters()):
        raise UserError(
            f"{KEY} {wanted}: there are no weights for all of {name} with {classes} classes in it; a teacher needs its "
            "classifier too."
        )
    size = used_to.get("image_size", known.input_size[-1])
    mean, std = (tuple(used_to.get(key, getattr(known, key))) for key in ("mean", "std"))
    if len(mean) != channels:  # of colours, for grey images say
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    return Origin(model, wanted, size, mean, std, classes)


def _trained(place: Path, wanted: str, config: Config, precision: Precision) -> Origin:
    """A run's or checkpoint's model, as plain as it was built: how it computes follows from the student's settings."""
    with _naming_the_teacher():
        saved, choice = find_saved(place, "auto")
        theirs = config_of(saved)
    data = theirs.DATA
    if data.IMAGE_CHANNELS != config.DATA.IMAGE_CHANNELS:
        raise UserError(
            f"{KEY} {wanted}: was trained on images of {data.IMAGE_CHANNELS} channels, and DATA.IMAGE_CHANNELS is "
            f"{config.DATA.IMAGE_CHANNELS}."
        )
    model = build_model(theirs.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    load_weights(model, saved.tensors(choice.which), f"{saved.where(choice.which)}")
    log.info("Teacher %s: %s", wanted, choice.words)
    if precision.level != "O0":
        force_fp32(model, [*theirs.AMP.FP32_MODULES, *saved.fp32_modules()], precision.device.type)
    names = saved.meta.get("classes")
    where = f"{theirs.MODEL.NAME} of {saved.where(choice.which)}"
    return Origin(model, where, data.IMAGE_SIZE, data.IMAGENET_MEAN, data.IMAGENET_STD, theirs.MODEL.NUM_CLASSES, names)


def _parts(wanted: str) -> tuple[str | None, str]:
    """timm's name of the model and where its weights are: a file, or that name again; no name for a run of ours."""
    name, separator, file = wanted.partition("=")
    if separator and is_timm_name(name):
        if not file:
            raise UserError(f"{KEY} {wanted}: no file follows the =. {FORMS}")
        return name, str(Path(file).expanduser())
    path = Path(wanted).expanduser()
    if path.name == "regnety_160.pdparams":  # PaddleViT's default
        raise UserError(f"{KEY} {wanted}: of PaddleViT's RegNets no weights are read; timm's {EXAMPLE} is that model.")
    with _naming_the_teacher():
        header = read_header(path)
    if path.is_file() and "settings" not in header and not (path.parent / META).exists():
        named = [str(header.get("model", "")), path.name.partition(".")[0], path.stem]
        found = next(filter(is_timm_name, filter(None, named)), None)
        if found is None:
            raise UserError(f"{KEY} {wanted}: nothing in this file tells which model its weights are of. {FORMS}")
        return found, str(path)
    if path.exists():
        return None, str(path)
    if is_timm_name(wanted):
        return wanted, wanted
    hint = nearest(wanted, timm.list_pretrained())
    raise UserError(f"{KEY} {wanted}: there is no such file, folder, or model of timm's.{hint} {FORMS}")


def _input_of(file: Path) -> dict[str, Any]:
    """How the images of a file of weights are prepared, as far as its header says."""
    with _naming_the_teacher():
        header = read_header(file)
        exported = "timm_name" in header  # with these fields beside the others, and not under `input`
        found = header if exported else header.get("input", {})
        check_fields(Input, found, file)
    return found


def _ask_once(teacher: Teacher, config: Config, device: torch.device) -> None:
    """One grey image: what a teacher cannot take is found before training."""
    data, where = config.DATA, teacher.origin.where
    size, classes = data.IMAGE_SIZE, teacher.origin.classes
    try:
        shape = tuple(teacher(torch.zeros(1, data.IMAGE_CHANNELS, size, size, device=device)).shape)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{KEY} {where}: cannot take images of {teacher.origin.image_size} ({error}).") from None
    if shape != (1, classes):
        raise UserError(f"{KEY} {where}: gives {shape} for one image, where {(1, classes)} belongs.")


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextlib.contextmanager
def _naming_the_teacher() -> Iterator[None]:
    """Weights are found by the same code as the student's, which names the student's setting."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("MODEL.PRETRAINED", KEY).replace("Pretrained weights", KEY)
        raise UserError(text if KEY in text else f"{KEY}: {text}") from None
