"""Which weights are chosen: of a run its best checkpoint, and of a checkpoint the set that validated better.

Besides runs and checkpoints, this reads files of weights alone, with a description in their header, which
scripts/checkpoint.py and scripts/export.py write. The temperatures of a run, which scripts/evaluate.py -calibrate
fits, are in its calibration.json. A temperature divides the logits; it belongs to the weights with its hash.
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
from vitamp.files import kind_of_path, parse_json, read_json
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
"""Value of `made_by` in the header"""
EXPORTED = "vitamp"
"""The one key of the header under which an export has all its fields"""
NEEDED = ("settings", "classes", "choices", "fp32_modules")
WRITERS = f"`{started('checkpoint')} strip` or `{started('export')} -to safetensors`"
PROGRAMS = (".onnx", ".xml", ".pt2")


class Calibration(Fields):
    """Also a field of the header of a file of weights alone."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    images: Number
    """Number of images that it was fitted on"""

    @property
    def words(self) -> str:
        images = "image" if self.images == 1 else "images"
        return f"temperature {self.temperature:.4g}, fitted on {self.images:,} {images}"


class Fitted(Calibration):
    """A temperature in calibration.json."""

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
    after: dict[str, float] | None = None
    """The same with the temperature, of the images that it was fitted on; None: in a file of an earlier version"""
    input: dict[str, Any] | None = None
    """As in meta.json; None: not known, in a file of an earlier version"""


class _Calibrations(Fields):
    temperatures: list[Fitted]


@dataclass(frozen=True)
class Chosen:
    """Weights at a path, checked but not loaded, and what is recorded of them."""

    place: Path
    """The checkpoint's folder, or the file of weights alone"""
    which: WeightSet
    words: str
    """For the log: step-000000088 (the run's best), plain weights, top-1 95.00 %; EMA: 92.50 %"""
    sets: tuple[WeightSet, ...]
    """All that are there"""
    meta: Mapping[str, Any]
    """Fields of meta.json, or those of them that the header of the file has"""
    checkpoint: Checkpoint | None = None
    """None: a file of weights alone"""

    def other(self, which: WeightSet) -> Chosen:
        """Another set at the same place."""
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
        """Names in the order of the labels, if the training data had names."""
        return self.meta.get("classes")

    @property
    def choices(self) -> dict[str, Any]:
        return self.meta.get("choices", {})

    @property
    def samples(self) -> dict[str, Any] | None:
        """Identity of the training split."""
        return self.meta.get("samples")

    @property
    def metrics(self) -> dict[str, float]:
        """Of these weights by their names without a prefix, as far as they are known."""
        return _metrics(self.meta).get(self.which, {})

    @property
    def thresholds(self) -> list[float] | None:
        """With several labels: the probability from which on each class is predicted."""
        return self.meta.get("thresholds", {}).get(self.which.name)

    @property
    def hashes(self) -> list[str]:
        """Of the file of these weights, or of its shards: what tells them from those of other checkpoints."""
        files = self.meta.get("files", {})
        return [files[name]["sha256"] for name in files_of(self.which.file, files)]

    @property
    def calibration(self) -> Calibration | None:
        """The temperature that was fitted to exactly these weights."""
        if self.checkpoint is None:
            kept = self.meta.get("calibration")
            return Calibration.model_validate(kept) if kept else None
        return next((one for one in read_calibrations(self.place) if one.sha256 == self.hashes), None)

    def with_calibration(self, applied: bool) -> str:
        """`words`, and those about the temperature."""
        words = self.describe_calibration(applied)
        return f"{self.words}; {words}" if words else self.words

    def describe_calibration(self, applied: bool) -> str:
        """For the log; '' if the run has no temperature at all."""
        own = self.calibration
        if own is not None:
            return f"calibrated ({own.words})" if applied else "not calibrated (-no_calibration)"
        others = self.checkpoint is not None and read_calibrations(self.place)
        return f"not calibrated (the temperatures in {CALIBRATION} are of other weights)" if others else ""


def chosen_at(path: Path, weights: str = BETTER) -> Chosen:
    """The weights of a run, of a checkpoint, or in a file of weights alone. `weights`: a value of -weights."""
    path = located(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder. Name a run, a checkpoint, or a file of weights.")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: this is {kind_of_path(path)}. Name a run, a checkpoint, or a file of weights.")
    reasons = []
    asked = BETTER
    if path.is_file() and path.name != META and seal_of(path) is None:
        meta, only = read_weights_meta(path)
        found = Chosen(path, only, "", (only,), meta)
    else:
        folder, why = checkpoint_of(path)
        if why:
            reasons.append(why)
        checkpoint = inspect(folder)
        meta = checkpoint.meta
        sets = tuple(which for which in SETS if checkpoint.has(which.file))
        found = Chosen(folder, sets[0], "", sets, meta, checkpoint)
        asked = next((which.name for which in SETS if path.name == which.file), BETTER)
        if meta["update"] == 0 and meta["settings"].get("MODEL.NEW_CLASSIFIER") == "probe":
            reasons.append("the linear probe before the first update")
    reason = ""
    if weights != BETTER:
        asked = weights
        reason = f"-weights {weights}"
    if asked != BETTER:
        found = found.other(set_named(asked))
    which, words = choose_weights(meta, found.sets, asked, reason)
    place = found.place.name
    if reasons:
        place += f" ({': '.join(reasons)})"
    return replace(found, which=which, words=f"{place}, {words}")


def choose_weights(
    meta: Mapping[str, Any], available: Collection[WeightSet], wanted: str, reason: str = ""
) -> tuple[WeightSet, str]:
    """Choose among the weights that are there, at least one. And words for the log.

    `meta`: of a checkpoint, perhaps a foreign one. `wanted`: a value of -weights. `reason`: why, if not auto.
    """
    of_sets = _metrics(meta)
    by = _decisive(meta, of_sets)
    values = {which: metrics[by.name] for which, metrics in of_sets.items() if by.name in metrics}
    better = best_set(values, by)
    best = meta.get("best")
    why = ""
    if wanted != BETTER:
        which = set_named(wanted)
        why = reason
    elif len(available) == 1:
        which = next(iter(available))
    elif better is not None:
        which = better
    elif isinstance(best, Mapping) and isinstance(best.get("kind"), str):
        which, _ = set_of(best["kind"])
        why = f"chosen without metrics of this update: the run's best validation was that of its {which.label} weights"
    else:
        which = PLAIN
        why = "by default: this checkpoint has no validation metrics"
    words = f"{which.label} weights"
    if why:
        words += f" ({why})"
    if which in values:
        words += f", {by.words} {by.number(values[which])}"
    for other, value in values.items():
        if other != which and other in available:
            words += f"; {other.label}: {by.number(value)}"
    return which, words


def _decisive(meta: Mapping[str, Any], of_sets: Mapping[WeightSet, Mapping[str, float]]) -> Metric:
    """The run's SAVE_BEST_BY; its default if it is missing or unknown, as in a foreign meta.json."""
    key = meta.get("settings", {}).get("SAVE_BEST_BY")
    if isinstance(key, str) and (key in METRICS or any(key in metrics for metrics in of_sets.values())):
        return metric_named(key)
    return ONE_LABEL.best


def _metrics(meta: Mapping[str, Any]) -> dict[WeightSet, dict[str, float]]:
    """The metrics of each set of weights by their names without its prefix."""
    found = {which: {} for which in SETS}
    metrics = meta.get("metrics")
    if isinstance(metrics, Mapping):
        for key, value in metrics.items():
            which, name = set_of(key)
            if is_number(value):
                found[which][name] = value
    return found


def read_calibrations(place: Path) -> list[Fitted]:
    """All temperatures of the run that the checkpoint `place` is in."""
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
    """Decoded header of a safetensors file, with the names of meta.json; empty for another kind of file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        # safetensors says of a file that may not be read that it does not exist
        with open(file, "rb"), safe_open(str(file), framework="np") as opened:
            header = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}).") from None
    fields: dict[str, Any] = header.copy()
    for key, text in header.items():  # lists, dictionaries and null are JSON; any other text is itself
        with contextlib.suppress(ValueError):
            value = parse_json(text)
            if value is None or isinstance(value, dict | list):
                fields[key] = value
    exported = fields.get(EXPORTED)
    found = exported if isinstance(exported, dict) else fields
    if "timm_name" in found:  # an export has all at the top
        call = {"name": found["timm_name"], "arguments": found.get("timm_arguments", {})}
        found = {**found, "timm": call, "input": found}
    return found


def read_weights_meta(file: Path) -> tuple[dict[str, Any], WeightSet]:
    """Fields that a checkpoint's meta.json would have for these weights, and which weights they are.

    UserError if the header does not have them.
    """
    if file.suffix != ".safetensors":
        other = "not weights of vitamp"
        if file.suffix in PROGRAMS:
            other = "an exported program, not weights for vitamp (docs/export.md has code that runs it)"
        elif file.name.endswith(WEIGHTS):
            other = "weights without a description of their model"
        raise UserError(f"{file}: {other}. Name a run, a checkpoint, or a file written by {WRITERS}.")
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
    # An export names its weights "ema", a file of checkpoint.py strip "the EMA".
    words = str(header.get("weights"))
    for which in SETS:
        if which != PLAIN and re.search(rf"\b{which.name}\b", words, re.IGNORECASE):
            return header, which
    return header, PLAIN


def encoded(fields: dict[str, Any]) -> dict[str, str]:
    """The header of a file: safetensors stores strings only; other values are JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
