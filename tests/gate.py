"""Which tests a run selects and what it must show: slices, tests of a GPU, a full run on record, no unknown skips.

A plugin of pytest, loaded by tests/conftest.py; tests/README.md explains the options.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "results" / "tests.json"
SLICES = 16
"""One takes about five minutes on two cores."""
SLOW_SECONDS = 1800
"""A slow test may take this long; pyproject.toml limits the others."""
SECONDS_BETWEEN_LINES = 60
GPU_TESTS_ON = os.environ.get("VITAMP_GPU_TESTS_ON", "cuda")
"""The device of the tests that need a GPU. `cpu` shows mistakes in the tests, and nothing of what a GPU does."""

# What a machine may lack and still pass the gate. Any other skip is a test that nobody runs.
ALLOWED_SKIPS = {
    r"\bGPUs?\b|\bTF32\b": "CI has no GPU; others have one, or an older one; the opposite case is tested there",
    r"\broot\b": "either root runs the tests or somebody else: no machine runs both kinds at once",
    r"\bno (network|mount) namespaces\b|\btmpfs\b": "containers may forbid namespaces and mounts",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vitamp")
    group.addoption("--slice", type=int, metavar="N", help=f"leave out the slow tests but slice N modulo {SLICES}")
    group.addoption("--gpu", action="store_true", help="run only the tests that need a GPU")
    group.addoption("--timing", choices=("only", "none"), help="run only the tests that judge by the clock, or none")
    group.addoption("--all", action="store_true", help=f"run every test; write {RECORD.relative_to(ROOT)}")
    group.addoption("--forbid-skips", action="store_true", help="fail on a skip that tests/gate.py does not allow")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist; its controller reports
        return
    if config.getoption("--gpu") and GPU_TESTS_ON == "cuda" and not _sees_gpu():
        raise pytest.UsageError("--gpu: torch sees no GPU here. VITAMP_GPU_TESTS_ON=cpu runs what can run on a CPU.")
    if config.getoption("--all"):
        config.pluginmanager.register(FullRun(config), "vitamp-full-run")
    if config.getoption("--forbid-skips"):
        config.pluginmanager.register(NoUnknownSkips(), "vitamp-no-unknown-skips")


def pytest_report_header(config: pytest.Config) -> str | None:
    number = config.getoption("--slice")
    if number is None:
        return None
    return f"slow tests: slice {number % SLICES} of {SLICES} (again: bash scripts/test.sh --slice {number % SLICES})"


@pytest.hookimpl(trylast=True)  # after the folders' own hooks, which mark tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not is_selected(item, config)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_selected(item, config)]
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def is_selected(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the options of this plugin leave a test in."""
    number, timing = config.getoption("--slice"), config.getoption("--timing")
    if config.getoption("--gpu") and item.get_closest_marker("gpu") is None:
        return False
    if timing is not None and (timing == "only") != (item.get_closest_marker("timing") is not None):
        return False
    return number is None or in_slice(item, number)


def in_slice(item: pytest.Item, number: int) -> bool:
    """Whether a slice runs this test: by its name, so that a new test moves no other one to another slice."""
    if item.get_closest_marker("slow") is None or item.get_closest_marker("every_slice") is not None:
        return True
    return zlib.crc32(item.nodeid.encode()) % SLICES == number % SLICES


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def is_allowed(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


class NoUnknownSkips:
    """Fails a run in which a test was skipped for a reason that is not in ALLOWED_SKIPS."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._see(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._see(report)

    def _see(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and not is_allowed(reason_of(report)):
            self._found[reason_of(report)].append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._found:
            return
        terminalreporter.section("skips that tests/gate.py does not allow", red=True)
        for reason, tests in self._found.items():
            terminalreporter.write_line(f"{reason}: {len(tests)} tests, {tests[0]} among them")
        terminalreporter.write_line("Install what is missing, or add the reason to ALLOWED_SKIPS.")


class FullRun:
    """Prints how far a run of all tests is, once a minute, and writes how long each file and slow test took."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._line = time.monotonic()
        self._outcomes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slow: set[str] = set()
        self._collected = 0

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = self._collected or len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        now = time.monotonic()
        if now - self._line >= SECONDS_BETWEEN_LINES:
            self._line = now
            self._print(f"{len(self._seconds)} of {self._collected} tests after {(now - self._began) / 60:.0f} min")

    def pytest_sessionfinish(self) -> None:
        files: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._seconds.items():
            files[test.partition("::")[0]] += seconds
        record = {
            **_circumstances(self._config),
            "outcomes": dict(sorted(self._outcomes.items())),
            "seconds": round(time.monotonic() - self._began),
            "seconds_of_files": _longest_first(files),
            "seconds_of_slow_tests": _longest_first({test: self._seconds[test] for test in self._slow}),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self) -> None:
        self._print(f"durations written to {RECORD.relative_to(ROOT)}")

    def _print(self, text: str) -> None:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._outcomes.items()))
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"tests: {text}; {outcomes}")


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _circumstances(config: pytest.Config) -> dict[str, Any]:
    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "pytest": pytest.__version__},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "workers": config.getoption("numprocesses", default=None) or 1,
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _longest_first(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(took, 1) for name, took in sorted(seconds.items(), key=lambda pair: -pair[1])}
