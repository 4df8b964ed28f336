"""Chooses weights: of a run those of its best checkpoint, and of a checkpoint the set that validated better.

Besides runs and checkpoints, this reads files of weights alone, which scripts/checkpoint.py and scripts/export.py write
with a description in their header. The calibration.json of a run has the temperatures that scripts/evaluate.py
-calibrate fits. A temperature divides the logits; it belongs to the weights with its hash.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError, safe_open

from vitamp.checkpoints import WEIGHTS, Checkpoint, checkpoint_of, files_of, inspect, located, run_folder_of, seal_of
from vitamp.errors import TRAIN, UserError, started
from vitamp.files import kind_of_path, parse_json, read_json, suggested_path
from vitamp.meta import META, Fields, Number, WeightsMeta, check_fields
from vitamp.metrics import (
    BETTER,
    METRICS,
    ONE_LABEL,
    PLAIN,
    SETS,
    Metric,
    WeightSet,
    best_set,
    is_number,
    metric_named,
    set_named,
    set_of,
)

CALIBRATION = "calibration.json"
MADE_BY = "vitamp"
"""Value of `made_by` in the header."""
EXPORTED = "vitamp"
"""Key of the header under which an export has all its fields."""
NEEDED = ("settings", "classes", "choices", "fp32_modules")
WRITERS = f"`{started('checkpoint')} strip` or `{started('export')} -to safetensors`"
PROGRAMS = (".onnx", ".xml", ".pt2")


class Calibration(Fields):
    """A temperature, as the header of a file of weights alone may have it."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    images: Number
    """Number of images on which it was fitted."""

    @property
    def words(self) -> str:
        """The temperature in words for the log."""
        noun = "image" if self.images == 1 else "images"
        return f"temperature {self.temperature:.4g}, fitted on {self.images:,} {noun}"


class Fitted(Calibration):
    """A temperature in calibration.json."""

    sha256: list[str]
    """Hashes of the weights' file, or of its shards in order."""
    checkpoint: str
    weights: str
    data: str
    precision: str
    before: dict[str, float]
    """NLL and ECE (in percent) of the uncalibrated model."""
    crossfitted: dict[str, float]
    """The same with a temperature that was fitted on other images (cross-fitting)."""
    after: dict[str, float] | None = None
    """The same with this temperature, on the images on which it was fitted; None in a file of an earlier version."""
    input: dict[str, Any] | None = None
    """The field `input` of meta.json; None in a file of an earlier version."""


class _Calibrations(Fields):
    """The content of calibration.json."""

    temperatures: list[Fitted]


FEW_IMAGES = 30
"""Of a metric on fewer validation images than this, only their number is named."""


@dataclass(frozen=True)
class Chosen:
    """The weights that were chosen at a path, checked but not loaded, and what is recorded about them."""

    place: Path
    """The checkpoint's folder, or the file of weights alone."""
    which: WeightSet
    words: str
    """The choice in words for the log: step-000000088 (the run's best), plain weights, top-1 95.00 %; EMA: 92.50 %."""
    sets: tuple[WeightSet, ...]
    """All sets of weights at this place."""
    meta: Mapping[str, Any]
    """Fields of meta.json; for a file of weights alone, those in its header."""
    checkpoint: Checkpoint | None = None
    """The checkpoint; None for a file of weights alone."""

    def other(self, which: WeightSet) -> Chosen:
        """Choose another set of weights at the same place; a UserError if it is not there."""
        if which not in self.sets:
            instead = self.sets[0].name
            raise UserError(
                f"-weights {which.name}: {self.place} has no {which.described} weights; use -weights {instead}."
            )
        return replace(self, which=which)

    @property
    def file(self) -> Path:
        """The file of the weights, which may be in shards."""
        return self.place / self.which.file if self.checkpoint else self.place

    @property
    def classes(self) -> list[str] | None:
        """Names in the order of the labels; None if the training data had no names."""
        return self.meta.get("classes")

    @property
    def choices(self) -> dict[str, Any]:
        """The choices that the run made by measurement, as in meta.json."""
        return self.meta.get("choices", {})

    @property
    def samples(self) -> dict[str, Any] | None:
        """The identity of the training split."""
        return self.meta.get("samples")

    @property
    def metrics(self) -> dict[str, float]:
        """The known validation metrics of these weights: name without a prefix -> value."""
        return _metrics(self.meta).get(self.which, {})

    @property
    def thresholds(self) -> list[float] | None:
        """With several labels per image: the lowest probability at which each class is predicted."""
        return self.meta.get("thresholds", {}).get(self.which.name)

    @property
    def hashes(self) -> list[str]:
        """The hashes of the file of these weights, or of its shards, which identify the weights."""
        files = self.meta.get("files", {})
        return [files[name]["sha256"] for name in files_of(self.which.file, files)]

    @property
    def calibration(self) -> Calibration | None:
        """The temperature that was fitted to exactly these weights; None without one.

        A file of weights alone has it in its header; that of a checkpoint is in the run's calibration.json.
        """
        if self.checkpoint is None:
            recorded = self.meta.get("calibration")
            return Calibration.model_validate(recorded) if recorded else None
        for fitted in read_calibrations(self.place):
            if fitted.sha256 == self.hashes:
                return fitted
        return None

    def with_calibration(self, applied: bool) -> str:
        """The choice of weights and the calibration in words for the log. `applied`: whether it is applied."""
        calibration_words = self.describe_calibration(applied)
        return f"{self.words}; {calibration_words}" if calibration_words else self.words

    def describe_calibration(self, applied: bool) -> str:
        """The calibration of these weights in words for the log; '' if the run has no temperature at all."""
        calibration = self.calibration
        if calibration is not None:
            return f"calibrated ({calibration.words})" if applied else "not calibrated (-no_calibration)"
        if self.checkpoint is not None and read_calibrations(self.place):
            return f"not calibrated (the temperatures in {CALIBRATION} are of other weights)"
        return ""


def chosen_at(path: Path, weights: str = BETTER) -> Chosen:
    """Choose weights at a path: a run, a checkpoint, a file in one, or a file of weights alone.

    weights: a value of -weights, which always counts: `model`, `ema` or `auto`. With `auto`, a path to a file of a
        checkpoint chooses this file, and any other path the set of weights that validated better.
    """
    path = located(path)
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder{suggested_path(path)}. Name a run, a checkpoint, or a file of weights."
        )
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: this is {kind_of_path(path)}. Name a run, a checkpoint, or a file of weights.")

    # Find the checkpoint, and its sets of weights. The set and the words of `chosen` are final only at the end.
    place_reasons = []
    wanted = BETTER
    # The meta.json of a checkpoint records the size and hash of each of its other files.
    is_weights_alone = path.is_file() and path.name != META and seal_of(path) is None
    if is_weights_alone:
        meta, only_set = read_weights_meta(path)
        chosen = Chosen(place=path, which=only_set, words="", sets=(only_set,), meta=meta)
    else:
        folder, why_this_checkpoint = checkpoint_of(path)
        if why_this_checkpoint:
            place_reasons.append(why_this_checkpoint)
        checkpoint = inspect(folder)
        meta = checkpoint.meta
        sets = tuple(which for which in SETS if checkpoint.has(which.file))
        chosen = Chosen(place=folder, which=sets[0], words="", sets=sets, meta=meta, checkpoint=checkpoint)
        for which in SETS:
            if path.name == which.file:
                wanted = which.name
        if meta["update"] == 0 and meta["settings"].get("MODEL.NEW_CLASSIFIER") == "probe":
            place_reasons.append("the linear probe before the first update")

    # Choose one set of weights: that of -weights, else that of the path's file, else the better one.
    set_reason = ""
    if weights != BETTER:
        wanted = weights
        set_reason = f"-weights {weights}"
    if wanted != BETTER:
        chosen = chosen.other(set_named(wanted))  # a UserError if the checkpoint does not have it
    which, set_words = choose_weights(meta, chosen.sets, wanted, set_reason)
    place_words = chosen.place.name
    if place_reasons:
        place_words += f" ({': '.join(place_reasons)})"
    return replace(chosen, which=which, words=f"{place_words}, {set_words}")


def choose_weights(
    meta: Mapping[str, Any], available: Collection[WeightSet], wanted: str, reason: str = ""
) -> tuple[WeightSet, str]:
    """Choose one of the available sets of weights, and describe the choice for the log.

    With `wanted` auto, this is the only set, else that with the better validation after this update, else that with the
    best validation of the run, else the plain weights.

    meta: content of a checkpoint's meta.json, which may be of another program
    available: at least one set
    wanted: a value of -weights
    reason: why this set is wanted, in words; '' if `wanted` is auto
    """
    metrics_of_sets = _metrics(meta)
    metric = _deciding_metric(meta, metrics_of_sets)
    values = {which: metrics[metric.name] for which, metrics in metrics_of_sets.items() if metric.name in metrics}
    better_set = best_set(metrics_of_sets, metric)
    best_validation = meta.get("best")  # of the run
    why = ""
    if wanted != BETTER:
        which = set_named(wanted)
        why = reason
    elif len(available) == 1:
        which = next(iter(available))
    elif better_set is not None:
        which = better_set
    elif isinstance(best_validation, Mapping) and isinstance(best_validation.get("kind"), str):
        which, _ = set_of(best_validation["kind"])
        why = f"chosen without metrics of this update: the run's best validation was that of its {which.label} weights"
    else:
        which = PLAIN
        why = "by default: this checkpoint has no validation metrics"

    words = f"{which.label} weights"
    if why:
        words += f" ({why})"
    images = meta.get("val_images")
    if values and isinstance(images, int) and images < FEW_IMAGES:
        return which, f"{words}, validated on only {images} images"
    if which in values:
        words += f", {metric.words} {metric.number(values[which])}"
    for other_set, value in values.items():
        if other_set != which and other_set in available:
            words += f"; {other_set.label}: {metric.number(value)}"
    return which, words


def _deciding_metric(meta: Mapping[str, Any], metrics_of_sets: Mapping[WeightSet, Mapping[str, float]]) -> Metric:
    """The metric that SAVE_BEST_BY of the run names; top-1 if it is missing or unknown, as in a foreign meta.json."""
    name = meta.get("settings", {}).get("SAVE_BEST_BY")
    if isinstance(name, str) and (name in METRICS or any(name in metrics for metrics in metrics_of_sets.values())):
        return metric_named(name)
    return ONE_LABEL.best


def _metrics(meta: Mapping[str, Any]) -> dict[WeightSet, dict[str, float]]:
    """The metrics in meta.json: set of weights -> name without its prefix -> value."""
    metrics_of_sets = {which: {} for which in SETS}
    metrics = meta.get("metrics")
    if isinstance(metrics, Mapping):
        for field, value in metrics.items():
            which, name = set_of(field)
            if is_number(value):
                metrics_of_sets[which][name] = value
    return metrics_of_sets


def read_calibrations(place: Path) -> list[Fitted]:
    """Read all temperatures of the run that a checkpoint belongs to; empty without a run or a calibration.json.

    place: the checkpoint's folder
    """
    run = run_folder_of(place)
    file = run / CALIBRATION if run else None
    if file is None or not file.exists():
        return []
    try:
        content = read_json(file)
        check_fields(_Calibrations, content, file)
    except UserError as error:
        raise UserError(f"{error} Fit again (evaluate.py RUN -calibrate) after removing the file.") from None
    return _Calibrations.model_validate(content).temperatures


def read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file as fields with the names of meta.json; empty for another kind of file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        # The file is also opened by `open`, because safetensors reports a file without read permission as missing.
        with open(file, "rb"), safe_open(str(file), framework="np") as opened:
            header = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}).") from None
    fields: dict[str, Any] = header.copy()
    # A header has only strings. Lists, dictionaries and null are stored as JSON; any other text, even a number, stays.
    for key, text in header.items():
        with contextlib.suppress(ValueError):
            value = parse_json(text)
            if value is None or isinstance(value, dict | list):
                fields[key] = value
    exported_fields = fields.get(EXPORTED)
    if isinstance(exported_fields, dict):
        fields = exported_fields
    # An export has the fields about timm's model, and those of `input`, at the top level. meta.json has them one level
    # below, so that all of an export's fields also become its `input`.
    if "timm_name" in fields:
        timm_call = {"name": fields["timm_name"], "arguments": fields.get("timm_arguments", {})}
        return fields | {"timm": timm_call, "input": fields}
    return fields


def read_weights_meta(file: Path) -> tuple[dict[str, Any], WeightSet]:
    """Read the fields of meta.json in the header of a file of weights alone; return them, and its set of weights.

    Raises UserError if the header does not have the fields in NEEDED, or was not written by vitamp.
    """
    if file.suffix != ".safetensors":
        kind = "not weights of vitamp"
        if file.suffix in PROGRAMS:
            kind = "an exported program, not weights for vitamp (docs/export.md has code that runs it)"
        elif file.name.endswith(WEIGHTS):
            kind = "weights without a description of their model"
        raise UserError(f"{file}: {kind}. Name a run, a checkpoint, or a file written by {WRITERS}.")
    header = read_header(file)
    if header.get("made_by") != MADE_BY or not header.keys() >= set(NEEDED):
        raise UserError(
            f"{file}: its header was not written by {WRITERS}, so the model and its preprocessing are unknown. "
            f"Evaluate it with the settings of its model, or with -model NAME for one of timm: "
            f"{TRAIN} -cfg CONFIG.yaml -eval -pretrained {file}"
        )
    check_fields(WeightsMeta, header, file)
    if header.get("calibration"):
        check_fields(Calibration, header["calibration"], file)
    # The header describes its weights in words: an export by "ema", a file of checkpoint.py strip by "the EMA". Without
    # the name of another set, they are the plain weights.
    words = str(header.get("weights"))
    for which in SETS:
        is_named = re.search(rf"\b{which.name}\b", words, re.IGNORECASE) is not None
        if which != PLAIN and is_named:
            return header, which
    return header, PLAIN


def encoded(fields: dict[str, Any]) -> dict[str, str]:
    """Convert fields to the header of a safetensors file, which has strings only: other values become JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
