"""scripts/dev/mutate.py: which mutants there are, which tests judge them, and what counts as caught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.dev.mutants import Mutant, choose, find_line, mutants_of
from scripts.dev.mutate import CAUGHT, MISSING, SURVIVED, UNFINISHED, Judge, Outcome, read_mutants, record, summary

SOURCE = '''\
def price(items: list[int], limit: int | None = 3) -> int:
    """Not 1 + 1."""
    total: int = sum(items) + 10
    if limit and total > limit * 2:
        print(f"{total} is over {limit + 1}")
        raise ValueError("more than " + str(5))
    return total if total >= 0 else -total
'''
AFTER = {
    "sign": ["total: int = sum(items) - 10"],
    "constant": [
        "total: int = sum(items) + 20",
        "if limit and total > limit * 4:",
        "return total if total >= 1 else -total",
    ],
    "comparison": ["if limit and total <= limit * 2:", "return total if total < 0 else -total"],
    "condition": ["if not (limit and total > limit * 2):"],
    "call": ["pass"],
    "return": ["return None"],
}
TEST = """\
import time

from engine.shop import price

def test_sum():
    assert price([1, 2], None) == 13

def test_that_always_fails():
    assert False

def test_that_hangs_without_a_result():
    if price([1, 2], None) is None:
        time.sleep(600)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A commit with one room."""
    for name, text in {"engine/shop.py": SOURCE, "tests/engine/test_shop.py": TEST, "conftest.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def mutant(kind: str, number: int = 0) -> Mutant:
    return next(one for one in mutants_of(SOURCE, "engine/shop.py") if one.after == AFTER[kind][number])


def test_each_kind_changes_one_line_of_a_function() -> None:
    found = list(mutants_of(SOURCE, "engine/shop.py"))
    assert {kind: sorted(one.after for one in found if one.kind == kind) for kind in AFTER} == {
        kind: sorted(lines) for kind, lines in AFTER.items()
    }
    assert {one.kind for one in found} == set(AFTER)
    assert all(SOURCE.splitlines()[one.line - 1].strip() == one.before for one in found)


def test_mutants_are_chosen_by_the_seed_and_found_by_their_text(
    code: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = choose(code, 2, seed=1)
    assert len(chosen) == 2, "at most two of a file"
    assert chosen == choose(code, 2, seed=1)
    assert choose(code, 9, 1, also={}) == []
    moved = tmp_path_factory.mktemp("older")
    (moved / "tools").mkdir()
    (moved / "tools" / "till.py").write_text("\n\n" + SOURCE, encoding="utf-8")
    assert find_line(moved, mutant("sign")) == ("tools/till.py", 5)
    (moved / "tools" / "twice.py").write_text(SOURCE, encoding="utf-8")
    assert find_line(moved, mutant("sign")) is None, "in two places"


def test_first_the_tests_that_import_a_module_then_those_of_its_room(code: Path) -> None:
    for name, text in {
        "engine/test_a.py": "",
        "engine/optim/test_b.py": "",
        "cli/test_c.py": "from engine.shop import price",
        "cli/test_shop_window.py": "",
        "gpu/test_d.py": "import engine.shop",
    }.items():
        (code / "tests" / name).parent.mkdir(exist_ok=True)
        (code / "tests" / name).write_text(text, encoding="utf-8")
    tests = Judge(code, 60)
    found = ["tests/engine/test_shop.py", "tests/cli/test_c.py", "tests/cli/test_shop_window.py"]
    assert tests.chosen("engine/shop.py") == [*found, "tests/engine/test_a.py"]
    assert tests.chosen("engine/optim/new.py") == ["tests/engine/optim/test_b.py"]
    assert tests.chosen("engine/report/new.py") == ["tests/engine/test_a.py", "tests/engine/test_shop.py"]


@pytest.mark.slow
def test_a_mutant_is_caught_by_a_test_that_passes_without_it(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.dev.mutate.TEST_SECONDS", 30)
    tests = Judge(code, 60)
    assert tests.judge(mutant("constant", 1)).state == SURVIVED, "one test fails all the same"
    caught = tests.judge(mutant("sign"))
    assert (caught.state, caught.by) == (CAUGHT, "tests/engine/test_shop.py::test_sum")
    assert tests.judge(mutant("sign")._replace(before="total = 0")).state == MISSING
    assert (code / "engine" / "shop.py").read_text(encoding="utf-8") == SOURCE


@pytest.mark.parametrize(("test_seconds", "seconds", "state"), [(3, 100, CAUGHT), (30, 2, UNFINISHED)])
@pytest.mark.slow
def test_a_test_that_hangs_catches_a_mutant_and_too_many_tests_do_not(
    code: Path, monkeypatch: pytest.MonkeyPatch, test_seconds: int, seconds: float, state: str
) -> None:
    only_hangs = TEST.replace("assert price([1, 2], None) == 13", "pass").replace("assert False", "pass")
    (code / "tests" / "engine" / "test_shop.py").write_text(only_hangs, encoding="utf-8")
    monkeypatch.setattr("scripts.dev.mutate.TEST_SECONDS", test_seconds)
    assert Judge(code, seconds).judge(mutant("return")).state == state


def test_results_are_written_and_read_again(tmp_path: Path) -> None:
    outcomes = [
        Outcome(mutant("sign"), CAUGHT, 2.04, "tests/a.py::test_b"),
        Outcome(mutant("call"), SURVIVED, 9.0),
        Outcome(mutant("return"), MISSING),
    ]
    record(tmp_path / "m.json", "abc", outcomes)
    assert read_mutants(tmp_path / "m.json") == [outcome.mutant for outcome in outcomes]
    first = json.loads((tmp_path / "m.json").read_text())["mutants"][0]
    assert (first["result"], first["seconds"], first["by"]) == ("caught", 2.0, "tests/a.py::test_b")
    text = summary(outcomes)
    assert "1 of 2 mutants are caught (50 %); 0 unfinished and 1 missing ones do not count." in text
    assert (
        "| engine/shop.py:3 | sign: `total: int = sum(items) + 10` -> `total: int = sum(items) - 10` | caught" in text
    )
