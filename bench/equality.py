"""Check that two commits train bit-equal: compare metrics and checkpoints of short runs.

    python bench/equality.py main~5                # that commit and HEAD
    python bench/equality.py OLD NEW -only fp32,ddp
    python bench/equality.py OLD NEW -numbers      # values of state.pt that only one commit saves may differ

For a refactoring that must not change results. With each commit, every way of training runs once on the digits, once
from a checkpoint that it wrote itself, and once more from a checkpoint of that resumed run: a choice that a checkpoint
does not keep shows only there. Each commit uses the ways of its own equality_ways.py, so that one whose setting was
renamed is compared under its name. Exits with 1 if anything differs.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import keystr, tree_flatten_with_path

ROOT = Path(__file__).resolve().parents[1]
STARTED = 6
RESUMED = 10
UPDATES = 14
"""Updates before a run is resumed, before it is resumed again, and in all."""
SHOWN = 8
"""Differences of each kind that are printed."""

NUMBERS_OF_META = ("epoch", "epoch_finished", "update", "metrics", "best")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", default="HEAD", help="another commit (default HEAD)")
    parser.add_argument("-only", help="some of the ways, such as fp32,ddp (default: all that both commits have)")
    parser.add_argument("-numbers", action="store_true", help="leave out values of state.pt that only one commit saves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old, new = (check_out(name, Path(folder)) for name in (given.old, given.new))
        for one, other in ((old, new), (new, old)):
            if missing := [name for name in one.ways if name not in other.ways]:
                print(f"only {one.name} has {', '.join(missing)}", flush=True)
        both = [name for name in new.ways if name in old.ways]
        names = given.only.split(",") if given.only else both
        if unknown := set(names) - set(both):
            parser.error(f"not ways of both commits: {', '.join(sorted(unknown))}; these are: {', '.join(both)}")
        finish([(old, old.train((), 1, old.made / "teacher", UPDATES))])
        shutil.copytree(old.made / "teacher", new.made / "teacher")
        for side in (old, new):
            side.make_materials(side.made)
        differing = 0
        for name in names:
            try:
                differences = list(compare(name, old, new, given.numbers))
            except RuntimeError as error:
                differences = [f"failed: {error}"]
            print("\n    ".join([f"{name:14} {'DIFFERS' if differences else 'equal'}", *differences]), flush=True)
            differing += bool(differences)
    print(f"{differing} of {len(names)} ways differ.")
    return int(differing > 0)


@dataclass
class Commit:
    """A commit that is checked out, the folders of its runs and of its materials, and what its equality_ways.py has."""

    name: str
    code: Path
    runs: Path
    made: Path
    ways: dict[str, Any]
    make_materials: Callable[[Path], None]

    def train(self, words: tuple[str, ...], processes: int, run: Path, updates: int) -> subprocess.Popen[str]:
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        where = ("-cfg", "configs/vit_digits.yaml", "-device", "cpu", "-output", str(run))
        settings = ("KEEP_LAST=0", "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={updates}")
        return subprocess.Popen(
            [sys.executable, script, *where, *words, *(("-ngpus", str(processes)) if processes > 1 else ()), *settings],
            cwd=self.code,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def check_out(name: str, folder: Path) -> Commit:
    """Extract a commit's files to a folder of their own. Both commits run in this Python environment."""
    sha = subprocess.check_output(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT, text=True).strip()
    place = folder / f"{len(list(folder.iterdir()))}-{sha[:9]}"
    code = place / "code"
    code.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", sha], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(code)], input=packed, check=True)
    ways = [code / folder / "equality_ways.py" for folder in ("bench", "scripts/dev")]  # older commits: the latter
    own = runpy.run_path(str(next(file for file in ways if file.is_file())))
    return Commit(sha[:9], code, place / "runs", place / "made", own["WAYS"], own["make_materials"])


def compare(name: str, old: Commit, new: Commit, only_numbers: bool) -> Iterator[str]:
    """Differences between the commits' runs of one way; both commits' runs train concurrently."""
    stages = (
        ("from scratch", f"{name}-scratch", UPDATES),
        ("started", name, STARTED),
        ("resumed", name, RESUMED),
        ("resumed again", name, UPDATES),
    )
    for label, run, updates in stages:
        started = []
        for side in (old, new):
            way = side.ways[name]
            again = label.startswith("resumed")
            words = tuple(word.format(made=side.made) for word in way.words) + (("-resume", "auto") if again else ())
            processes = (way.later or way.processes) if again else way.processes
            started.append((side, side.train(words, processes, side.runs / run, updates)))
        finish(started)
        yield from (
            f"{label}: {line}"
            for line in islice(differing_numbers(old.runs / run, new.runs / run, only_numbers), SHOWN)
        )


def finish(started: list[tuple[Commit, subprocess.Popen[str]]]) -> None:
    """Wait for runs that train concurrently."""
    for text, (side, process) in zip([process.communicate()[0] for _, process in started], started, strict=True):
        if process.returncode:
            raise RuntimeError(f"{side.name} exits with {process.returncode}: {text.strip().splitlines()[-3:]}")


def differing_numbers(one: Path, other: Path, only_numbers: bool) -> Iterator[str]:
    """Differences in metrics.jsonl and in the checkpoints.

    With `only_numbers`, values of state.pt that only one commit saves are left out: a resumed run shows what they did.
    """
    first, second = (_metrics(run) for run in (one, other))
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
        first, second = (_contents(run / "checkpoints" / name) for run in (one, other))
        if not any(isinstance(value, torch.Tensor) for value in first.values()):
            yield f"{name}: no tensors"
        names = {key for key in first.keys() ^ second.keys() if not (only_numbers and key.startswith("state.pt"))}
        if names:
            yield f"{name}: other names: {sorted(names)[:3]}"
        yield from (f"{name}: {key}" for key in first.keys() & second.keys() if not _same(first[key], second[key]))


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "perf"} for line in lines]


def _contents(folder: Path) -> dict[str, Any]:
    """All values in a checkpoint's files, by name."""
    values: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            values |= {f"{file.name}: {name}": value for name, value in load_file(file).items()}
        elif file.suffix in {".pt", ".pth"}:
            values |= _leaves(torch.load(file, map_location="cpu", weights_only=True), file.name)
        elif file.name == "meta.json":
            meta = json.loads(file.read_text(encoding="utf-8"))
            values |= _leaves({key: meta.get(key) for key in NUMBERS_OF_META}, file.name)
    return values


def _leaves(value: Any, name: str) -> dict[str, Any]:
    return {f"{name}{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(value)[0]}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and a == b


if __name__ == "__main__":
    sys.exit(main())
