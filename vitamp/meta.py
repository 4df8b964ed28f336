"""Reads and checks meta.json of a checkpoint. A missing or wrong field is an error that names it.

The classes list only fields that the program reads; others are ignored. Fields that older versions did not write are
optional.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vitamp.errors import UserError
from vitamp.files import read_json
from vitamp.metrics import ONE_LABEL

META = "meta.json"
FORMAT = 1
META_HASH = "meta_sha256"
"""Field of meta.json with the hash of its other fields. Older versions did not write it."""
MOST_LISTED = 3

Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]


class Fields(BaseModel):
    """The fields of a JSON object, which may also have others."""

    model_config = ConfigDict(strict=True, extra="allow")


class Seal(Fields):
    """Size and hash of one file."""

    size: Count
    sha256: str


class Batch(Fields):
    """The global batch that a run trained with."""

    per_process: Number
    accumulated: Number
    processes: Number
    asked: Number | None = None
    """TRAIN.ACCUM_ITER of the settings."""


class Samples(Fields):
    """The identity of the training split: a resumed run must have the same."""

    number: Number
    updates: Number
    order: str
    data: str | None = None


class Choices(Fields):
    """Choices that a resumed run repeats. An unknown kind of attention counts as none."""

    attention: str = ""
    batch_size: Number = 1
    compile: Literal["none", "blocks", "whole"] = "none"
    computed_in: str = ""


class WeightsMeta(Fields):
    """Fields that are needed to use the weights; in a file of weights alone, they are in the header."""

    choices: Choices = Choices()
    classes: list[str] | None = None
    fp32_modules: list[str] = []
    metrics: dict[str, float | None] = {}
    samples: Samples | None = None
    settings: dict[str, Any]
    """Dotted key -> value; they are checked when they are loaded."""
    thresholds: dict[Literal["model", "ema"], list[float]] = {}  # by the names in vitamp.metrics.SETS
    """With several labels per sample: set of weights -> the lowest probability at which each class is predicted."""


class BestState(Fields):
    """The best validation of a run so far."""

    figure: float | None = None
    """Value of the metric."""
    loss: float | None = None
    """Validation loss of the same weights, which decides between equal values."""
    kind: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = ONE_LABEL.best.name
    """Name of the metric (SAVE_BEST_BY), with the prefix of the better set of weights."""
    update: Count = 0
    epoch: Count = 0
    stale: Count = 0
    """Number of validations since the metric has improved."""


class Adapters(Fields):
    """The adapters in a checkpoint (MODEL.LORA), which does not hold the frozen weights."""

    base: Seal
    """Size and hash of the file with the frozen weights."""
    factor: float
    """Number by which the product of an adapter's matrices is multiplied."""
    source: str | None = None
    """The weights from which the frozen weights were made: MODEL.PRETRAINED."""


class Meta(WeightsMeta):
    """All fields of meta.json."""

    format: int
    files: dict[str, Seal]
    epoch: Number
    update: Count
    epoch_finished: bool
    best: BestState | None = None
    batch: Batch
    frozen: list[str] = []
    lora: Adapters | None = None
    val_data: str | None = None
    """Hash of the names and labels of the validation images."""
    val_images: Count | None = None
    samples: Samples  # pyright: ignore[reportIncompatibleVariableOverride,reportGeneralTypeIssues]

    @model_validator(mode="after")
    def _lists_files_of_its_own(self) -> Meta:
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"the field 'files' lists {name!r}, which is not the name of a file in this folder")
        return self


class Input(Fields):
    """Preprocessing of images, in meta.json and in the header of a file of weights alone."""

    image_size: Number | Annotated[list[Number], Field(min_length=2, max_length=2)] = 1
    """One number for a square, else height and width."""
    crop_pct: float = 1.0
    crop_mode: str = ""
    interpolation: str = ""
    mean: list[float] = []
    std: list[float] = []


def read_meta(path: Path) -> dict[str, Any]:
    """Read and check a meta.json; a UserError if it is missing, damaged or edited, or of another format."""
    if not path.exists():
        raise UserError(f"{path.parent}: incomplete checkpoint, {path.name} is missing.")
    meta = read_json(path)
    version = meta.get("format", FORMAT)
    if isinstance(version, int) and version != FORMAT:
        raise UserError(f"{path.parent}: written in format {version}; this version of vitamp reads format {FORMAT}.")
    check_fields(Meta, meta, path)
    if meta.get(META_HASH, hash_of(meta)) != hash_of(meta):
        raise UserError(f"{path}: damaged or edited, its contents are not what was written.")
    return meta


def unchecked_meta(folder: Path) -> dict[str, Any]:
    """Read the meta.json in a folder, which may be of another program; empty without one.

    Its fields are not checked. Raises UserError if it cannot be read.
    """
    path = folder / META
    return read_json(path) if path.is_file() else {}


def hash_of(meta: dict[str, Any]) -> str:
    """Hash of the fields of a meta.json, without META_HASH itself; it does not depend on their layout in the file."""
    fields = {key: value for key, value in json.loads(json.dumps(meta)).items() if key != META_HASH}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def check_fields(fields: type[BaseModel], content: object, path: Path) -> None:
    """Raise UserError if a field of an object that was read from a file is missing or wrong.

    fields: the fields that it must have
    content: the object
    path: the file, for the error
    """
    try:
        fields.model_validate(content)
    except ValidationError as error:
        problems = []
        for details in error.errors(include_url=False, include_input=False):
            field = ".".join(map(str, details["loc"]))
            text = details["msg"].removeprefix("Value error, ")
            if details["type"] == "missing":
                problems.append(f"{field} is missing")
            else:
                problems.append(f"{field}: {text}" if field else text)
        more = f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
        raise UserError(f"{path}: damaged, {'; '.join(problems[:MOST_LISTED])}{more}.") from None
