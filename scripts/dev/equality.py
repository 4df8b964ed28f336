"""Check that two commits train bit-equal: compare losses, checkpoints, recorded choices and logs of short runs.

    python scripts/dev/equality.py main~5                # that commit and HEAD
    python scripts/dev/equality.py OLD NEW -only fp32,ddp
    python scripts/dev/equality.py OLD NEW -numbers      # without records and words of the log

For a refactoring that must not change results. With each commit, every way of training runs once on the digits, once
from a checkpoint that the old commit wrote, and once more from a checkpoint of that resumed run: a choice that a
checkpoint does not keep shows only there. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.dev.equality_runs import Output, differing_numbers, differing_records  # noqa: E402
from scripts.dev.equality_ways import WAYS, Way, make_materials  # noqa: E402

STARTED, RESUMED, UPDATES = 6, 10, 14
"""Updates before a run is resumed, before it is resumed again, and in all."""
SHOWN = 8
"""Differences of each kind that are printed."""


class Commit(NamedTuple):
    """A commit that is checked out, and the folder of its runs."""

    name: str
    code: Path
    runs: Path

    def train(self, words: tuple[str, ...], processes: int, run: Path, updates: int) -> subprocess.Popen[str]:
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        where = ("-cfg", "configs/vit_digits.yaml", "-device", "cpu", "-output", str(run))
        settings = ("KEEP_LAST=0", "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={updates}")
        return subprocess.Popen(
            [sys.executable, script, *where, *words, *("-ngpus", str(processes)) * (processes > 1), *settings],
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
    parser.add_argument("-numbers", action="store_true", help="compare only numbers, not records and words of the log")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"unknown ways: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        old, new = (checked_out(name, Path(folder)) for name in (given.old, given.new))
        made = Path(folder) / "made"
        _finish([(old, made / "teacher", old.train((), 1, made / "teacher", UPDATES))])
        make_materials(made)
        differing = sum(_report(name, Pair(old, new, made, given.numbers)) for name in names)
    print(f"{differing} of {len(names)} ways differ.")
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


def _report(name: str, pair: Pair) -> bool:
    """Compare one way, and print what differs."""
    try:
        differences = list(pair.compare(name, WAYS[name]))
    except RunError as error:
        differences = [f"failed: {error}"]
    print(f"{name:14} {'DIFFERS' if differences else 'equal'}", flush=True)
    for line in differences:
        print(f"    {line}", flush=True)
    return bool(differences)


class RunError(Exception):
    """A run exited with an error."""


class Pair(NamedTuple):
    """Two commits, the folder of what their runs share, and whether only numbers are compared."""

    old: Commit
    new: Commit
    made: Path
    only_numbers: bool

    def compare(self, name: str, way: Way) -> Iterator[str]:
        words = tuple(word.format(made=self.made) for word in way.words)
        later = (*words, "-resume", "auto")
        yield from self._train("from scratch", words, way.processes, f"{name}-scratch", UPDATES)
        start = self.old.runs / f"{name}-start"
        _finish([(self.old, start, self.old.train(words, way.processes, start, STARTED))])
        for side in (self.old, self.new):
            shutil.copytree(start, side.runs / name)
        yield from self._train("resumed", later, way.later or way.processes, name, RESUMED)
        yield from self._train("resumed again", later, way.later or way.processes, name, UPDATES)

    def _train(self, label: str, words: tuple[str, ...], processes: int, run: str, updates: int) -> Iterator[str]:
        """Differences between runs of both commits, which train concurrently."""
        sides = [(side, side.runs / run) for side in (self.old, self.new)]
        one, other = _finish([(side, place, side.train(words, processes, place, updates)) for side, place in sides])
        yield from (f"{label}: {line}" for line in islice(differing_numbers(one.folder, other.folder), SHOWN))
        if not self.only_numbers:
            yield from (f"{label}: record: {line}" for line in islice(differing_records(one, other), SHOWN))


def _finish(started: list[tuple[Commit, Path, subprocess.Popen[str]]]) -> list[Output]:
    """Wait for runs that train concurrently."""
    outputs = []
    for side, run, process in started:
        printed = process.communicate()[0]
        if process.returncode:
            raise RunError(f"{side.name} exits with {process.returncode}: {printed.strip().splitlines()[-3:]}")
        outputs.append(Output(run, printed, {str(side.runs): "RUNS", str(side.code): "CODE"}))
    return outputs


if __name__ == "__main__":
    sys.exit(main())
