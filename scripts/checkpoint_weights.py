"""scripts/checkpoint.py average and strip: weights out of checkpoints, in a file that explains itself."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from engine.checkpoint import EMA, MODEL, Checkpoint, naming_the_fault, read_index
from engine.trained import MADE_BY, Saved
from scripts.checkpoint_files import folders_of, verified
from utils.errors import EXIT_DONE, UserError
from utils.log import log
from utils.output_file import writing

TOLD = ("model", "classes", "num_classes", "input", "choices", "epoch", "update", "metrics", "config_hash")
"""What of meta.json goes into the header of the file."""
SECTIONS = (
    "MODEL.",
    "DATA.",
    "TRAIN.",
    "AMP.",
    "SEED",
    "DEVICE",
    "THREADS",
    "CPU_FP32",
    "CPU_BF16",
    "DETERMINISTIC",
    "DIST.STRATEGY",
)
OWN = ("MODEL.PRETRAINED", "DATA.DATA_PATH", "DATA.CACHE", "DATA.EXCLUDE", "TRAIN.TEACHER_MODEL")
"""Settings with paths in them, which are nobody else's business."""


def strip(path: Path, out: Path, weights: str) -> int:
    source = verified(_one(path))
    name = _file([source], weights)
    write_weights(out, source.tensors(name), _header(source, {"weights": _words(name), "from": source.folder.name}))
    log.info("%s: %s of %s, without optimiser and position", out, _words(name), source.folder)
    return EXIT_DONE


def average(paths: list[Path], last: int | None, out: Path, weights: str) -> int:
    sources = [verified(folder) for folder in (_last(paths[0], last) if last else map(_one, paths))]
    name = _file(sources, weights)
    mean = _mean(sources, name)
    names = [source.folder.name if last else f"{source.folder}" for source in sources]
    header = _header(sources[-1], {"weights": f"average of {_words(name)}", "from": names}, averaged=True)
    write_weights(out, mean, header)
    log.info("%s: uniform average of %s of %d checkpoints:", out, _words(name), len(sources))
    for source in sources:
        log.info("  %s", source.folder)
    log.info("No figure is known of it yet: validate it by -eval -pretrained %s.", out)
    return EXIT_DONE


def _one(path: Path) -> Path:
    """A checkpoint is itself; of a run, the best one, else the last."""
    folders = folders_of(path)
    if len(folders) == 1:
        return folders[0]
    index = read_index(folders[0].parent)
    names = {folder.name: folder for folder in folders}
    return names.get(index.get("best") or "", folders[-1])


def _last(path: Path, count: int) -> list[Path]:
    folders = folders_of(path)
    if len(folders) < count:
        raise UserError(
            f"-last {count}: {path} has {len(folders)} checkpoint{'s' if len(folders) > 1 else ''}. "
            "KEEP_LAST and KEEP_EVERY say how many a run keeps."
        )
    return folders[-count:]


def _file(sources: list[Checkpoint], weights: str) -> str:
    """Which of their files: the moving average where all have one, unless the other was asked for."""
    without = [source.folder for source in sources if not source.has(EMA)]
    if weights == "ema" and without:
        raise UserError(f"-weights ema: {without[0]} has no moving average (TRAIN.MODEL_EMA); take -weights model.")
    return MODEL if weights == "model" or without else EMA


def _words(name: str) -> str:
    return "the moving average" if name == EMA else "the model's weights"


def _mean(sources: list[Checkpoint], name: str) -> dict[str, Tensor]:
    """Tensor by tensor, summed in double precision: of many checkpoints only one tensor each is in memory."""
    files = [source.one_by_one(name) for source in sources]
    shapes = [{key: file.shape(key) for key in file} for file in files]
    for source, found in zip(sources, shapes, strict=True):
        if found != shapes[0]:
            key = next(k for k in sorted({*found, *shapes[0]}) if found.get(k) != shapes[0].get(k))
            raise UserError(
                f"{source.folder} and {sources[0].folder} are of different architectures and have no average: "
                f"{key} is {found.get(key, 'not there')} and {shapes[0].get(key, 'not there')}."
            )
    return {key: _mean_of([file[key] for file in files]) for key in shapes[0]}


def _mean_of(tensors: list[Tensor]) -> Tensor:
    if not tensors[-1].is_floating_point():  # a count of batches has no average
        return tensors[-1]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def _header(source: Checkpoint, origin: dict[str, Any], averaged: bool = False) -> dict[str, str]:
    """safetensors keeps texts only; what is not one is JSON."""
    known = {key: source.meta[key] for key in TOLD if key in source.meta and not (averaged and key == "metrics")}
    saved = Saved(source.folder, source.meta, source)
    if settings := saved.settings():
        known["settings"] = {key: value for key, value in settings.items() if _is_told(key)}
        known["fp32_modules"] = saved.fp32_modules()
    content = {**known, **origin, "made_by": MADE_BY}
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in content.items()}
    return {"format": "pt", **plain}


def _is_told(key: str) -> bool:
    return key.startswith(SECTIONS) and key not in OWN


def write_weights(out: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Under its name only once it is whole."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    with writing(out, "-out"):
        try:
            with naming_the_fault(out):
                safetensors.torch.save_file(tensors, temporary, metadata=header)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(out)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
