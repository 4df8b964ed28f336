"""benchmark_amp.py: contenders alternate, a -json file is resumed, and failures are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.benchmark_amp.command import main
from tools.benchmark_amp.measure import measure
from tools.benchmark_amp.report import lines, markdown
from tools.benchmark_amp.results import AGAIN, Metrics, Results
from tools.benchmark_amp.table import Contender, Machine, Plan, Section, Table
from tools.common.turns import Budget
from utils.errors import TrainingError, UserError


class Clock:
    """Time that passes only during turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tools.common.turns.time.monotonic", clock.monotonic)
    return clock


class Turns:
    """Contenders with given durations, and the order of their turns."""

    def __init__(self, clock: Clock, **seconds: float) -> None:
        self.order: list[str] = []
        self.closed: list[str] = []
        self._clock = clock
        self.contenders = [
            Contender(n, self._turn(n, s), lambda n=n: self.closed.append(n)) for n, s in seconds.items()
        ]

    def _turn(self, name: str, seconds: float) -> Callable[[], Metrics]:
        def turn() -> Metrics:
            self.order.append(name)
            self._clock.now += seconds
            return {"seconds": seconds + 0.1 * len(self.order)}

        return turn

    def plan(self, rounds: int, **settings: Any) -> Plan:
        return Plan(self.contenders, rounds, settings or {"size": 3}, Machine("a device"), "none")


def _sections(results: Results) -> list[Section]:
    rows = [["", "seconds"], *([name, f"{results.median(name, 'seconds'):.2f}"] for name in results.turns)]
    return [Section("How long", rows, [results.control_line("a", "seconds")])]


TABLE = Table("amp", "", (), lambda _line: Plan([], 0, {}, Machine(""), ""), _sections, lambda _results: [])


def test_every_other_round_is_reversed(clock: Clock) -> None:
    turns = Turns(clock, a=1, b=2, c=3)
    results = measure(TABLE, turns.plan(3), Budget(100), None)
    assert turns.order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert turns.closed == ["a", "b", "c"]
    assert [len(metrics) for metrics in results["turns"].values()] == [3, 3, 3]
    assert not results["cut"]


def test_same_command_resumes_after_the_time_ran_out(clock: Clock, tmp_path: Path) -> None:
    path, first, second = tmp_path / "f.json", Turns(clock, a=1, b=2, c=3), Turns(clock, a=1, b=2, c=3)
    cut = measure(TABLE, first.plan(3), Budget(13.5), path)
    assert first.order == ["a", "b", "c", "c", "b", "a", "a"]
    assert cut["cut"]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written == cut

    whole = measure(TABLE, second.plan(3), Budget(100), path)
    assert second.order == ["b", "c"]
    assert all(whole["turns"][name][: len(metrics)] == metrics for name, metrics in written["turns"].items())
    assert not whole["cut"]
    third = Turns(clock, a=1, b=2, c=3)
    assert measure(TABLE, third.plan(3), Budget(100), path) == whole
    assert third.order == []


def test_resuming_finishes_the_incomplete_round_first(clock: Clock, tmp_path: Path) -> None:
    path, first, second = tmp_path / "f.json", Turns(clock, a=1, b=2), Turns(clock, a=1, b=2)
    measure(TABLE, first.plan(2), Budget(5.5), path)
    assert first.order == ["a", "b", "b"]
    measure(TABLE, second.plan(2), Budget(100), path)
    assert second.order == ["a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"loss": 3}', ["was not written by benchmark_amp.py"]),
        ("{", ["was not written by benchmark_amp.py"]),
        (None, ["-json", "another measurement", "with size 3, not 4"]),
    ],
)
def test_file_of_another_measurement_is_refused(
    clock: Clock, tmp_path: Path, text: str | None, said: list[str]
) -> None:
    path = tmp_path / "f.json"
    if text is None:
        measure(TABLE, Turns(clock, a=1).plan(1), Budget(100), path)
    else:
        path.write_text(text, encoding="utf-8")
    before = path.read_text(encoding="utf-8")
    turns = Turns(clock, a=1)
    with pytest.raises(UserError) as refused:
        measure(TABLE, turns.plan(1, size=4), Budget(100), path)
    assert turns.closed == ["a"], "contenders are closed"
    assert all(word in str(refused.value) for word in [str(path), *said])
    assert path.read_text(encoding="utf-8") == before


def test_failed_contender_is_reported_and_not_retried(clock: Clock) -> None:
    turns, tried = Turns(clock, a=1), []
    failing = Contender("b", lambda: tried.append(1) or {"failed": "out of memory"})
    results = measure(TABLE, Plan([*turns.contenders, failing], 3, {}, Machine("a device"), "none"), Budget(100), None)
    assert (len(tried), turns.order) == (1, ["a", "a", "a"])
    with pytest.raises(TrainingError, match="out of memory"):
        measure(TABLE, Plan([failing], 3, {}, Machine("a device"), "none"), Budget(100), None)
    results["left_out"] = {"c": "this CPU has none", "d": "this CPU has none"}
    results["turns"].pop("b")
    output = "\n".join(lines(TABLE, results))
    assert "not measured: `c`, `d`: this CPU has none" in output


def test_no_time_left_is_an_error(clock: Clock) -> None:
    with pytest.raises(TrainingError, match="-budget_min"):
        measure(TABLE, Turns(clock, a=1).plan(1), Budget(-1), None)


def test_interrupt_keeps_finished_turns_in_the_file(clock: Clock, tmp_path: Path) -> None:
    path, turns = tmp_path / "f.json", Turns(clock, a=1)

    def interrupted() -> Metrics:
        raise KeyboardInterrupt

    plan = Plan([*turns.contenders, Contender("b", interrupted)], 2, {}, Machine("a device"), "none")
    with pytest.raises(KeyboardInterrupt):
        measure(TABLE, plan, Budget(100), path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["turns"]["a"]) == 1
    assert turns.closed == ["a"]


def test_report_has_command_machine_date_and_noise(clock: Clock) -> None:
    words = ["amp", "-iters", "3", "-json", "f.json", "--budget_min=4", "DATA.CACHE=/x", "-amp"]
    results = measure(TABLE, Turns(clock, **{"a": 1, "a" + AGAIN: 2}).plan(1), Budget(100), None, words)
    for output in ("\n".join(lines(TABLE, results)), markdown(TABLE, results, "LINK/f.json")):
        assert "python scripts/benchmark_amp.py amp -iters 3 -amp" in output
        assert "-json" not in output
        assert f"a device, clock {results['clock_mhz'][0]} to" in output or "clock unknown" in output
        assert f"torch {results['versions']['torch']}" in output
        assert results["date"] in output
        assert (
            "control: `a` against itself: 2.00 (2.00 to 2.00); ratios within this range are noise" in output
        )  # 2.2 / 1.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["amps"], ["amps", "Did you mean amp?"]),
        (
            ["all"],
            ["this table was removed", "for table in amp precisions simplenet scaling timm startup; do python"],
        ),
        (["amp", "-iters", "0"], ["-iters 0", "from 1"]),
        (["amp", "-budget_min", "no"], ["-budget_min no", "above 0"]),
        (["amp", "-json", "a.txt"], ["-json a.txt", "a.json"]),
        (["amp", "-eval"], ["-eval", "leave it out, since the tool trains"]),
        (["amp", "-batch_size", "auto"], ["BATCH_SIZE auto", "give a number"]),
        (["precisions", "-modes", "bf17"], ["'bf17'", "Did you mean bf16"]),
        (["precisions", "-modes", "tf32"], ["-modes tf32", "Ampere"]),
        (["scaling", "-axes", "batch,images"], ["'images'", "Did you mean image"]),
        (["scaling", "-batches", "1,b"], ["-batches 1,b", "1,2,4"]),
        (["scaling", "-model", "vit_huge_patch14_224", "-image_size", "32"], ["not divisible"]),
        (["startup", "-cfg", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]) -> None:
    assert main([*words, *(["-device", "cpu"] if "-cfg" not in words else [])]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in said), output


def test_help_lists_tables_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["-h"], ["amp", "startup"]), (["scaling", "-h"], ["-axes A,B", "-budget_min M"])):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        output = capsys.readouterr().out
        assert all(word in output for word in said), output
