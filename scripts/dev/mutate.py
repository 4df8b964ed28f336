"""Count the mistakes that the fast tests notice: change one line of the product at a time, and run its room's tests.

    python scripts/dev/mutate.py -json now.json                                 # 60 mutants of HEAD
    python scripts/dev/mutate.py -json now.json -also OLD                       # of lines that the commit OLD has, too
    python scripts/dev/mutate.py -list now.json -commit OLD -json before.json   # the same mutants, with OLD's tests

A mutant is caught when a test fails, or hangs, that passes without it. It is only given the tests of its room
(tests/engine/optim for engine/optim/clip.py, the parent folder's where a room has none) and those that import its
module or have its name: a survivor may still be caught elsewhere, or change nothing that anybody can see. The commits
are extracted to a temporary folder and run in this Python environment; the JSON file is written after each mutant.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.dev.equality import checked_out  # noqa: E402
from scripts.dev.mutants import ROOMS, Mutant, choose, find_line, mutated, product_lines  # noqa: E402

FORK = multiprocessing.get_context("fork")
for library in ("timm", "torch.distributed", "torchvision.transforms.v2", "pydantic", "safetensors.torch"):
    importlib.import_module(library)  # once for all mutants: it takes seconds

OURS = {"scripts", "tests", *ROOMS}
OUTPUT = "output"
CAUGHT, SURVIVED, UNFINISHED, MISSING = "caught", "survived", "unfinished", "missing"
TEST_SECONDS = 100
"""A test that takes longer hangs."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
OF_NO_ROOM = {"gpu", "launch"}
"""Folders of tests that need more than this machine may have, or minutes."""
MARK = "VITAMP_MUTANT"
"""Environment variable by which the processes of a mutant's tests are found."""


class Outcome(NamedTuple):
    """What became of a mutant; `by`: the test that failed, or why there is no result."""

    mutant: Mutant
    state: str
    seconds: float = 0.0
    by: str = ""


class Judge:
    """Runs the tests of a commit on mutants of it."""

    def __init__(self, code: Path, seconds: float) -> None:
        self._code, self._seconds = code, seconds
        self._failing: set[str] = set()

    def chosen(self, file: str) -> list[str]:
        """The test files for a file of the product: first those of its name or that import it, here and elsewhere."""
        tests = self._code / "tests"
        folder = tests / Path(file).parent
        while folder != tests and not list(folder.glob("test_*.py")):
            folder = folder.parent
        room = sorted(folder.glob("test_*.py"))
        module = ".".join(Path(file).with_suffix("").parts)
        package, _, name = module.rpartition(".")
        imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        every = sorted(path for path in tests.glob("*/**/test_*.py") if self._is_of_a_room(path))
        importing = [
            path
            for path in every
            if path.stem.startswith(f"test_{name}") or imports.search(path.read_text(encoding="utf-8"))
        ]
        importing.sort(key=lambda path: path.parent != folder)
        return [str(path.relative_to(self._code)) for path in dict.fromkeys(importing + room)]

    def _is_of_a_room(self, path: Path) -> bool:
        return path.relative_to(self._code).parts[1] not in OF_NO_ROOM

    def judge(self, mutant: Mutant) -> Outcome:
        """Run the tests of a mutant's room with it; a test that fails without it, too, does not count."""
        place = find_line(self._code, mutant)
        if place is None:
            return Outcome(mutant, MISSING, by="its line is not in this commit")
        path, before = self._code / place.file, (self._code / place.file).read_text(encoding="utf-8")
        began = time.monotonic()
        try:
            while True:
                path.write_text(mutated(before, mutant, place.line), encoding="utf-8")
                failed = self._run(self.chosen(place.file), self._seconds - (time.monotonic() - began))
                if failed is None:
                    return Outcome(mutant, UNFINISHED, time.monotonic() - began, "no test failed within the time limit")
                if not failed:
                    return Outcome(mutant, SURVIVED, time.monotonic() - began)
                if failed in self._failing:  # a file that cannot be imported, which --deselect does not leave out
                    return Outcome(
                        mutant, UNFINISHED, time.monotonic() - began, f"{failed} fails without the mutant as well"
                    )
                path.write_text(before, encoding="utf-8")
                took = time.monotonic() - began
                if self._run([failed], max(self._seconds, 3 * TEST_SECONDS)) == "":
                    return Outcome(mutant, CAUGHT, took, failed)
                self._failing.add(failed)
        finally:
            path.write_text(before, encoding="utf-8")

    def _run(self, tests: list[str], seconds: float) -> str | None:
        """The test that fails or hangs, "" if all pass, None if time is up."""
        with tempfile.TemporaryDirectory() as place:
            words = ["-x", "-q", "-rfE", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
            words += [f"--timeout={TEST_SECONDS}", f"--basetemp={place}/t", *tests]
            words += [word for test in sorted(self._failing) for word in ("--deselect", test)]
            process = FORK.Process(target=be_pytest, args=(words, self._code, place))
            process.start()
            try:
                process.join(max(seconds, 1))
                code = process.exitcode
            finally:  # after Ctrl-C, too
                process.kill()
                end_processes(place)
                process.join()
            if code is None:
                return None
            return failed_test((Path(place) / OUTPUT).read_text(encoding="utf-8", errors="replace"), code)


def be_pytest(words: list[str], code: Path, place: str) -> None:
    """In a forked process: be `python -m pytest words...` in the folder `code`; libraries are imported already."""
    os.setsid()
    output = os.open(f"{place}/{OUTPUT}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(code)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": place, MARK: place, "COLUMNS": "400"}
    tempfile.tempdir = None
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path = [str(code), *(path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT / "scripts"))]
    sys.path = [path for path in sys.path if Path(path).resolve() != ROOT]
    sys.argv = ["pytest"]
    code_of_exit = pytest.main(words)
    sys.stdout.flush()
    os._exit(code_of_exit)


def failed_test(output: str, code: int) -> str:
    """The test that pytest names in its summary, which a hanging one is in, too."""
    if code in (0, 5):  # 5: no test is left
        return ""
    found = FAILED.search(output)
    if found is None:
        raise RuntimeError(f"pytest exits with {code} and names no test:\n{output[-2000:]}")
    return found.group(1).strip()


def end_processes(place: str) -> None:
    """Kill what tests left behind: a mutant may have broken the end of a run."""
    mark = f"{MARK}={place}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def summary(outcomes: Iterable[Outcome]) -> str:
    """The table, and the fraction of mutants that are caught."""
    outcomes = list(outcomes)
    lines = ["| mutant | change | result | s | by |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        mutant = outcome.mutant
        change = f"{mutant.kind}: `{mutant.before}` -> `{mutant.after}`".replace("|", "\\|")
        lines.append(
            f"| {mutant.file}:{mutant.line} | {change} | {outcome.state} | {outcome.seconds:.0f} | {outcome.by} |"
        )
    count = Counter(outcome.state for outcome in outcomes)
    judged = count[CAUGHT] + count[SURVIVED]
    percent = f" ({100 * count[CAUGHT] / judged:.0f} %)" if judged else ""
    lines.append(f"\n{count[CAUGHT]} of {judged} mutants are caught{percent}; ")
    lines[-1] += f"{count[UNFINISHED]} unfinished and {count[MISSING]} missing ones do not count."
    return "\n".join(lines)


def record(path: Path, commit: str, outcomes: list[Outcome]) -> None:
    rows: list[dict[str, Any]] = [
        outcome.mutant._asdict() | {"result": outcome.state, "seconds": round(outcome.seconds, 1), "by": outcome.by}
        for outcome in outcomes
    ]
    path.write_text(json.dumps({"commit": commit, "mutants": rows}, indent=1) + "\n", encoding="utf-8")


def read_mutants(path: Path) -> list[Mutant]:
    rows = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return [Mutant(**{name: row[name] for name in Mutant._fields}) for row in rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-commit", default="HEAD", help="commit whose code and tests are used (default HEAD)")
    parser.add_argument("-also", metavar="COMMIT", help="choose only lines that this commit has as well")
    parser.add_argument("-list", type=Path, metavar="FILE", help="the mutants of an earlier run")
    parser.add_argument("-json", type=Path, required=True, metavar="FILE", help="where to write the results")
    parser.add_argument("-count", type=int, default=60, help="number of mutants (default 60)")
    parser.add_argument("-seed", type=int, default=0, help="seed of their random choice (default 0)")
    parser.add_argument("-minutes", type=float, default=600, help="start no further mutant after this many minutes")
    parser.add_argument("-seconds", type=float, default=240, help="time limit of the tests of a mutant (default 240)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        commit = checked_out(given.commit, Path(folder))
        if given.list:
            mutants = read_mutants(given.list)
        else:
            also = product_lines(checked_out(given.also, Path(folder)).code) if given.also else None
            mutants = choose(commit.code, given.count, given.seed, also)
        judge, outcomes, began = Judge(commit.code, given.seconds), [], time.monotonic()
        for mutant in mutants:
            if time.monotonic() - began > 60 * given.minutes:
                print(f"{given.minutes:g} minutes are over: {len(mutants) - len(outcomes)} mutants were not run")
                break
            outcomes.append(judge.judge(mutant))
            record(given.json, commit.name, outcomes)
            print(f"{len(outcomes)} of {len(mutants)}: {mutant.file}:{mutant.line} {outcomes[-1].state}", flush=True)
    print(summary(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
