"""Write weights from checkpoints to a file whose header describes them: `checkpoint.py average` and `strip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from datasets.base import HUB_PREFIX
from datasets.shards import hub
from engine.checkpoint.folder import raising_os_errors
from engine.task.losses import BALANCED
from engine.task.losses import KEY as CLASS_WEIGHTS
from tools.common.output_file import writing
from tools.common.progress import progress
from utils.config.kinds import OWN_SETTING
from utils.errors import EXIT_DONE, UserError
from utils.log import log
from utils.program import started_as
from utils.record.resumed_run import settings_of
from vitamp.checkpoints import checkpoint_of, verify
from vitamp.files import replacing
from vitamp.tensors import OF_VALIDATION, fp32_modules, last_checkpoints, mean_of, open_tensors, set_to_average
from vitamp.weights import MADE_BY, Chosen, chosen_at, encoded

COPIED = (
    "model",
    "classes",
    "num_classes",
    "own_code",
    "input",
    "timm",
    "choices",
    "epoch",
    "update",
    "metrics",
    "thresholds",
    "config_hash",
    "samples",
)
"""Fields of meta.json that the header gets."""
SECTIONS = (
    "MODEL.",
    "DATA.",
    "TRAIN.",
    "AMP.",
    "SEED",
    "DEVICE",
    "THREADS",
    "SPEED",
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
    which, tensors = source.which, dict(open_tensors(verify(source.checkpoint), source.which.file))
    log.info("%s", "; ".join(filter(None, (source.words, source.describe_calibration(applied=True)))))
    kept = source.calibration
    header = {"weights": which.words, "from": source.place.name}
    calibration = {"calibration": kept.model_dump(include={"temperature", "images"})} if kept else {}
    write_weights(out, tensors, _header(source, {**header, **calibration}))
    log.info("%s holds only %s of %s, without the optimiser's state", out, which.words, source.place)
    return EXIT_DONE


def average(paths: list[Path], last: int | None, out: Path, weights: str) -> int:
    folders = last_checkpoints(paths[0], last, f"-last {last}") if last else [checkpoint_of(path)[0] for path in paths]
    sources = [chosen_at(folder, weights) for folder in folders]
    checkpoints = [verify(source.checkpoint) for source in sources if source.checkpoint]
    which, words = set_to_average(sources, weights)
    log.info("%s", words)
    mean = mean_of(checkpoints, which.file, lambda names: progress(names, "tensors"))
    names = [folder.name if last else f"{folder}" for folder in folders]
    header = _header(sources[-1], {"weights": f"average of {which.words}", "from": names}, averaged=True)
    write_weights(out, mean, header)
    log.info("%s: uniform average of %s of %d checkpoints:", out, which.words, len(sources))
    for folder in folders:
        log.info("  %s", folder)
    log.info(
        "The accuracy of the average is unknown; validate it with %s, the run's settings and -eval -pretrained %s.",
        started_as("main_single_gpu.py"),
        out,
    )
    return EXIT_DONE


def _header(source: Chosen, origin: dict[str, Any], averaged: bool = False) -> dict[str, str]:
    """Header of the file."""
    known = {key: source.meta[key] for key in COPIED if key in source.meta and not (averaged and key in OF_VALIDATION)}
    known |= needed_by_tools(source)
    return {"format": "pt", **encoded({**known, **origin, "made_by": MADE_BY})}


def needed_by_tools(chosen: Chosen) -> dict[str, Any]:
    """Settings that rebuild the model, for the header of a file that predict.py and other tools read."""
    return {"settings": _public(settings_of(chosen)), "fp32_modules": fp32_modules(chosen)}


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of SECTIONS, without the paths of this machine."""
    public = {key: value for key, value in settings.items() if key.startswith(SECTIONS) and key not in PRIVATE}
    if public.get(CLASS_WEIGHTS) not in (None, BALANCED):  # a file
        del public[CLASS_WEIGHTS]
    if settings.get("USE"):
        public |= {"USE": [one if OWN_SETTING.fullmatch(one) else Path(one).name for one in settings["USE"]]}
    dataset = str(public.get(DATASET))
    if dataset.startswith(HUB_PREFIX) and hub.is_path(dataset.removeprefix(HUB_PREFIX)):
        public[DATASET] = HUB_PREFIX  # without the key, the default would name another data set
    return public


def write_weights(out: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write the file; it gets its name only when it is complete."""
    with writing(out, "-out"), replacing(out) as unfinished, raising_os_errors(out):
        safetensors.torch.save_file(tensors, unfinished, metadata=header)
