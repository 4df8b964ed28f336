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
"""Fields of meta.json that hold for the validated weights only, not for an average of weights"""
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
"""Beginnings of the names of the settings that the header gets"""
PRIVATE = WITH_PATH.keys() - {"USE", DATASET} | {"teacher_model", "teacher"}
"""Settings and choices with private paths, which the header does not get; it gets a part of USE and of the data set."""
PATH_IN_A_SETTING = re.compile(r"[\s=,\[('\"][~/]")
"""Matches a setting whose value has a path, as in Net.root=/home/me: / or ~ at the start of a value or of an item"""


def list_checkpoints(path: Path) -> int:
    """Log a table of the checkpoints in `path`."""
    folders = checkpoints_at(path)
    index = read_index(folders[0].parent)
    sizes = [_size(folder) for folder in folders]
    # The fields of meta.json of each checkpoint; for a damaged one, the reason as text.
    metas = list[dict[str, Any] | str]()
    for folder in folders:
        try:
            metas.append(inspect(folder).meta)
        except UserError as error:
            metas.append(str(error).removeprefix(f"{folder}: "))

    # Columns for the loss, and for the task's main metric by each set of weights: heading -> name among the metrics of
    # meta.json, and the metric, which formats the values.
    task = task_of(meta.get("metrics") or {} for meta in metas if isinstance(meta, dict))
    columns = {LOSS.words: (LOSS.name, LOSS)}
    for weights in SETS:
        columns[weights.marked(task.best.words)] = (weights.prefix + task.best.name, task.best)

    rows = [["checkpoint", "epoch", "update"] + list(columns) + ["size", "written", ""]]
    for folder, meta, size in zip(folders, metas, sizes, strict=True):
        if isinstance(meta, str):
            unknown = ["-" for _ in columns]
            rows.append([folder.name, "-", "-"] + unknown + [size_words(size), "-", meta])
            continue
        metrics = meta.get("metrics", {})
        values = []
        for key, metric in columns.values():
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
    """Total size in bytes of the files in `folder`."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def verify_checkpoints(paths: list[Path]) -> int:
    """Verify all checkpoints in `paths` and log the result of each. Returns exit code 1 if any is damaged."""
    damaged = 0
    folders = list(itertools.chain.from_iterable(map(checkpoints_at, paths)))
    for folder in progress_bar(folders, "checkpoints"):
        began = time.perf_counter()
        try:
            resumable(inspect(folder))
        except OtherVersion as error:  # intact, but this version cannot resume it
            log.info("%s", error)
        except (UserError, OSError) as error:
            if folder.exists():
                log.error("%s", error)
                damaged += 1
            else:  # a run that trains meanwhile removes its older checkpoints
                log.info("%s: removed by its run meanwhile", folder)
            continue
        log.info("%s: good, %s in %.1f s", folder, size_words(_size(folder)), time.perf_counter() - began)
    return EXIT_FAILED if damaged else EXIT_DONE


def strip(path: Path, out: Path, weights: str) -> int:
    """Write the weights of a run or a checkpoint to the file `out`. `weights`: the value of -weights."""
    source = chosen_at(path, weights)
    if source.checkpoint is None:
        raise UserError(f"{path}: this file already holds only weights; name a run or a checkpoint.")
    weight_set = source.which
    tensors = dict(open_tensors(verify(source.checkpoint), weight_set.file))
    log.info("%s", source.with_calibration(applied=True))
    origin: dict[str, Any] = {"weights": weight_set.words, "from": source.place.name}
    if source.calibration:
        origin["calibration"] = source.calibration.model_dump(include={"temperature", "images"})
    write_weights(out, tensors, _header(source, origin))
    log.info("%s holds only %s of %s, without the optimiser's state", out, weight_set.words, source.place)
    return EXIT_DONE


def average(paths: list[Path], last: int | None, out: Path, weights: str) -> int:
    """Write the uniform average of the weights of several checkpoints to the file `out`.

    `last`: number of last checkpoints of the run `paths[0]` to average; None: the checkpoints in `paths` are averaged.
    `weights`: the value of -weights, which chooses between plain weights and their EMA.
    """
    folders = _checkpoints_to_average(paths, last)
    sources = [chosen_at(folder, weights) for folder in folders]
    for folder, source in zip(folders, sources, strict=True):
        if source.checkpoint is None:
            raise UserError(f"{folder}: this file holds only weights; name runs or checkpoints.")
    checkpoints = [verify(source.checkpoint) for source in sources if source.checkpoint]

    # Which weights to average: all checkpoints must give the same set.
    weight_set = sources[0].which
    reason = f"-weights {weights}"
    if weights == BETTER:
        weight_set, reason = _better_in_most(paths, sources)
    log.info("%s weights%s", weight_set.label, f" ({reason})" if reason else "")

    files = [open_tensors(checkpoint, weight_set.file) for checkpoint in checkpoints]
    _check_alike(checkpoints, files)
    _warn_of_other_starts(sources)
    mean = {}
    for key in progress_bar(list(files[0]), "tensors"):
        mean[key] = _mean([file[key] for file in files])
    names = [source.place.name for source in sources]
    origin = {"weights": f"average of {weight_set.words}", "from": names}
    write_weights(out, mean, _header(sources[-1], origin, averaged=True))

    log.info("%s: uniform average of %s of %d checkpoints:", out, weight_set.words, len(sources))
    log_lines(f"  {folder}" for folder in folders)
    settings = settings_of(sources[-1])
    if settings.get("MODEL.MAE_PRETRAIN"):
        advice = f"fine-tune it with -pretrained {out}"
    else:
        data_path = settings.get("DATA.DATA_PATH")  # the header has no paths, so the command names it
        flag = f" -data_path {data_path}" if data_path else ""
        advice = f"validate it with `{started_as('scripts/evaluate.py')} {out}{flag}`"
    log.info("The accuracy of the average is unknown; %s.", advice)
    return EXIT_DONE


def _checkpoints_to_average(paths: list[Path], last: int | None) -> list[Path]:
    """Return the folders of the checkpoints that the command names, and files as they are.

    `last`: the number of a run's last checkpoints to take; None or 0 takes the checkpoint of each path.
    """
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
    """Choose the set of weights to average: one that validated better in most checkpoints, else the plain weights.

    `paths`: what the command names. `sources`: the checkpoints, each with the set that validated better in it.
    Also returns the reason for the log; '' if the checkpoints have only plain weights.
    """
    votes = Counter(source.which for source in sources)
    winner = PLAIN
    reasons = []
    for weight_set in SETS:
        if weight_set == PLAIN or not all(weight_set in source.sets for source in sources):
            continue
        reasons.append(f"{weight_set.words} is better in {votes[weight_set]} of {len(sources)} checkpoints")
        if 2 * votes[weight_set] > len(sources):  # more than half, so there is one winner at most
            winner = weight_set
    # A path may name the file of one set of weights. With -last, there is one path, the folder of a run.
    for path, source in zip(paths, sources, strict=False):
        if path.is_file() and source.which != winner:
            raise UserError(f"average: a file of other weights than {winner.words} is named; choose by -weights.")
    return winner, "; ".join(reasons)


def _warn_of_other_starts(sources: list[Chosen]) -> None:
    """Warn if the checkpoints are from several runs that did not begin with the same pretrained weights."""
    pretrained = {settings_of(source).get("MODEL.PRETRAINED") for source in sources}
    has_other_start = len(pretrained) > 1 or None in pretrained  # None: began with random weights, of its own seed
    runs = {run_folder_of(source.place) for source in sources}
    if len(runs) > 1 and has_other_start:
        log.warning(
            "These runs did not begin with the same pretrained weights. Unless one was resumed from the other, the "
            "mean of their weights is most likely useless. `%s RUN RUN` and predict.py average their predictions.",
            started_as("scripts/evaluate.py"),
        )


def _check_alike(checkpoints: list[Checkpoint], files: Sequence[JoinedShards | Merged]) -> None:
    """Raise UserError if the average of a checkpoint and the first one would not be a valid model.

    Their tensors must have the same shapes, and they must agree in what `_facts_that_must_match` returns. `files`: the
    tensors of each checkpoint.
    """
    first = checkpoints[0]
    first_shapes = {key: files[0].shape(key) for key in files[0]}
    for checkpoint, file in zip(checkpoints, files, strict=True):
        both = f"{checkpoint.folder} and {first.folder}"
        shapes = {key: file.shape(key) for key in file}
        if shapes != first_shapes:
            key = next(key for key in sorted(shapes | first_shapes) if shapes.get(key) != first_shapes.get(key))
            words = f"the shape of {key} is {shapes.get(key, 'missing')} and {first_shapes.get(key, 'missing')}"
            raise UserError(f"{both} have different architectures and cannot be averaged: {words}.")

        # The models must be trained on the same split. Equal hashes of the training data show that, whatever the
        # settings are; otherwise the settings that choose the split must match.
        data_hashes = {(each.meta.get("samples") or {}).get("data") for each in (checkpoint, first)}
        same_data = len(data_hashes) == 1 and None not in data_hashes
        split_settings = () if same_data else deciding("split", "random split")
        expected = _facts_that_must_match(first.meta, split_settings)
        for key, value in _facts_that_must_match(checkpoint.meta, split_settings).items():
            if key in expected and value != expected[key]:
                words = f"{key} is {value} and {expected[key]}"
                raise UserError(f"{both} have different models or splits and cannot be averaged: {words}.")


def _facts_that_must_match(meta: dict[str, Any], split_settings: tuple[str, ...]) -> dict[str, Any]:
    """Collect from meta.json what makes models different even if their weights have the same shapes: name -> value.

    That is the pooling, the input, timm's name and arguments, the names of the classes, and the settings in
    `split_settings`: with another split, the average would be validated on images that one of the models was trained
    on. Fields that meta.json lacks are left out; settings that it lacks have their default.
    """
    facts = {key: meta["settings"].get(key, default_of(key)) for key in ("MODEL.POOL",) + split_settings}
    for field in ("input", "timm"):
        facts |= {f"{field}.{key}": value for key, value in (meta.get(field) or {}).items()}
    return facts | {f"class {label}": name for label, name in enumerate(meta.get("classes") or ())}


def _mean(tensors: list[Tensor]) -> Tensor:
    """Compute the uniform mean of one tensor of several checkpoints, in double precision.

    The last tensor is returned if they are not floating-point, such as batch norm's counter of batches.
    """
    if not tensors[-1].is_floating_point():
        return tensors[-1]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def _header(source: Chosen, origin: dict[str, Any], averaged: bool = False) -> dict[str, str]:
    """Build the header of a file of weights from fields of meta.json, the settings, and `origin`.

    `origin`: fields about where the weights are from. `averaged`: whether the weights are an average, which was not
    validated itself: then metrics and thresholds are left out.
    """
    left_out = OF_VALIDATION if averaged else ()
    copied = {key: source.meta[key] for key in COPIED if key in source.meta and key not in left_out}
    # If a field is in several, the last one counts.
    fields = copied | needed_by_tools(source) | origin | {"made_by": MADE_BY}
    return {"format": "pt", **encoded(fields)}


def needed_by_tools(chosen: Chosen) -> dict[str, Any]:
    """Return the settings and choices that predict.py and other tools need to rebuild the model from a file's header.

    Settings are those of SECTIONS. The file may be published, so paths of this machine are left out, and so are
    settings that only work with files or code of this machine.
    """
    settings = settings_of(chosen)
    public = {key: value for key, value in settings.items() if key.startswith(SECTIONS) and key not in PRIVATE}
    class_weights_are_a_file = public.get(CLASS_WEIGHTS) not in (None, BALANCED)
    if class_weights_are_a_file:
        del public[CLASS_WEIGHTS]
    # SAVE_BEST_BY is left out if it names a metric of the user's own code, or k-NN, which needs TRAIN.KNN.
    if public.get("SAVE_BEST_BY") not in METRICS.keys() - {KNN.name}:
        public.pop("SAVE_BEST_BY", None)
    # USE has files, of which the name stays, and settings of their code.
    if settings.get("USE"):
        words = (word if OWN_SETTING.fullmatch(word) else Path(word).name for word in settings["USE"])
        public["USE"] = [word for word in words if not PATH_IN_A_SETTING.search(word)]
    # Of a data set that is named by a path, the kind stays. Without the key, the default would name another data set.
    dataset = str(public.get(DATASET))
    if dataset.startswith(HUB_PREFIX) and hub.is_path(dataset.removeprefix(HUB_PREFIX)):
        public[DATASET] = HUB_PREFIX
    if dataset.startswith(CSV_PREFIX):
        public[DATASET] = "csv"
    choices = {key: value for key, value in chosen.choices.items() if key not in PRIVATE}
    return {"settings": public, "choices": choices, "fp32_modules": fp32_modules(chosen)}


def write_weights(out: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file, the value of -out; it gets its name only when it is complete."""
    with writing(out, "-out"), replacing(out) as unfinished, raising_os_errors(out):
        safetensors.torch.save_file(tensors, unfinished, metadata=header)
