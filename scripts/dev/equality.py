"""Check that two commits are bit-equal: compare losses and checkpoints of short runs.

    python scripts/dev/equality.py main~5          # that commit and HEAD
    python scripts/dev/equality.py OLD NEW -only fp32,ddp

For a refactoring that must not change results. With each commit, every way of training runs once on the digits, and
once resumes from a checkpoint that the old commit wrote. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RESUMED_AT, UPDATES = 6, 14
"""Updates before a run is resumed, and in all."""
TIMES = {"time", "perf", "seconds", "eval_seconds", "train_seconds", "epoch_seconds", "images_per_second"}
"""Fields of a line of metrics that depend on time."""
NO_LONGER_SAVED = {"state.pt.most_at_once"}
"""Fields of older checkpoints that are no longer read."""


class Way(NamedTuple):
    """A way of training with numerics of its own."""

    words: tuple[str, ...] = ()
    processes: int = 1


WAYS = {
    "fp32": Way(),
    "bf16": Way(("-amp", "bf16")),
    "fp16": Way(("-amp", "fp16")),
    "O2": Way(("-amp", "O2", "AMP.DTYPE=bf16")),
    "NAIVE": Way(("-amp", "NAIVE", "AMP.DTYPE=bf16")),
    "fp8": Way(("-amp", "fp8")),
    "compiled": Way(("-amp", "bf16", "TRAIN.COMPILE=blocks")),
    "accumulated": Way(("-amp", "bf16", "TRAIN.ACCUM_ITER=2", "TRAIN.MIXUP_ALPHA=0.8", "MODEL.DROPPATH=0.1")),
    "ddp": Way(("-amp", "bf16"), processes=2),
    "fsdp": Way(("-amp", "bf16", "DIST.STRATEGY=fsdp"), processes=2),
}


class Commit(NamedTuple):
    """A commit that is checked out, and the folder of its runs."""

    name: str
    code: Path
    runs: Path

    def train(self, way: Way, run: Path, updates: int, *words: str) -> subprocess.Popen[str]:
        script = "main_single_gpu.py" if way.processes == 1 else "main_multi_gpu.py"
        processes = ("-ngpus", str(way.processes)) * (way.processes > 1)
        where = ("-cfg", "configs/vit_digits.yaml", "-device", "cpu", "-output", str(run))
        settings = ("KEEP_LAST=0", "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={updates}")
        return subprocess.Popen(
            [sys.executable, script, *where, *way.words, *processes, *settings, *words],
            cwd=self.code,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", default="HEAD", help="another commit (default HEAD)")
    parser.add_argument("-only", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    given = parser.parse_args()
    unknown = set(given.only.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"unknown ways: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        old, new = (checked_out(name, Path(folder)) for name in (given.old, given.new))
        differing = 0
        for name in given.only.split(","):
            differences = list(compare(name, old, new))
            differing += bool(differences)
            print(f"{name:12} {'DIFFERS' if differences else 'equal'}", flush=True)
            for line in differences[:8]:
                print(f"    {line}", flush=True)
    print(f"{differing} of {len(given.only.split(','))} ways differ.")
    return int(differing > 0)


def checked_out(name: str, folder: Path) -> Commit:
    """Extract a commit's files to a folder of their own. Both commits run in this Python environment."""
    sha = subprocess.check_output(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT, text=True).strip()
    place = folder / f"{len(list(folder.iterdir()))}-{sha[:9]}"
    code = place / "code"
    code.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", sha], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(code)], input=packed, check=True)
    return Commit(sha[:9], code, place / "runs")


def compare(name: str, old: Commit, new: Commit) -> Iterator[str]:
    """Differences between complete runs of both commits, and between runs that resume the old commit's checkpoint."""
    way = WAYS[name]
    whole = [(side, side.runs / name) for side in (old, new)]
    failed = finish([(side.name, side.train(way, run, UPDATES)) for side, run in whole])
    yield from failed
    if failed:
        return
    yield from ("from scratch: " + line for line in difference(*(run for _, run in whole)))
    start = old.runs / f"{name}-start"
    failed = finish([(old.name, old.train(way, start, RESUMED_AT))])
    later = [(side, side.runs / f"{name}-later") for side in (old, new)]
    failed = failed or finish([(s.name, s.train(way, run, UPDATES, "-resume", str(start))) for s, run in later])
    yield from failed
    if not failed:
        yield from ("resumed: " + line for line in difference(*(run for _, run in later)))


def finish(started: list[tuple[str, subprocess.Popen[str]]]) -> list[str]:
    """Wait for runs that train concurrently, and return the errors of those that failed."""
    failed = []
    for name, process in started:
        output = process.communicate()[0]
        if process.returncode:
            failed.append(f"{name} exits with {process.returncode}: {output.strip().splitlines()[-1:]}")
    return failed


def difference(one: Path, other: Path) -> Iterator[str]:
    first, second = lines_of(one), lines_of(other)
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
        yield from differing_tensors(one / "checkpoints" / name, other / "checkpoints" / name)


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def differing_tensors(one: Path, other: Path) -> Iterator[str]:
    first, second = contents(one), contents(other)
    if not first:
        yield f"{one.name}: no tensors"
    if first.keys() != second.keys():
        yield f"{one.name}: other names: {sorted(first.keys() ^ second.keys())[:3]}"
    yield from (f"{one.name}: {name}" for name in first.keys() & second.keys() if not same(first[name], second[name]))


def contents(folder: Path) -> dict[str, Any]:
    """All values in a checkpoint's files, by name."""
    return {
        name: value for file in sorted(folder.iterdir()) for name, value in read(file) if name not in NO_LONGER_SAVED
    }


def read(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of all values in a file of a checkpoint."""
    if file.suffix == ".safetensors":
        yield from ((f"{file.name}: {name}", value) for name, value in load_file(file).items())
    elif file.suffix in {".pt", ".pth"}:
        yield from leaves(torch.load(file, map_location="cpu", weights_only=True), file.name)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{name}.{number}")
    else:
        yield name, value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and a == b


if __name__ == "__main__":
    sys.exit(main())
