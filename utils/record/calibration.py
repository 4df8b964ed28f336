"""calibration.json of a run: the temperatures that scripts/evaluate.py -calibrate fitted to its weights.

A temperature divides the logits. It belongs to the weights with its hash: another checkpoint has another hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from utils.errors import UserError
from utils.files import read_json
from utils.record.meta import Fields, Number, check_fields
from utils.record.run_folder import run_folder_of, write_json
from utils.text import counted

FILE, ALL = "calibration.json", "temperatures"


class Calibration(Fields):
    """Also a field of the header of a file of weights alone."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    images: Number
    """Number of images that it was fitted on"""

    @property
    def words(self) -> str:
        return f"temperature {self.temperature:.4g}, fitted on {counted(self.images, 'image')}"


class Fitted(Calibration):
    """One in calibration.json."""

    sha256: list[str]
    """Of the weights' file, or of its shards in order"""
    checkpoint: str
    weights: str
    data: str
    precision: str
    before: dict[str, float]
    """NLL and ECE (in percent) of the uncalibrated model"""
    crossfitted: dict[str, float]
    """The same, of images that the temperature was not fitted on"""


class _File(Fields):
    temperatures: list[Fitted]


def file_for(place: Path) -> Path | None:
    """calibration.json of the run that the checkpoint `place` is in; None outside a run."""
    folder = run_folder_of(place)
    return folder / FILE if folder is not None else None


def read_calibrations(place: Path) -> list[Fitted]:
    """All temperatures of the run that the checkpoint `place` is in."""
    file = file_for(place)
    if file is None or not file.exists():
        return []
    try:
        content = read_json(file)
        check_fields(_File, content, file)
    except UserError as error:
        raise UserError(f"{error} Fit again (evaluate.py RUN -calibrate) after removing the file.") from None
    return _File.model_validate(content).temperatures


def keep_calibration(place: Path, sha256: list[str], fitted: Fitted | None) -> None:
    """Replace the temperature of the weights with this hash; `fitted` None: remove it."""
    others = [one for one in read_calibrations(place) if one.sha256 != sha256]
    kept: list[dict[str, Any]] = [one.model_dump() for one in (*others, *((fitted,) if fitted else ()))]
    file = file_for(place)
    assert file is not None  # checked before the fit
    write_json(file, {ALL: kept})
