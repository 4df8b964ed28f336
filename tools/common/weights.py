"""Write weights from checkpoints to a file whose header describes them: `checkpoint.py average` and `strip`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from datasets.base import HUB_PREFIX
from datasets.shards import hub
from engine.checkpoint.folder import fp32_modules, open_tensors, raising_os_errors, read_tensors
from engine.optim.class_weights import BALANCED
from engine.optim.class_weights import KEY as CLASS_WEIGHTS
from tools.common.output_file import writing
from tools.common.progress import progress
from utils.errors import EXIT_DONE, UserError
from utils.files import replacing
from utils.log import log
from utils.record.checkpoints import Checkpoint, checkpoint_of, checkpoints_at, verify
from utils.record.chosen import Chosen, chosen_at
from utils.record.weight_sets import BETTER, PLAIN, SETS, WeightSet
from utils.record.weights_file import MADE_BY, encoded
from utils.text import counted

COPIED = (
    "model",
    "classes",
    "num_classes",
    "input",
    "choices",
    "epoch",
    "update",
    "metrics",
    "thresholds",
    "config_hash",
    "samples",
)
"""Fields of meta.json that the header gets."""
OF_VALIDATION = ("metrics", "thresholds")
"""Fields that hold for the validated weights alone, not for an average"""
SECTIONS = (
    "MODEL.",
    "DATA.",
    "TRAIN.",
    "AMP.",
    "SEED",
    "DEVICE",
    "THREADS",
    "CPU_FP32",
    "DETERMINISTIC",
    "DIST.STRATEGY",
    "SAVE_BEST_BY",
)
PRIVATE = ("MODEL.PRETRAINED", "DATA.DATA_PATH", "DATA.CACHE", "DATA.EXCLUDE", "TRAIN.TEACHER_MODEL")
"""Settings with private paths, which the header does not get."""
DATASET = "DATA.DATASET"


def strip(path: Path, out: Path, weights: str) -> int:
    source = chosen_at(path, weights)
    if source.checkpoint is None:
        raise UserError(f"{path}: this file already holds only weights; name a run or a checkpoint.")
    which, tensors = source.which, read_tensors(verify(source.checkpoint), source.which.file)
    log.info("%s", "; ".join(filter(None, (source.words, source.describe_calibration(applied=True)))))
    kept = source.calibration
    header = {"weights": which.words, "from": source.place.name}
    calibration = {"calibration": kept.model_dump(include={"temperature", "images"})} if kept else {}
    write_weights(out, tensors, _header(source, {**header, **calibration}))
    log.info("%s holds only %s of %s, without the optimiser's state", out, which.words, source.place)
    return EXIT_DONE


def average(paths: list[Path], last: int | None, out: Path, weights: str) -> int:
    folders = _last(paths[0], last) if last else [checkpoint_of(path)[0] for path in paths]
    sources = [chosen_at(folder, weights) for folder in folders]
    checkpoints = [verify(source.checkpoint) for source in sources if source.checkpoint]
    which, words = _set_to_average(sources, weights)
    log.info("%s", words)
    mean = _mean(checkpoints, which.file)
    names = [folder.name if last else f"{folder}" for folder in folders]
    header = _header(sources[-1], {"weights": f"average of {which.words}", "from": names}, averaged=True)
    write_weights(out, mean, header)
    log.info("%s: uniform average of %s of %d checkpoints:", out, which.words, len(sources))
    for folder in folders:
        log.info("  %s", folder)
    log.info(
        "The accuracy of the average is unknown; validate it with main_single_gpu.py, the run's settings and "
        "-eval -pretrained %s.",
        out,
    )
    return EXIT_DONE


def _last(path: Path, count: int) -> list[Path]:
    folders = checkpoints_at(path)
    if len(folders) < count:
        raise UserError(
            f"-last {count}: {path} has {counted(len(folders), 'checkpoint')}. "
            "KEEP_LAST and KEEP_EVERY set how many a run keeps."
        )
    return folders[-count:]


def _set_to_average(sources: list[Chosen], weights: str) -> tuple[WeightSet, str]:
    """Which weights: others than the plain ones if they validated better in most checkpoints. And words for the log."""
    if weights != BETTER:
        return sources[0].which, f"{sources[0].which.label} weights (-weights {weights})"
    available = [one for one in SETS if all(one in source.sets for source in sources)]
    votes = Counter(source.which for source in sources)
    which = next((one for one in available if 2 * votes[one] > len(sources)), PLAIN)
    why = "; ".join(
        f"{one.words} is better in {votes[one]} of {len(sources)} checkpoints" for one in available if one != PLAIN
    )
    return which, f"{which.label} weights{f' ({why})' if why else ''}"


def _mean(sources: list[Checkpoint], name: str) -> dict[str, Tensor]:
    """Uniform average in double precision. Only one tensor of each checkpoint is in memory at a time."""
    files = [open_tensors(source, name) for source in sources]
    shapes = [{key: file.shape(key) for key in file} for file in files]
    for source, own in zip(sources, shapes, strict=True):
        if own != shapes[0]:
            key = next(k for k in sorted({*own, *shapes[0]}) if own.get(k) != shapes[0].get(k))
            raise UserError(
                f"{source.folder} and {sources[0].folder} have different architectures and cannot be averaged: "
                f"the shape of {key} is {own.get(key, 'missing')} and {shapes[0].get(key, 'missing')}."
            )
    return {key: _mean_of([file[key] for file in files]) for key in progress(list(shapes[0]), "tensors")}


def _mean_of(tensors: list[Tensor]) -> Tensor:
    if not tensors[-1].is_floating_point():  # the batch counter of batch norm cannot be averaged
        return tensors[-1]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def _header(source: Chosen, origin: dict[str, Any], averaged: bool = False) -> dict[str, str]:
    """Header of the file."""
    known = {key: source.meta[key] for key in COPIED if key in source.meta and not (averaged and key in OF_VALIDATION)}
    known |= needed_by_tools(source)
    return {"format": "pt", **encoded({**known, **origin, "made_by": MADE_BY})}


def needed_by_tools(chosen: Chosen) -> dict[str, Any]:
    """Settings that rebuild the model, for the header of a file that predict.py and other tools read."""
    return {"settings": _public(chosen.settings), "fp32_modules": fp32_modules(chosen)}


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of SECTIONS, without the paths of this machine."""
    public = {key: value for key, value in settings.items() if key.startswith(SECTIONS) and key not in PRIVATE}
    if public.get(CLASS_WEIGHTS) not in (None, BALANCED):  # a file
        del public[CLASS_WEIGHTS]
    dataset = str(public.get(DATASET))
    if dataset.startswith(HUB_PREFIX) and hub.is_path(dataset.removeprefix(HUB_PREFIX)):
        public[DATASET] = HUB_PREFIX  # without the key, the default would name another data set
    return public


def write_weights(out: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write the file; it gets its name only when it is complete."""
    with writing(out, "-out"), replacing(out) as unfinished, raising_os_errors(out):
        safetensors.torch.save_file(tensors, unfinished, metadata=header)
