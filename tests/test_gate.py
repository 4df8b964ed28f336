"""The gate: slices of the slow tests, tests of a GPU, skips that fail a run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.gate import SLICES, NoUnknownSkips, in_slice, is_selected


def item(name: str, *marks: str) -> pytest.Item:
    found = SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark if mark in marks else None)
    return cast(pytest.Item, found)


def test_a_slow_test_is_in_one_slice_and_other_tests_in_all() -> None:
    slow = [item(f"tests/test_x.py::test_{number}", "slow") for number in range(200)]
    chosen = [[test for test in slow if in_slice(test, number)] for number in range(SLICES)]
    assert sum(map(len, chosen)) == len(slow)
    assert all(chosen), "no slice is empty"
    assert all(in_slice(item("a"), number) for number in range(SLICES))
    assert all(in_slice(item("a", "slow", "every_slice"), number) for number in range(SLICES))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, "a gpu timing both"),
        ({"--gpu": True}, "gpu both"),
        ({"--gpu": True, "--timing": "none"}, "gpu"),
        ({"--gpu": True, "--timing": "only"}, "both"),
        ({"--timing": "none"}, "a gpu"),
    ],
)
def test_gpu_and_timing_select_by_marker(options: dict[str, object], left: str) -> None:
    config = cast(pytest.Config, SimpleNamespace(getoption=options.get))
    tests = [item("a"), item("gpu", "gpu"), item("timing", "timing"), item("both", "gpu", "timing")]
    assert [test.nodeid for test in tests if is_selected(test, config)] == left.split()


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("there is no GPU here", True),
        ("root may write everywhere", True),
        ("no network namespaces here: Operation not permitted", True),
        ("munged, slurmctld: not installed (apt install slurmd)", False),
    ],
)
def test_only_skips_for_what_ci_cannot_have_are_allowed(reason: str, allowed: bool) -> None:
    rule, session = NoUnknownSkips(), cast(Any, SimpleNamespace(exitstatus=pytest.ExitCode.OK))
    skipped = SimpleNamespace(skipped=True, longrepr=("test_x.py", 1, f"Skipped: {reason}"), nodeid="test_x.py::test_a")
    rule.pytest_runtest_logreport(cast(Any, skipped))
    rule.pytest_sessionfinish(session)
    assert session.exitstatus == (0 if allowed else 1)
