"""What differs between two runs: numbers (losses, weights, states) and records (choices, settings, the log)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

TIMES = {"time", "perf", "seconds", "eval_seconds", "train_seconds", "epoch_seconds", "images_per_second"}
"""Fields of a line of metrics that depend on time."""
WITHOUT_ABILITY = {
    "state.pt.ema_updates": 0,
    **{f"state.pt.skips.{name}": 0 for name in ("replays", "last_replay", "passed_over")},
}
"""Fields that older commits saved without their ability too, with these values."""
NUMBERS_OF_META = ("epoch", "epoch_finished", "update", "metrics", "best")
NOT_COMPARED = (*NUMBERS_OF_META, "format", "files", "config_hash", "meta_sha256")
"""Of meta.json: compared as numbers, or not comparable: sizes and hashes of files whose contents are compared."""
RUN_RECORD = ("choices", "samples", "parameters")
"""Fields of run.json that do not name the folder, the machine or the commit."""
VOLATILE = (
    (
        re.compile(
            r"(Img/s|Data|Mem|Time|Left|Stages|MFU|GPU|Wait): [^,\n]*(, (data|copy|forward|backward|optimiser) \d+%)*"
        ),
        r"\1",
    ),
    (re.compile(r"\d[\d.,:]* ?(s|ms|seconds?|minutes?|MB|GB|GiB|MiB)\b"), "#"),
    (re.compile(r"(time:|total time) [\d:.]+"), r"\1 #"),
    (re.compile(r"\d+(\.\d+)? ?%( of the time)"), r"#\2"),
    (re.compile(r"localhost:\d+"), "localhost:#"),
    (re.compile(r"^( +\d+ +\S+ +\d+ +)\d+ ", re.MULTILINE), r"\1# "),  # the process in the table of ranks
)
"""What depends on time and machine in a line of the log."""
NOT_WORDS = ("Where the time went", "To speed up", "  arguments ", "[W", "[rank")
"""Starts of lines that depend on the pace of the run, or that torch writes."""


class Output(NamedTuple):
    """A finished run: its folder, and what it printed. `names`: paths in what it printed, and the words for them."""

    folder: Path
    printed: str
    names: Mapping[str, str]


def differing_numbers(one: Path, other: Path) -> Iterator[str]:
    first, second = _metrics(one), _metrics(other)
    if len(first) != len(second):
        yield f"{len(first)} and {len(second)} lines of metrics"
    for one_line, other_line in zip(first, second, strict=False):
        fields = [key for key in {**one_line, **other_line} if one_line.get(key) != other_line.get(key)]
        if fields:
            values = ", ".join(f"{key} {one_line.get(key)} and {other_line.get(key)}" for key in fields)
            yield f"{one_line.get('event')} of update {one_line.get('update')}: {values}"
    folders = [{p.name for p in (run / "checkpoints").iterdir() if p.is_dir()} for run in (one, other)]
    if folders[0] != folders[1]:
        yield f"checkpoints {sorted(folders[0])} and {sorted(folders[1])}"
    for name in sorted(folders[0] & folders[1]):
        yield from _differing_tensors(one / "checkpoints" / name, other / "checkpoints" / name)


def differing_records(one: Output, other: Output) -> Iterator[str]:
    """Differences in run.json, meta.json and the words of the log."""
    for name in sorted(path.name for path in (one.folder / "checkpoints").glob("step-*")):
        sides = [_json(side.folder / "checkpoints" / name / "meta.json") for side in (one, other)]
        yield from _differing_leaves(name, *({k: v for k, v in m.items() if k not in NOT_COMPARED} for m in sides))
    records = [_json(side.folder / "run.json") for side in (one, other)]
    yield from _differing_leaves("run.json", *({key: record.get(key) for key in RUN_RECORD} for record in records))
    first, second = (Counter(_words(side)) for side in (one, other))
    yield from (f"only the first logs: {line}" for line in first - second)
    yield from (f"only the second logs: {line}" for line in second - first)


def _differing_leaves(where: str, one: Any, other: Any) -> Iterator[str]:
    first, second = dict(_leaves(one, where)), dict(_leaves(other, where))
    for name in {**first, **second}:
        if name not in first or name not in second:
            yield f"only the {'first' if name in first else 'second'} has {name}: {first.get(name, second.get(name))}"
        elif first[name] != second[name]:
            yield f"{name}: {first[name]} and {second[name]}"


def _words(run: Output) -> Iterator[str]:
    """Lines that a run printed, without paths, times and amounts of memory."""
    text = run.printed
    for path in sorted(run.names, key=len, reverse=True):  # a folder's path begins with its parent's
        text = text.replace(path, run.names[path])
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(NOT_WORDS)]
    text = "\n".join(lines)
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    yield from text.splitlines()


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _differing_tensors(one: Path, other: Path) -> Iterator[str]:
    first, second = _contents(one), _contents(other)
    if not first:
        yield f"{one.name}: no tensors"
    if first.keys() != second.keys():
        yield f"{one.name}: other names: {sorted(first.keys() ^ second.keys())[:3]}"
    yield from (f"{one.name}: {name}" for name in first.keys() & second.keys() if not _same(first[name], second[name]))


def _contents(folder: Path) -> dict[str, Any]:
    """All values in a checkpoint's files, by name."""
    return {
        name: value
        for file in sorted(folder.iterdir())
        for name, value in _read(file)
        if isinstance(value, torch.Tensor) or name not in WITHOUT_ABILITY or value != WITHOUT_ABILITY[name]
    }


def _read(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of all values in a file of a checkpoint."""
    if file.suffix == ".safetensors":
        yield from ((f"{file.name}: {name}", value) for name, value in load_file(file).items())
    elif file.suffix in {".pt", ".pth"}:
        yield from _leaves(torch.load(file, map_location="cpu", weights_only=True), file.name)
    elif file.name == "meta.json":
        yield from _leaves({key: _json(file).get(key) for key in NUMBERS_OF_META}, file.name)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{name}.{number}")
    else:
        yield name, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and a == b
