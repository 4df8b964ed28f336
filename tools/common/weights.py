"""scripts/checkpoint.py: list and verify checkpoints, and write weights to a file whose header describes them."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from datasets.base import CSV_PREFIX, HUB_PREFIX
from datasets.shards import hub
from engine.checkpoint.find import OtherVersion, resumable
from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.saver import size_words
from engine.task.losses import BALANCED
from engine.task.losses import KEY as CLASS_WEIGHTS
from tools.common.output_file import writing
from tools.common.turns import progress_bar
from utils.config.keys import DATASET, WITH_PATH, deciding, default_of
from utils.config.kinds import OWN_SETTING
from utils.config.resumed import settings_of
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log, log_lines
from utils.program import started_as
from utils.text import aligned, counted
from vitamp.checkpoints import Checkpoint, checkpoint_of, checkpoints_at, inspect, read_index, run_folder_of, verify
from vitamp.files import replacing
from vitamp.meta import META
from vitamp.metrics import BETTER, KNN, LOSS, METRICS, PLAIN, SETS, WeightSet, task_of
from vitamp.tensors import JoinedShards, Merged, fp32_modules, open_tensors
from vitamp.weights import MADE_BY, Chosen, chosen_at, encoded

OF_VALIDATION = ("metrics", "thresholds")
"""Fields of meta.json that hold for the validated weights alone, not for a mean"""
COPIED = (
    "model",
    "classes",
    "num_classes",
    "own_code",
    "input",
    "timm",
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
PRIVATE = WITH_PATH.keys() - {"USE", DATASET} | {"teacher_model", "teacher"}
"""Settings and choices with private paths, which the header does not get; of USE and the data set it gets a part."""


def list_checkpoints(path: Path) -> int:
    """Log a table of the checkpoints in `path`."""
    folders = checkpoints_at(path)
    index = read_index(folders[0].parent)
    sizes = [_size(folder) for folder in folders]
    metas = list[dict[str, Any] | str]()
    for folder in folders:
        try:
            metas.append(inspect(folder).meta)
        except UserError as error:
            metas.append(str(error).removeprefix(f"{folder}: "))
    best = task_of(meta.get("metrics") or {} for meta in metas if isinstance(meta, dict)).best
    shown = {LOSS.words: (LOSS.name, LOSS)}
    shown |= {which.marked(best.words): (which.prefix + best.name, best) for which in SETS}
    rows = [["checkpoint", "epoch", "update"] + list(shown) + ["size", "written", ""]]
    for folder, meta, size in zip(folders, metas, sizes, strict=True):
        if isinstance(meta, str):
            unknown = ["-" for _ in shown]
            rows.append([folder.name, "-", "-"] + unknown + [size_words(size), "-", meta])
            continue
        metrics = meta.get("metrics", {})
        values = []
        for key, metric in shown.values():
            values.append(metric.number_in_table(metrics[key]) if metrics.get(key) is not None else "-")
        epoch = f"{meta['epoch']}" if meta.get("epoch_finished") else f"in {meta['epoch']}"
        saved = time.localtime((folder / META).stat().st_mtime)
        written = time.strftime("%Y-%m-%d %H:%M", saved)
        names = ", ".join(name for name in ("last", "best") if index.get(name) == folder.name)
        rows.append([folder.name, epoch, f"{meta.get('update', '-')}"] + values + [size_words(size), written, names])
    log_lines(aligned(rows))
    log.info("%s, %s", counted(len(folders), "checkpoint"), size_words(sum(sizes)))
    return EXIT_DONE


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def verify_checkpoints(paths: list[Path]) -> int:
    """Verify every checkpoint, also after a damaged one. Exit code 1 if any is damaged."""
    damaged = 0
    folders = list(itertools.chain.from_iterable(map(checkpoints_at, paths)))
    for folder in progress_bar(folders, "checkpoints"):
        began = time.perf_counter()
        try:
            resumable(inspect(folder))
        except OtherVersion as error:
            log.info("%s", error)
        except (UserError, OSError) as error:
            if folder.exists():
                log.error("%s", error)
                damaged += 1
            else:  # of a run that trains
                log.info("%s: removed by its run meanwhile", folder)
            continue
        log.info("%s: good, %s in %.1f s", folder, size_words(_size(folder)), time.perf_counter() - began)
    return EXIT_FAILED if damaged else EXIT_DONE


def strip(path: Path, out: Path, weights: str) -> int:
    source = chosen_at(path, weights)
    if source.checkpoint is None:
        raise UserError(f"{path}: this file already holds only weights; name a run or a checkpoint.")
    which = source.which
    tensors = dict(open_tensors(verify(source.checkpoint), which.file))
    log.info("%s", source.with_calibration(applied=True))
    origin: dict[str, Any] = {"weights": which.words, "from": source.place.name}
    if source.calibration:
        origin["calibration"] = source.calibration.model_dump(include={"temperature", "images"})
    write_weights(out, tensors, _header(source, origin))
    log.info("%s holds only %s of %s, without the optimiser's state", out, which.words, source.place)
    return EXIT_DONE


def average(paths: list[Path], last: int | None, out: Path, weights: str) -> int:
    folders = _named(paths, last)
    sources = [chosen_at(folder, weights) for folder in folders]
    for folder, source in zip(folders, sources, strict=True):
        if source.checkpoint is None:
            raise UserError(f"{folder}: this file holds only weights; name runs or checkpoints.")
    checkpoints = [verify(source.checkpoint) for source in sources if source.checkpoint]
    which = sources[0].which
    why = f"-weights {weights}"
    if weights == BETTER:
        which, why = _better_in_most(paths, sources)
    log.info("%s weights%s", which.label, f" ({why})" if why else "")
    files = [open_tensors(checkpoint, which.file) for checkpoint in checkpoints]
    _check_alike(checkpoints, files)
    _warn_of_starts(sources)
    mean = {}
    for key in progress_bar(list(files[0]), "tensors"):
        mean[key] = _mean([file[key] for file in files])
    names = [source.place.name for source in sources]
    header = _header(sources[-1], {"weights": f"average of {which.words}", "from": names}, averaged=True)
    write_weights(out, mean, header)
    log.info("%s: uniform average of %s of %d checkpoints:", out, which.words, len(sources))
    log_lines(f"  {folder}" for folder in folders)
    settings = settings_of(sources[-1])
    if settings.get("MODEL.MAE_PRETRAIN"):
        way = f"fine-tune it with -pretrained {out}"
    else:
        path = settings.get("DATA.DATA_PATH")  # the header has no paths
        data = f" -data_path {path}" if path else ""
        way = f"validate it with `{started_as('scripts/evaluate.py')} {out}{data}`"
    log.info("The accuracy of the average is unknown; %s.", way)
    return EXIT_DONE


def _named(paths: list[Path], last: int | None) -> list[Path]:
    """The checkpoints, or files in them, that the command names."""
    if not last:
        return [path if path.is_file() else checkpoint_of(path)[0] for path in paths]
    folders = checkpoints_at(paths[0])[-last:]
    if len(folders) < last:
        raise UserError(
            f"-last {last}: the number of checkpoints in {paths[0]} is {len(folders)}. KEEP_LAST and KEEP_EVERY set "
            "how many a run keeps."
        )
    return folders


def _better_in_most(paths: list[Path], sources: list[Chosen]) -> tuple[WeightSet, str]:
    """The weights that validated better in most checkpoints, else the plain ones; and why."""
    votes = Counter(source.which for source in sources)
    which = PLAIN
    reasons = []
    for one in SETS:
        if one == PLAIN or not all(one in source.sets for source in sources):
            continue
        reasons.append(f"{one.words} is better in {votes[one]} of {len(sources)} checkpoints")
        if 2 * votes[one] > len(sources):
            which = one
    if any(path.is_file() and source.which != which for path, source in zip(paths, sources, strict=False)):
        raise UserError(f"average: a file of other weights than {which.words} is named; choose by -weights.")
    return which, "; ".join(reasons)


def _warn_of_starts(sources: list[Chosen]) -> None:
    starts = {settings_of(source).get("MODEL.PRETRAINED") for source in sources}
    if len({run_folder_of(source.place) for source in sources}) > 1 and (len(starts) > 1 or None in starts):
        log.warning(
            "These runs did not begin with the same pretrained weights. Unless one was resumed from the other, the "
            "mean of their weights is most likely useless. `%s RUN RUN` and predict.py average their predictions.",
            started_as("scripts/evaluate.py"),
        )


def _check_alike(checkpoints: list[Checkpoint], files: Sequence[JoinedShards | Merged]) -> None:
    """Raise UserError for a checkpoint whose mean with the first one would be no model."""
    first = checkpoints[0]
    theirs = {key: files[0].shape(key) for key in files[0]}
    for one, file in zip(checkpoints, files, strict=True):
        both = f"{one.folder} and {first.folder}"
        own = {key: file.shape(key) for key in file}
        if own != theirs:
            key = next(key for key in sorted(own | theirs) if own.get(key) != theirs.get(key))
            words = f"the shape of {key} is {own.get(key, 'missing')} and {theirs.get(key, 'missing')}"
            raise UserError(f"{both} have different architectures and cannot be averaged: {words}.")
        trained_on = {(each.meta.get("samples") or {}).get("data") for each in (one, first)}
        split = () if len(trained_on) == 1 and None not in trained_on else deciding("split", "random split")
        known = _besides_weights(first.meta, split)
        for key, value in _besides_weights(one.meta, split).items():
            if value != known.get(key, value):
                words = f"{key} is {value} and {known[key]}"
                raise UserError(f"{both} have different models or splits and cannot be averaged: {words}.")


def _besides_weights(meta: dict[str, Any], split: tuple[str, ...]) -> dict[str, Any]:
    """What makes two models different even if their weights have the same shapes, as far as it is known.

    `split`: settings of the split; with another, the mean would be validated on images that one was trained on.
    """
    found = {key: meta["settings"].get(key, default_of(key)) for key in ("MODEL.POOL",) + split}
    for field in ("input", "timm"):
        found |= {f"{field}.{key}": value for key, value in (meta.get(field) or {}).items()}
    return found | {f"class {label}": name for label, name in enumerate(meta.get("classes") or ())}


def _mean(tensors: list[Tensor]) -> Tensor:
    """Uniform mean in double precision. Only this tensor of each checkpoint is in memory."""
    if not tensors[-1].is_floating_point():  # the batch counter of batch norm cannot be averaged
        return tensors[-1]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def _header(source: Chosen, origin: dict[str, Any], averaged: bool = False) -> dict[str, str]:
    left_out = OF_VALIDATION if averaged else ()
    known = {key: source.meta[key] for key in COPIED if key in source.meta and key not in left_out}
    return {"format": "pt", **encoded(known | needed_by_tools(source) | origin | {"made_by": MADE_BY})}


def needed_by_tools(chosen: Chosen) -> dict[str, Any]:
    """Settings that rebuild the model, and choices, for the header of a file that predict.py and other tools read.

    They are those of SECTIONS, without the paths of this machine.
    """
    settings = settings_of(chosen)
    public = {key: value for key, value in settings.items() if key.startswith(SECTIONS) and key not in PRIVATE}
    if public.get(CLASS_WEIGHTS) not in (None, BALANCED):  # a file
        del public[CLASS_WEIGHTS]
    if public.get("SAVE_BEST_BY") not in METRICS.keys() - {KNN.name}:  # a metric of own code, or of TRAIN.KNN
        public.pop("SAVE_BEST_BY", None)
    if settings.get("USE"):
        words = (one if OWN_SETTING.fullmatch(one) else Path(one).name for one in settings["USE"])
        public["USE"] = [one for one in words if not re.search(r"[\s=,\[('\"][~/]", one)]  # as in Net.root=/home/me
    dataset = str(public.get(DATASET))
    if dataset.startswith(HUB_PREFIX) and hub.is_path(dataset.removeprefix(HUB_PREFIX)):
        public[DATASET] = HUB_PREFIX  # without the key, the default would name another data set
    if dataset.startswith(CSV_PREFIX):
        public[DATASET] = "csv"
    choices = {key: value for key, value in chosen.choices.items() if key not in PRIVATE}
    return {"settings": public, "choices": choices, "fp32_modules": fp32_modules(chosen)}


def write_weights(out: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write the file; it gets its name only when it is complete."""
    with writing(out, "-out"), replacing(out) as unfinished, raising_os_errors(out):
        safetensors.torch.save_file(tensors, unfinished, metadata=header)
