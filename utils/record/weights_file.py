"""Headers of files of weights alone, which scripts/checkpoint.py and scripts/export.py write."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from utils.errors import UserError
from utils.files import parse_json
from utils.record.calibration import Calibration
from utils.record.checkpoints import WEIGHTS
from utils.record.meta import WeightsMeta, check_fields
from utils.record.weight_sets import PLAIN, SETS, WeightSet

MADE_BY, EXPORTED = "vitamp", "vitamp"
"""Value of `made_by` in the header; and the one key under which an export has all its fields."""
NEEDED = ("settings", "classes", "choices", "fp32_modules")
PROGRAMS = (".onnx", ".pt2")


def read_header(file: Path) -> dict[str, Any]:
    """Decoded header of a safetensors file; empty for another kind of file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(str(file), framework="np") as opened:
            header = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}).") from None
    fields = {key: _decoded(text) for key, text in header.items()}
    exported = fields.get(EXPORTED)
    return exported if isinstance(exported, dict) else fields


def preprocessing_in(header: dict[str, Any]) -> Any:
    """Fields of `Input`; None if the header has none."""
    return header if "timm_name" in header else header.get("input")  # an export has them at the top level


def read_weights_meta(file: Path) -> tuple[dict[str, Any], WeightSet]:
    """Fields that a checkpoint's meta.json would have for these weights, and which weights they are.

    UserError if the header does not have them.
    """
    if file.suffix != ".safetensors":
        raise UserError(f"{file}: {_other_kind(file)}. Name a run, a checkpoint, or a file written by {_tools()}.")
    header = read_header(file)
    if header.get("made_by") != MADE_BY or not header.keys() >= {*NEEDED}:
        raise UserError(
            f"{file}: its header was not written by {_tools()}, so the model and its preprocessing are unknown. "
            f"Validate it with the settings of its model: python main_single_gpu.py -cfg CONFIG.yaml -eval -pretrained "
            f"{file}"
        )
    meta = {
        key: header[key]
        for key in (*NEEDED, "metrics", "samples", "thresholds", "calibration", "own_code")
        if key in header
    }
    check_fields(WeightsMeta, meta, file)
    if meta.get("calibration"):
        check_fields(Calibration, meta["calibration"], file)
    return meta, _set_in(str(header.get("weights")))


def _set_in(words: str) -> WeightSet:
    """The weights that the header's `weights` names: "ema" in an export, "the EMA" in a file of strip."""
    others = [which for which in SETS if which != PLAIN]
    return next((one for one in others if re.search(rf"\b{one.name}\b", words, re.IGNORECASE)), PLAIN)


def encoded(fields: dict[str, Any]) -> dict[str, str]:
    """The header of a file: safetensors stores strings only; other values are JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}


def _decoded(text: str) -> Any:
    """Lists, dictionaries and null from JSON; any other text unchanged."""
    with contextlib.suppress(ValueError):
        value = parse_json(text)
        return value if isinstance(value, dict | list) or value is None else text
    return text


def _other_kind(file: Path) -> str:
    if file.suffix in PROGRAMS:
        return "an exported program, not weights for vitamp (docs/export.md has code that runs it)"
    return "weights without a description of their model" if file.name.endswith(WEIGHTS) else "not weights of vitamp"


def _tools() -> str:
    return "scripts/checkpoint.py strip or scripts/export.py -to safetensors"
