"""Which tests a run selects and what it must show: slices, tests of a GPU, no unknown skips.

A plugin of pytest, loaded by tests/conftest.py; tests/README.md explains the options.
"""

import os
import re
import zlib
from collections import defaultdict
from typing import Any

import pytest

SLICES = 16
"""One takes about five minutes on two cores."""
SLOW_SECONDS = 1800
"""A slow test may take this long; pyproject.toml limits the others."""
GPU_TESTS_ON = os.environ.get("VITAMP_GPU_TESTS_ON", "cuda")
"""The device of the tests that need a GPU. `cpu` shows mistakes in the tests, and nothing of what a GPU does."""

# What a machine may lack and still pass the gate. Any other skip is a test that nobody runs.
ALLOWED_SKIPS = {
    r"\bGPUs?\b|\bTF32\b": "CI has no GPU; others have one, or an older one; the opposite case is tested there",
    r"\broot\b": "either root runs the tests or somebody else: no machine runs both kinds at once",
    r"\bmlflow\b": "it brings a web server and 40 packages; elsewhere a stand-in for its client is tested",
    r"\bno (network|mount) namespaces\b|\btmpfs\b": "containers may forbid namespaces and mounts",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vitamp")
    group.addoption("--slice", type=int, metavar="N", help=f"leave out the slow tests but slice N modulo {SLICES}")
    group.addoption("--gpu", action="store_true", help="run only the tests that need a GPU")
    group.addoption("--timing", choices=("only", "none"), help="run only the tests that judge by the clock, or none")
    group.addoption("--all", action="store_true", help="run every test")
    group.addoption("--forbid-skips", action="store_true", help="fail on a skip that tests/gate.py does not allow")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist; its controller reports
        return
    if config.getoption("--gpu") and GPU_TESTS_ON == "cuda" and not _sees_gpu():
        raise pytest.UsageError("--gpu: torch sees no GPU here. VITAMP_GPU_TESTS_ON=cpu runs what can run on a CPU.")
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


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
