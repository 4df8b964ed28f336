"""The uniform mean of the weights of several checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.folder import open_tensors, read_chosen
from utils.errors import UserError
from utils.record.checkpoints import Checkpoint, checkpoints_at, verify
from utils.record.chosen import Chosen, chosen_at
from utils.record.weight_sets import BETTER, PLAIN, SETS, WeightSet
from utils.text import counted

OF_VALIDATION = ("metrics", "thresholds")
"""Fields of meta.json that hold for the validated weights alone, not for a mean"""
STATISTICS = (".running_mean", ".running_var")
"""Endings of the names of batch norm's buffers"""


def last_checkpoints(path: Path, count: int, flag: str) -> list[Path]:
    """The last `count` checkpoints of a run. `flag`: for the error."""
    folders = checkpoints_at(path)
    if len(folders) < count:
        raise UserError(
            f"{flag}: {path} has {counted(len(folders), 'checkpoint')}. KEEP_LAST and KEEP_EVERY set how many a run "
            "keeps."
        )
    return folders[-count:]


def set_to_average(sources: Sequence[Chosen], weights: str) -> tuple[WeightSet, str]:
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


def mean_at(path: Path, weights: str, last: int) -> Chosen:
    """The mean of a run's last checkpoints, not computed yet. All else, such as settings, is that of the last one."""
    folders = last_checkpoints(path, last, f"-average last:{last}")
    sources = [chosen_at(folder, weights) for folder in folders]
    checkpoints = tuple(source.checkpoint for source in sources if source.checkpoint)  # all have one
    which, words = set_to_average(sources, weights)
    if any(key.endswith(STATISTICS) for key in open_tensors(checkpoints[-1], which.file)):
        words += "; the running statistics of batch norm are averaged too"
    names = f"{folders[0].name} to {folders[-1].name}" if last > 1 else folders[0].name
    newest = sources[-1]
    meta = {key: value for key, value in newest.meta.items() if key not in OF_VALIDATION}
    words = f"mean of the last {counted(last, 'checkpoint')} ({names}), {words}, not validated"
    return replace(newest, which=which, sets=(which,), words=words, meta=meta, averaged=checkpoints)


def read_weights(chosen: Chosen) -> dict[str, Tensor]:
    """The chosen weights or their mean, after a check of their hashes."""
    name = chosen.which.file
    return mean_of([verify(one, name) for one in chosen.averaged], name) if chosen.averaged else read_chosen(chosen)


def mean_of(
    sources: Sequence[Checkpoint], name: str, progress: Callable[[list[str]], Iterable[str]] = iter
) -> dict[str, Tensor]:
    """Uniform mean in double precision. Only one tensor of each checkpoint is in memory at a time."""
    files = [open_tensors(source, name) for source in sources]
    shapes = [{key: file.shape(key) for key in file} for file in files]
    for source, own in zip(sources, shapes, strict=True):
        if own != shapes[0]:
            key = next(k for k in sorted({*own, *shapes[0]}) if own.get(k) != shapes[0].get(k))
            raise UserError(
                f"{source.folder} and {sources[0].folder} have different architectures and cannot be averaged: "
                f"the shape of {key} is {own.get(key, 'missing')} and {shapes[0].get(key, 'missing')}."
            )
    return {key: _mean([file[key] for file in files]) for key in progress(list(shapes[0]))}


def _mean(tensors: list[Tensor]) -> Tensor:
    if not tensors[-1].is_floating_point():  # the batch counter of batch norm cannot be averaged
        return tensors[-1]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)
