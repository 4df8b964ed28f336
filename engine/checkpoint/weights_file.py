"""Files of weights alone, as scripts/checkpoint.py and scripts/export.py write them: what their header says."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.fields import Told, check_fields
from engine.checkpoint.folder import WEIGHTS
from utils.better_weights import Which
from utils.errors import UserError

MADE_BY, EXPORTED = "vitamp", "vitamp"
"""The program that wrote the file; and the one key under which an export has all that it says."""
NEEDED = ("settings", "classes", "choices", "fp32_modules")
PROGRAMS = (".onnx", ".pt2")


def read_header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of itself, decoded; nothing of another kind of file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            header = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}).") from None
    found = {key: _decoded(text) for key, text in header.items()}
    exported = found.get(EXPORTED)
    return exported if isinstance(exported, dict) else found


def read_told(file: Path) -> tuple[dict[str, Any], Which]:
    """What a checkpoint's meta.json would say of these weights, and which they are; UserError where it is unknown."""
    if file.suffix != ".safetensors":
        raise UserError(f"{file}: {_other_kind(file)}. Name a run, a checkpoint, or a file that {_tools()} wrote.")
    header = read_header(file)
    if header.get("made_by") != MADE_BY:
        raise UserError(
            f"{file}: its header is not vitamp's, so it does not say which model these weights are of, nor how images "
            f"are prepared for it. Validate it with the settings of its model: {_validate(file)}"
        )
    if missing := [key for key in NEEDED if key not in header]:
        raise UserError(
            f"{file}: written by an older vitamp, its header has no {', '.join(missing)}. Write it again from its run, "
            f"by python scripts/checkpoint.py strip RUN -out new.safetensors, or validate it with the settings of its "
            f"run: {_validate(file)}"
        )
    meta = {key: header[key] for key in (*NEEDED, "metrics") if key in header}
    check_fields(Told, meta, file)
    told = str(header.get("weights"))
    return meta, "ema" if told == "ema" or "moving average" in told else "model"


def _decoded(text: str) -> Any:
    """Texts are kept as they are, and all else as JSON."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict | list) or found is None else text
    return text


def _other_kind(file: Path) -> str:
    if file.suffix in PROGRAMS:
        return "a program that computes by itself, and not weights for vitamp (docs/export.md has code that runs it)"
    return "weights that do not say what they are of" if file.name.endswith(WEIGHTS) else "no weights of vitamp's"


def _tools() -> str:
    return "scripts/checkpoint.py strip or scripts/export.py -to safetensors"


def _validate(file: Path) -> str:
    return f"python main_single_gpu.py -cfg CONFIG.yaml -eval -pretrained {file}"
