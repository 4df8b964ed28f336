"""The options of tests/gate.py: slices of the slow tests, and skips that fail a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.gate import SLICES, NoUnknownSkips, in_slice, is_allowed


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
    ("reason", "allowed"),
    [
        ("there is no GPU here", True),
        ("root may write everywhere", True),
        ("this CPU has no AMX (Intel Xeon has it from Sapphire Rapids on)", True),
        ("no network namespaces here: Operation not permitted", True),
        ("this CPU has no AVX-512, which VITAMP_EMULATED_TILES needs", False),
        ("munged, slurmctld: not installed (apt install slurmd)", False),
        ("no Chromium is installed (apt-get install chromium)", False),
        ("could not import 'pyarrow'", False),
    ],
)
def test_only_skips_for_what_ci_cannot_have_are_allowed(reason: str, allowed: bool) -> None:
    assert is_allowed(reason) == allowed


@pytest.mark.parametrize(("reason", "code"), [("there is no GPU here", 0), ("zsh is not installed", 1)])
def test_an_unknown_skip_fails_the_run(reason: str, code: int) -> None:
    rule, session = NoUnknownSkips(), cast(Any, SimpleNamespace(exitstatus=pytest.ExitCode.OK))
    skipped = SimpleNamespace(skipped=True, longrepr=("test_x.py", 1, f"Skipped: {reason}"), nodeid="test_x.py::test_a")
    rule.pytest_runtest_logreport(cast(Any, skipped))
    rule.pytest_sessionfinish(session)
    assert session.exitstatus == code
